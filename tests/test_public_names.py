"""The public names: complete, imported when first used, the same for type checkers and at run time."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import subprocess
import sys

import pytest

import ckptstore

# Names of ckptstore that a program which only watches a run must be able to use without torch.
HEAVY = ("torch", "pyarrow", "ray", "numpy", "transformers")


def loaded_after(code: str) -> set[str]:
    lines = f"{code}\nimport sys\nprint(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=60
    )
    return set(ended.stdout.split())


def test_importing_ckptstore_imports_nothing_heavy() -> None:
    assert loaded_after("import ckptstore").isdisjoint(HEAVY)


def test_errors_and_dir_need_nothing_heavy() -> None:
    assert loaded_after("import ckptstore\nckptstore.FencedError\ndir(ckptstore)").isdisjoint(HEAVY)


@pytest.mark.parametrize("name", ckptstore.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ckptstore, name).__name__ == name
    assert name in dir(ckptstore)


def test_type_checkers_see_the_same_names() -> None:
    assert ckptstore.__file__ is not None
    with open(ckptstore.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    typed = {
        (node.module, alias.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ckptstore.")
        for alias in node.names
    }
    assert typed == {(home, name) for name, home in ckptstore._HOME.items()}


def test_every_error_is_public() -> None:
    errors = importlib.import_module("ckptstore.errors")
    kinds = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert kinds <= set(ckptstore.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = ckptstore.nothing_like_it


def test_the_package_is_typed() -> None:
    assert importlib.resources.files("ckptstore").joinpath("py.typed").is_file()
