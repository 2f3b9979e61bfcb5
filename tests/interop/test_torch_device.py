"""Side streams by torch's own names, on a backend made of Python; and what is copied of tensors that look odd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.interop import torch_device
from ckptstore.interop.torch_tensor import _NAMES
from ckptstore.transfer import parts_of

ROOT = Path(__file__).parents[2]


def saved_by_a_process(url: Path, mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/interop/accelerator_process.py"), str(url), mode],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_accelerator_of_torch_is_copied_by_its_side_stream_with_few_copies(tmp_path: Path) -> None:
    found = saved_by_a_process(tmp_path, "waits")
    assert not found["different"] and found["verified"]
    assert found["sides"] == ["npy:0"] and found["waits"] >= 4  # two saves: a block's event, and the last
    assert found["copies"] <= 10  # of 407 tensors
    assert len(found["said"]) == 1 and "no pinned memory" in found["said"][0]


def test_an_accelerator_without_events_is_copied_by_calls_that_wait_and_says_so_once(tmp_path: Path) -> None:
    found = saved_by_a_process(tmp_path, "none")
    assert not found["different"] and found["verified"]
    assert found["sides"] == [] and found["copies"] >= 400
    assert len(found["said"]) == 1 and "no side stream" in found["said"][0]


def test_a_process_without_accelerator_has_no_streams() -> None:
    if torch.accelerator.current_accelerator() is None:
        assert torch_device.TorchStreams.find() is None


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", _NAMES, ids=str)
def test_words_are_the_bytes_of_the_elements_in_order(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    want = raw.view(6, dtype.itemsize)
    for got, rows in (
        (tensor, want),
        (tensor.view(3, 2).t(), want.view(3, 2, -1).transpose(0, 1)),
        (tensor[::5][:1], want[:1]),
        (tensor[2], want[2:3]),
        (tensor[::2], want[::2]),
    ):
        words = torch_device._words(got)
        assert words.dim() == 1 and words.view(torch.uint8).tolist() == rows.reshape(-1).tolist()


def test_lazy_conjugates_and_negatives_are_taken_where_the_tensor_lies() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    for odd in (tensor.conj(), tensor.conj().imag, tensor[::2].conj()):
        plain = torch.empty(odd.shape, dtype=odd.dtype).copy_(odd)
        assert torch.equal(torch_device._words(odd), plain.view(torch_device._WORDS[odd.element_size()]))


@pytest.mark.parametrize("turned", [False, True])
def test_parts_are_the_bytes_from_a_start(turned: bool) -> None:
    tensor = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5)
    tensor = tensor.transpose(0, 2) if turned else tensor
    flat = tensor.reshape(-1)
    for start in range(0, 60, 7):
        for count in (0, 1, 13, 60 - start):
            count = min(count, 60 - start)
            parts = parts_of(tensor, tuple(tensor.shape), 4 * start, 4 * count)
            joined = torch.cat([part.reshape(-1) for part in parts]) if parts else flat[:0]
            assert torch.equal(joined, flat[start : start + count])
