"""Structures that change between saves: a plan is only ever made from layouts that all ranks exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptstore
from tests.save.runs import WAIT_S, new_url, save_all


def test_a_structure_that_only_some_ranks_changed_is_refused_and_exchanged_again() -> None:
    old: dict[str, Any] = {"w": torch.zeros(3)}
    new: dict[str, Any] = {"w": torch.zeros(3), "added": torch.ones(2)}
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [ckptstore.Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        save_all(members, 1, [old, old])
        handles = [member.save(2, state) for member, state in zip(members, [new, old], strict=True)]
        for handle in handles:
            with pytest.raises(ckptstore.InconsistentCutError, match="changed at step 2"):
                handle.result(WAIT_S)
        save_all(members, 3, [new, new])
        save_all(members, 4, [new, new])
        for member in members:
            member.close(WAIT_S)
    assert [info.step for info in ckptstore.open(url).checkpoints()] == [1, 3, 4]
    assert torch.equal(ckptstore.open(url).read()["added"], torch.ones(2))
