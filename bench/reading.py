"""What a load costs, against what the disk and the page cache give: cold, warm, resharded; and its memory.

Each limit is measured beside the load, in turn, on the same files: direct reads of 16 MiB by one to four readers
(the best counts) with nothing in the page cache, and a copy out of it into memory that is used again. A load is
`restore` of a Checkpointer: opening the index, planning and proving included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckptstore
from bench.rows import Row
from ckptstore import Checkpointer, Sharded
from ckptstore.store.direct import aligned

BLOCK_NBYTES = 16 << 20
TIMES = 5
READERS = (1, 2, 4)
MOE_EXPERTS, MOE_HIDDEN, MOE_WIDTH = (
    105,
    1024,
    704,
)  # 3 matrices an expert: 1.0 GiB at 14 bytes a parameter / 3
SMALL = 20_000


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="ckptstore-bench-") as folder:
        yield from _same_layout("MoE mix", _moe, Path(folder) / "moe")
        yield from _same_layout("20,000 small tensors", _small, Path(folder) / "small")
        yield from _resharded(Path(folder) / "reshard")


def _moe() -> dict[str, Any]:
    """BF16 weights, FP32 master and two FP32 moments of small experts: 1.0 GiB in 1,260 tensors."""
    shape = (MOE_WIDTH // 3, MOE_HIDDEN)
    names = [f"experts.{e}.{w}" for e in range(MOE_EXPERTS) for w in ("gate", "up", "down")]
    kinds = {
        "weights": torch.bfloat16,
        "master": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    return {
        kind: {name: torch.empty(shape, dtype=dtype).normal_() for name in names}
        for kind, dtype in kinds.items()
    }


def _small() -> dict[str, Any]:
    return {f"layers.{n}.w": torch.empty(27_000, dtype=torch.bfloat16).normal_() for n in range(SMALL)}


def _save(url: str, state: dict[str, Any], size: int = 1, rank: int = 0, token: str | None = None) -> None:
    began = token or ckptstore.begin(url, {"trainer": size})
    with Checkpointer(began, role="trainer", rank=rank) as ckpt:
        ckpt.save(1, state).written(300)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "data").rglob("*") if path.is_file())


def _forget(folder: Path) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class _Limits:
    """Reads of all bytes of some files, each reader with a block of its own."""

    def __init__(self, files: list[Path]) -> None:
        self.spans = [(path, at) for path in files for at in range(0, path.stat().st_size, BLOCK_NBYTES)]
        self.nbytes = sum(path.stat().st_size for path in files)
        self.blocks = [aligned(BLOCK_NBYTES) for _ in range(max(READERS))]
        for block in self.blocks:
            block[::4096] = 0

    def direct(self, readers: int) -> None:
        self._read(readers, os.O_RDONLY | os.O_DIRECT, lambda reader, at: self.blocks[reader])

    def cached(self, readers: int, targets: list[Any]) -> None:
        self._read(readers, os.O_RDONLY, lambda _, at: targets[at])

    def _read(self, readers: int, flags: int, into: Callable[[int, int], Any]) -> None:
        fds = {path: os.open(path, flags) for path, _ in self.spans}

        def one(reader: int) -> None:
            for n in range(reader, len(self.spans), readers):
                path, at = self.spans[n]
                os.preadv(fds[path], [into(reader, n)], at)

        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(one, range(readers)))
        for fd in fds.values():
            os.close(fd)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _in_turn(
    calls: Mapping[str, Callable[[], object]], before: Callable[[], object]
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TIMES):
        for name, call in calls.items():
            before()
            taken[name].append(_timed(call))
    return taken


def _spread(times: list[float]) -> str:
    return f"{min(times):.2f} to {max(times):.2f} s"


def _same_layout(what: str, make: Callable[[], dict[str, Any]], folder: Path) -> Iterator[Row]:
    state = make()
    _save(str(folder), state)
    limits = _Limits(_files(folder))
    inc = ckptstore.begin(str(folder), {"trainer": 1}, takeover=True)
    ckpt = Checkpointer(inc, role="trainer", rank=0)
    what = f"{what}, {limits.nbytes / 2**30:.2f} GiB"

    def load() -> None:
        ckpt.restore(state)

    calls = {f"direct {n}": partial(limits.direct, n) for n in READERS}
    cold = _in_turn({**calls, "load": load}, lambda: _forget(folder))
    limit = min(statistics.median(cold[f"direct {n}"]) for n in READERS)
    yield Row(what=f"{what}: direct read", value=limits.nbytes / limit / 1e9, unit="GB/s")
    load_s = statistics.median(cold["load"])
    yield Row(
        what=f"{what}: cold load, verified",
        value=load_s / limit,
        unit="× the direct read",
        at_most=1.10,
        note=_spread(cold["load"]),
    )
    targets = [aligned(BLOCK_NBYTES) for _ in limits.spans]
    limits.cached(1, targets)
    limits.cached(1, targets)
    warm = _in_turn({"copy": lambda: limits.cached(1, targets), "load": load}, lambda: None)
    copy_s, load_s = statistics.median(warm["copy"]), statistics.median(warm["load"])
    yield Row(
        what=f"{what}: copy from the page cache, one thread", value=limits.nbytes / copy_s / 1e9, unit="GB/s"
    )
    yield Row(
        what=f"{what}: warm load, verified",
        value=load_s / copy_s,
        unit="× the copy",
        at_most=1.3,
        note=_spread(warm["load"]),
    )
    ckpt.close()


def _resharded(folder: Path) -> Iterator[Row]:
    """1 GiB cut by rows over 2 ranks, loaded by 3, one after the other: what one rank of 3 reads."""
    shape, count = (3072, 1024), 90
    inc = ckptstore.begin(str(folder), {"trainer": 2})
    ckpts = [Checkpointer(inc.token, role="trainer", rank=rank) for rank in range(2)]

    def shards(rank: int, size: int) -> dict[str, Any]:
        part = shape[0] // size
        return {
            f"w{n}": Sharded.dim0(torch.empty(part, shape[1]).normal_(), start=rank * part, size=shape[0])
            for n in range(count)
        }

    handles = [ckpt.save(1, shards(rank, 2)) for rank, ckpt in enumerate(ckpts)]
    for handle in handles:
        handle.result(300)
    for ckpt in ckpts:
        ckpt.close()
    inc = ckptstore.begin(str(folder), {"trainer": 3}, takeover=True)
    limits = _Limits(_files(folder))
    state = shards(1, 3)  # the middle rank: half of each of the two old shards
    ckpt = Checkpointer(inc, role="trainer", rank=1)
    calls = {f"direct {n}": partial(limits.direct, n) for n in READERS}
    taken = _in_turn({**calls, "load": lambda: ckpt.restore(state)}, lambda: _forget(folder))
    report = ckpt.last_restore
    assert report is not None
    speed = limits.nbytes / min(statistics.median(taken[f"direct {n}"]) for n in READERS)
    yield Row(
        what="2 → 3 ranks, rank 1: bytes of whole chunks",
        value=report.nbytes_read / report.nbytes,
        unit="× the wanted bytes",
    )
    yield Row(
        what="2 → 3 ranks, rank 1: cold load, verified",
        value=statistics.median(taken["load"]) / (report.nbytes_read / speed),
        unit="× the direct read of those",
        at_most=1.25,
        note=_spread(taken["load"]),
    )
    ckpt.close()
