"""What comparing replicas costs: digests against a copy of the same bytes, and the committer's comparison.

The device path runs on CPU tensors here, where it is far slower than XXH3: its ratio says what a stand-in
costs, not what an accelerator does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash

from bench.rows import Row, median_s
from ckptstore.chunktable import make_table
from ckptstore.digester import Digester
from ckptstore.interop.torch_digest import RowDigests
from ckptstore.manifest import AttemptId, Member, Part
from ckptstore.replicas import check_replicas
from ckptstore.replicaset import HeldBox, ReplicaSet, pack_digests, pack_names, ranks_to_runs
from ckptstore.state import Known, flatten
from ckptstore.wire import canonical, digest_of

STATES = ((16, 1 << 30), (1_200, 1 << 30), (20_000, 1 << 28))  # tensors, bytes in all
CPU_BLOCK_NBYTES = 1 << 20  # what fits the cache; on an accelerator the default is right
RANKS, TENSORS = 1024, 1200


def rows() -> Iterator[Row]:
    """Three rows a state, then the committer's."""
    for count, nbytes in STATES:
        yield from _digests(count, nbytes)
    yield from _committer()


def _timed(call: Callable[[], object]) -> float:
    call()
    return median_s(call)


def _digests(count: int, nbytes: int) -> Iterator[Row]:
    state = {f"layer.{n}.w": torch.randn(nbytes // count // 256, 64) for n in range(count)}
    known = Known()
    flat = flatten(state, role="trainer", rank=0, known=known)
    leaves = flat.leaves
    sources = [leaf.data.numpy() for leaf in leaves]
    targets = [np.ones_like(source) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    digester = Digester(0)
    total = sum(leaf.nbytes for leaf in leaves)
    copy_s = _timed(copy)
    host_s = _timed(lambda: digester.take(flat, 2))
    tensors = [leaf.data for leaf in leaves]
    device_s = _timed(lambda: RowDigests(tensors, block_nbytes=CPU_BLOCK_NBYTES).collect())
    what = f"{count:,} tensors, {total / 2**20:.0f} MiB"
    yield Row(what=f"{what}: one copy", value=total / copy_s / 1e9, unit="GB/s")
    speeds = {"digests on the host": host_s, "digests for accelerators, on CPU tensors": device_s}
    for how, taken in speeds.items():
        yield Row(
            what=f"{what}: {how}",
            value=taken / copy_s,
            unit="× the copy",
            note=f"{total / taken / 1e9:.2f} GB/s",
        )


def _committer() -> Iterator[Row]:
    """All of 1,200 tensors held by all of 1,024 ranks: the most that a comparison can have to look at."""
    digests = [xxhash.xxh3_128_digest(str(n).encode()) for n in range(TENSORS)]
    names = [
        HeldBox(tensor=f"trainer/layers.{n}.w", offset=(0, 0), shape=(7168, 1536)) for n in range(TENSORS)
    ]
    empty = make_table(specs=[], boxes=[], segments=[], starts=[], nbytes=[], digests=[])

    def made(rank: int, *, odd: bool = False) -> Part:
        own = [bytes(16), *digests[1:]] if odd else digests
        held = ReplicaSet(
            ranks=ranks_to_runs(range(RANKS)),
            count=TENSORS,
            kinds="x",
            combined=xxhash.xxh3_128_hexdigest(b"".join(own)),
            digests=pack_digests(own),
            names=pack_names(names) if rank == 0 else None,
        )
        return Part(
            run="run", write="write", id=AttemptId(fence=1, step=1), member=Member(role="trainer", rank=rank),
            layout="layout", policy_version=None, planned=0, segments=(), witnesses={}, state=None,
            nbytes_written=0, nbytes_reused=0, refused=None, table=empty, replicas=(held,),
        )  # fmt: skip

    parts = [made(rank) for rank in range(RANKS)]
    differing = [made(0), made(1, odd=True), *parts[2:]]

    def refuse() -> None:
        try:
            check_replicas(parts[0].id, "trainer", differing)
        except Exception as error:
            if "rank 1 against" not in str(error):
                raise

    value = [held.to_json() for held in parts[1].replicas or ()]
    text = canonical(value)
    read_s = _timed(lambda: [digest_of(canonical(json.loads(text))) for _ in range(RANKS)])
    what = f"committer, {RANKS:,} ranks that all hold {TENSORS:,} tensors"
    equal_s = _timed(lambda: check_replicas(parts[0].id, "trainer", parts))
    yield Row(what=f"{what}: all equal", value=equal_s * 1e3, unit="ms")
    yield Row(what=f"{what}: one differs", value=_timed(refuse) * 1e3, unit="ms")
    yield Row(
        what=f"{what}: read and checked", value=read_s * 1e3, unit="ms", note=f"{len(text):,} bytes a part"
    )
