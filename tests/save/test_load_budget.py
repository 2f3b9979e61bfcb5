"""A restore takes no more memory than it was given, and says so before anything is changed if that is too little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, Sharded
from ckptstore import reader as reader_module
from ckptstore.errors import BudgetExceededError
from ckptstore.fetch import Fetcher

WHOLE = torch.arange(3 << 20, dtype=torch.float32).reshape(1536, 2048)  # 12 MiB


@pytest.fixture
def url(tmp_path: Path) -> str:
    text = str(tmp_path / "run")
    with Checkpointer(ckptstore.begin(text, {"trainer": 1}), role="trainer", rank=0) as ckpt:
        ckpt.save(1, {"w": WHOLE, "small": [torch.full((7,), n) for n in range(50)]}).result(60)
    return text


def blank() -> dict[str, object]:
    """A column shard, which is strided in the stored chunk, and small tensors."""
    shard = Sharded(torch.zeros(1536, 100), global_shape=(1536, 2048), offset=(0, 700))
    return {"w": shard, "small": [torch.full((7,), -1) for _ in range(50)]}


@pytest.mark.parametrize("budget", [(12 << 20) + 8192, 16 << 20, 30 << 20, None])
def test_a_restore_stays_within_its_budget(
    url: str, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    marks = list[int]()

    class Watched(Fetcher):
        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            marks.append(self.budget.high_water)
            assert self.budget.leased == 0, "all is given back"

    monkeypatch.setattr(reader_module, "Fetcher", Watched)
    state = blank()
    with Checkpointer(ckptstore.begin(url, {"trainer": 1}, takeover=True), role="trainer", rank=0) as ckpt:
        assert ckpt.restore(state, memory_budget=budget) == 1
    assert isinstance(state["w"], Sharded) and torch.equal(state["w"].tensor, WHOLE[:, 700:800])
    assert isinstance(state["small"], list) and all(
        bool((t == n).all()) for n, t in enumerate(state["small"])
    )
    assert marks and 0 < max(marks) <= (budget or 256 << 20)


def test_too_small_a_budget_is_refused_before_anything_is_changed(url: str) -> None:
    state = blank()
    with (
        Checkpointer(ckptstore.begin(url, {"trainer": 1}, takeover=True), role="trainer", rank=0) as ckpt,
        pytest.raises(BudgetExceededError, match="raise the budget"),
    ):
        ckpt.restore(state, memory_budget=12 << 20)
    assert isinstance(state["w"], Sharded) and not state["w"].tensor.any()
    assert isinstance(state["small"], list) and all(bool((t == -1).all()) for t in state["small"])
