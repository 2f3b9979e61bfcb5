"""The shape of the library, read from its syntax trees: layers, sizes, and what it never does.

Modules import downward or sideways, never up and never round (imports inside functions may be mutual at one
layer, never upward). A new module is placed in LAYERS first: that is where its level is decided.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ckptstore"
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "tensor",
        "tensors",
        "layout",
        "outline",
        "chunkbase",
        "chunktable",
        "replicaset",
        "iorecord",
        "manifest",
    ),
    (
        *(
            "plan",
            "plan.save",
            "plan.load",
            "plan.share",
            "plan.grid",
            "plan.diff",
            "plan.encode",
            "grouping",
            "elements",
            "cut",
            "replicas",
            "experts",
            "facts",
            "agreement",
            "intervals",
            "ledger",
            "history",
            "skeleton",
        ),
        *("arrangement", "mapping", "tensor_group", "deepseek_v4"),
        *("recovery", "recovery.point", "recovery.machine"),
    ),
    (
        "wire",
        "soundness",
        "tablefile",
        "indexfile",
        "segment",
        *("codec", "codec.base", "codec.zstd", "codec.byteplane", "codec.delta"),
        "interop",
        "interop.torch_digest",
        "interop.torch_hook",
        "interop.torch_signature",
        "interop.torch_tensor",
        "interop.torch_lazy",
        "interop.torch_model",
        "interop.torch_state",
    ),
    (
        "translation",
        "budget",
        *("store", "store.base", "store.memory", "store.collected", "store.direct"),
        *("store.download", "store.filedownload"),
        *("store.file", "store.local", "store.probe"),
        *(
            "store.request",
            "store.connection",
            "store.remote",
            "store.refusal",
            "store.s3",
            "store.partupload",
            "store.filesystem",
        ),
        *(
            "clock",
            "values",
            "held",
            "memoryspan",
            "pieces",
            *("structure", "seen", "seen_tensor", "known"),
            "state",
            "plainvalue",
            "plainleaf",
            "binding",
            "hostmemory",
            "staging",
            "transfer",
            "sources",
            "lazy",
            "snapshot",
            "chunksource",
            "image",
            "digester",
            "journal",
        ),
        "interop.torch_device",
    ),
    (
        "outcome",
        "baseline",
        *("encoder", "writelog", "stream", "chunkwriter", "writer"),
        *("decode", "fill", "fetch", "reader", "damage"),
        "interop.tensorstore",
        "tied",
        "stored_leaves",
        "audit",
        "commit",
        "index",
        "catalog",
        "recovery.launcher",
        "recovery.ray",
        "recovery.detector",
    ),
    (
        "claim",
        "exchange",
        "restore",
        "incarnation",
        "contribution",
        "savehandle",
        "checkpointer",
        "publish",
        "run",
        "difference",
        "recovery.coordinator",
        *("interop.dcp_names", "interop.dcp_items", "interop.dcp_member"),
        "interop.torch_share",
        *("interop.dcp_writer", "interop.dcp_reader", "interop.dcp"),
    ),
    ("", "__main__", "demo.*", "bench.*", "cli.*", "testing.*"),  # "" is ckptstore/__init__.py
)
# A pure module decides from its arguments alone: the same arguments tomorrow give the same answer.
IMPURE = {"threading", "random", "time", "secrets", "concurrent", "asyncio", "socket", "subprocess", "uuid"}
PURE_LAYERS = 2
RUNS_CODE_FROM_FILES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    target: str  # dotted, as imported
    line: int
    at_top: bool  # runs when the module is imported
    for_types: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str  # dotted, without "ckptstore."; "" for the package itself
    path: Path
    text: str
    tree: ast.Module

    @property
    def layer(self) -> int:
        for layer, names in enumerate(LAYERS):
            if self.name in names or f"{self.name.split('.')[0]}.*" in names:
                return layer
        raise AssertionError(f"{self.path}: give this module a layer in {__file__}")

    def imports(self) -> Iterator[Import]:
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        yield from _imports(self.tree, f"ckptstore.{package}".strip("."), at_top=True, for_types=False)


def _imports(node: ast.AST, package: str, *, at_top: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(target=alias.name, line=child.lineno, at_top=at_top, for_types=for_types)
        elif isinstance(child, ast.ImportFrom):
            base = package.rsplit(".", child.level - 1)[0] if child.level else ""
            for alias in child.names:
                target = ".".join(filter(None, (base, child.module, alias.name)))
                yield Import(target=target, line=child.lineno, at_top=at_top, for_types=for_types)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, package, at_top=False, for_types=for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, package, at_top=at_top, for_types=True)
        else:
            yield from _imports(child, package, at_top=at_top, for_types=for_types)


@functools.cache
def modules_of(root: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts)
        found[name] = Module(name=name, path=path, text=text, tree=ast.parse(text, str(path)))
    return found


def own_target(modules: dict[str, Module], target: str) -> str | None:
    """The module of ours that `target` names, or that defines it; None for other packages."""
    if target.split(".")[0] != "ckptstore":
        return None
    name = target.removeprefix("ckptstore").removeprefix(".")
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


# -- the rules; each gives what breaks it, so that the tests below can show that it can fail ------------


def upward_imports(modules: dict[str, Module]) -> list[str]:
    broken = []
    for module in modules.values():
        for each in module.imports():
            target = own_target(modules, each.target)
            if target is not None and modules[target].layer > module.layer:
                broken.append(f"{module.path}:{each.line}: imports {each.target} of a higher layer")
            if target is not None and target.startswith("testing") and not module.name.startswith("testing"):
                broken.append(f"{module.path}:{each.line}: only tests import testing")
    return broken


def cycles(modules: dict[str, Module]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        targets = {
            own_target(modules, each.target)
            for each in module.imports()
            if each.at_top and not each.for_types
        }
        graph[module.name] = {target for target in targets if target is not None and target != module.name}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [f"import round: {' -> '.join(error.args[1])}"]
    return []


def foreign_imports_of_pure_modules(modules: dict[str, Module]) -> list[str]:
    broken = []
    for module in modules.values():
        if module.layer >= PURE_LAYERS:
            continue
        for each in module.imports():
            package = each.target.split(".")[0]
            known = package in sys.stdlib_module_names or package in ("numpy", "ckptstore")
            if not known or package in IMPURE:
                broken.append(f"{module.path}:{each.line}: a pure module imports {each.target}")
    return broken


def early_torch(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{each.line}: {each.target} is imported although the process may have no torch"
        for module in modules.values()
        for each in module.imports()
        if each.target.split(".")[0] == "torch"
        and each.at_top
        and not each.for_types
        and not module.name.startswith(("interop.torch_", "interop.dcp", "demo.", "testing."))
    ]


def too_long(modules: dict[str, Module]) -> list[str]:
    broken = []
    for module in modules.values():
        lines = len(module.text.splitlines())
        if lines > MODULE_LINES_MAX:
            broken.append(f"{module.path}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    broken.append(f"{module.path}:{node.lineno}: {node.name} has {lines} lines")
    return broken


def code_from_files(modules: dict[str, Module]) -> list[str]:
    broken = []
    for module in modules.values():
        for each in module.imports():
            if each.target.split(".")[0] in RUNS_CODE_FROM_FILES:
                broken.append(f"{module.path}:{each.line}: {each.target}")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            said = ast.unparse(node.func)
            keywords = {keyword.arg for keyword in node.keywords}
            if said in ("eval", "exec", "torch.load") or "allow_pickle" in keywords:
                broken.append(f"{module.path}:{node.lineno}: {said}")
    return broken


def swallowed_and_printed(modules: dict[str, Module]) -> list[str]:
    broken = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            where = f"{module.path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                broken.append(f"{where}: bare except")
            printing = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            if printing and module.name.split(".")[0] not in ("cli", "demo"):
                broken.append(f"{where}: the library prints")
    return broken


def asserted_input(modules: dict[str, Module]) -> list[str]:
    """An assert about an argument of a public function: input is refused with an error, also under -O."""
    broken = []
    for module in modules.values():
        if module.name.startswith("testing"):
            continue
        for function in ast.walk(module.tree):
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                continue
            arguments = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)} - {
                "self",
                "cls",
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Assert):
                    names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                    if names & arguments:
                        broken.append(
                            f"{module.path}:{node.lineno}: assert about {sorted(names & arguments)}"
                        )
    return broken


def named_accelerators(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{number}: {line.strip()}"
        for module in modules.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        if "cuda" in line.lower()
    ]


RULES = (
    upward_imports,
    cycles,
    foreign_imports_of_pure_modules,
    early_torch,
    too_long,
    code_from_files,
    swallowed_and_printed,
    asserted_input,
    named_accelerators,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps(rule: object) -> None:
    assert callable(rule)
    broken = rule(modules_of(ROOT))
    assert not broken, "\n".join(broken)


PLANTED = {
    "upward_imports": {"plan/save.py": "from ckptstore.store.base import Store"},
    "cycles": {"tensor.py": "from .layout import Mesh", "layout.py": "from ckptstore import tensor"},
    "foreign_imports_of_pure_modules": {"cut.py": "def f() -> None:\n    import time"},
    "early_torch": {"state.py": "if True:\n    import torch"},
    "too_long": {"wire.py": "def f() -> None:\n" + "    x = 1\n" * 61},
    "code_from_files": {"wire.py": "import numpy as np\nnp.load('a', allow_pickle=True)"},
    "swallowed_and_printed": {"journal.py": "try:\n    x = 1\nexcept:\n    print('lost')"},
    "asserted_input": {"store/memory.py": "def read(key: str) -> None:\n    assert key"},
    "named_accelerators": {"snapshot.py": "x.to('cuda:0')"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_can_fail(tmp_path: Path, rule: object) -> None:
    assert callable(rule)
    for name in ("__init__", "store/__init__", "plan/__init__", "store/base"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("")
    assert not rule(modules_of(tmp_path))
    modules_of.cache_clear()
    for name, text in PLANTED[rule.__name__].items():
        (tmp_path / name).write_text(text)
    assert rule(modules_of(tmp_path))
