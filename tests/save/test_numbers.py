"""Steps, ranks, sizes and versions are ints, whoever made them; all else is refused before it gets into a key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, InvalidInputError, Publisher
from ckptstore.errors import IncompleteSaveError
from tests.save.runs import WAIT_S, new_url, save, store_of

NO_INTS = (1.0, 1.5, "1", True, np.bool_(True), None, -1, b"1", 2 + 0j)


@pytest.mark.parametrize("number", [n for n in NO_INTS if n is not None], ids=repr)
def test_what_is_no_int_is_refused_with_its_value_and_nothing_is_saved(number: Any) -> None:
    url = new_url()
    with pytest.raises(InvalidInputError, match="resume"):
        ckptstore.begin(url, {"trainer": 1}, resume=number)
    with pytest.raises(InvalidInputError):
        ckptstore.begin(url, {"trainer": number})
    with pytest.raises(InvalidInputError):
        ckptstore.begin(url, {"trainer": 1}, committer=("trainer", number))
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        with pytest.raises(InvalidInputError, match="rank"):
            Checkpointer(inc, role="trainer", rank=number)
        with pytest.raises(InvalidInputError, match="rank"):
            Publisher(inc, role="trainer", rank=number)
    with ckptstore.begin(url, {"trainer": 1}) as inc:
        with pytest.raises(InvalidInputError, match="number"):
            Publisher(inc, role="trainer", rank=0).publish(number, {"w": torch.zeros(1)})
        ckpt = Checkpointer(inc, role="trainer", rank=0)
        with pytest.raises(InvalidInputError, match="step"):
            ckpt.save(number, {"w": torch.zeros(1)})
        with pytest.raises(InvalidInputError, match="policy_version"):
            ckpt.save(3, {"w": torch.zeros(1)}, policy_version=number)
        assert ckpt.save(3, {"w": torch.zeros(1)}).result(WAIT_S).step == 3
    with pytest.raises(InvalidInputError if number != -1 else ckptstore.NoCheckpointError, match="step"):
        ckptstore.open(url).read(number)


@pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3)], ids=str)
def test_ints_of_numpy_and_torch_are_ints(number: Any) -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": number}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=number - 1 - n) for n in range(3)]
        handles = [m.save(number, {"w": torch.zeros(1)}, policy_version=number) for m in members]
        assert [handle.result(WAIT_S).publication for handle in handles] == [(3, None)] * 3
    ckptstore.begin(url, {"trainer": 1}, resume=number).close()
    assert type(ckptstore.open(url).latest().step) is int  # type: ignore[union-attr]  # it was just saved
    assert set(ckptstore.open(url).read(number)) == {"w"}


@pytest.mark.parametrize("roster", [[("trainer", 1)], {"trainer": 10**9}, {7: 1}, None, "trainer"], ids=repr)
def test_a_roster_that_cannot_be_is_refused_at_once(roster: Any) -> None:
    url = new_url()
    with pytest.raises(InvalidInputError):
        ckptstore.begin(url, roster)
    assert not list(store_of(url).list(""))


def test_a_rank_that_cannot_publish_its_state_is_named_to_the_others() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc, ThreadPoolExecutor(2) as pool:
        told = [
            pool.submit(Publisher(inc, role="trainer", rank=rank, timeout_s=30.0).publish, 0, {"w": value})
            for rank, value in enumerate((torch.zeros(1), object()))
        ]
        with pytest.raises(IncompleteSaveError, match=r"trainer/1.*w is a builtins\.object"):
            told[0].result(20.0)
        with pytest.raises(InvalidInputError, match=r"w is a builtins\.object"):
            told[1].result(20.0)


def test_a_save_whose_version_is_no_int_on_one_rank_is_given_up_on_all() -> None:
    url = new_url()
    with ckptstore.begin(url, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        handle = members[0].save(1, {"w": torch.zeros(1)}, policy_version=1)
        with pytest.raises(InvalidInputError, match="policy_version"):
            members[1].save(1, {"w": torch.zeros(1)}, policy_version="1")  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(IncompleteSaveError, match="policy_version"):
            handle.result(WAIT_S)
    save(url, {"w": torch.zeros(1)}, step=2)
