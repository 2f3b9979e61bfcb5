"""A disk that fills up in the middle of any object: the save fails with its reason, all else goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore import Checkpointer, StoreUnavailableError
from tests.save.runs import WAIT_S, bits, save_all


class Disk:
    """Lets `os.writev` fail half-way, and `os.pwritev` at once, for files in folders whose path has `full` in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: str | None = None
        self.failed = 0
        self._writev = os.writev
        self._pwritev = os.pwritev
        monkeypatch.setattr(os, "writev", self.writev)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def writev(self, fd: int, views: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self.full is None or self.full not in path:
            return self._writev(fd, views)
        self.failed += 1
        if os.fstat(fd).st_size == 0 and len(views[0]) > 1:
            return self._writev(fd, [views[0][: len(views[0]) // 2]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwritev(self, fd: int, views: Any, start: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self.full is None or self.full not in path:
            return self._pwritev(fd, views, start)
        self.failed += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def state(rank: int, ranks: int, step: int) -> dict[str, Any]:
    return {
        "w": torch.full((50,), float(step)),
        "mine": ckptstore.Sharded.dim0(torch.full((2,), float(rank + step)), start=2 * rank, size=2 * ranks),
    }


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["/data/", "/parts/", "/index/", "/journal/", "/layouts/", "/run"])
def test_a_full_disk_fails_the_save_and_nothing_else(
    tmp_path: Path, disk: Disk, where: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "/layouts/" and ranks == 1:
        return  # one rank has nobody to exchange layouts with
    monkeypatch.setattr(
        "ckptstore.contribution.OUTCOME_GRACE_S", 0.5
    )  # with a full journal nobody can be told
    folder = tmp_path / "run"
    with ckptstore.begin(folder, {"trainer": ranks}) as inc:
        members = [
            Checkpointer(inc, role="trainer", rank=rank, commit_timeout_s=3.0) for rank in range(ranks)
        ]

        def states(step: int) -> list[dict[str, Any]]:
            named = (
                {"other": torch.ones(step)} if where == "/layouts/" else {}
            )  # a new structure, exchanged anew
            return [state(rank, ranks, step) | named for rank in range(ranks)]

        save_all(members, 1, states(1))
        disk.full = where
        handles = [member.save(2, each) for member, each in zip(members, states(2), strict=True)]
        errors = [failure(handle.result) for handle in handles]
        assert disk.failed
        assert isinstance(errors[0], StoreUnavailableError) and "disk is full" in str(errors[0]), errors
        assert all(errors)
        assert not temporaries(folder)
        run = ckptstore.open(folder)
        assert [info.step for info in run.checkpoints()] == [1] and run.verify().ok
        disk.full = None
        info = save_all(members, 3, states(3))
        assert info.step == 3
        for member in members:
            member.close(WAIT_S)
    run = ckptstore.open(folder)
    assert [info.step for info in run.checkpoints()] == [1, 3] and run.verify(full=True).ok
    assert bits(run.read(3)["w"]) == bits(torch.full((50,), 3.0))
    assert bits(run.read(1)["mine"]) == bits(torch.tensor([1.0, 1, 2, 2] if ranks == 2 else [1.0, 1]))


def failure(result: Callable[[float], Any]) -> Exception | None:
    try:
        result(WAIT_S)
    except Exception as error:
        return error
    return None


def test_a_save_that_failed_for_space_can_be_made_again_at_the_same_step(tmp_path: Path, disk: Disk) -> None:
    with (
        ckptstore.begin(tmp_path / "run", {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0) as ckpt,
    ):
        disk.full = "/data/"
        handle = ckpt.save(1, {"w": torch.ones(4)})
        with pytest.raises(StoreUnavailableError, match="free space"):
            handle.result(WAIT_S)
        disk.full = None
        assert ckpt.save(1, {"w": torch.ones(4)}).result(WAIT_S).id.number == 1
