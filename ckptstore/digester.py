"""Take the digests of what a rank holds together with others, on the caller's thread.

Stands apart from staging because a rank copies only its share of a replica but must vouch for all of
it. XXH3-128 of CPU memory here; sums of rows on accelerators (`interop/torch_digest.py`). What is not
replicated costs nothing. docs/explanation/replicas.md has the argument and the cost.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ckptstore.replicaset import (
    ROWS,
    XXH3,
    HeldBox,
    ReplicaSet,
    pack_digests,
    pack_names,
    ranks_to_runs,
)
from ckptstore.state import TensorLeaf
from ckptstore.tensor import Box, Shard, halve, itemsize

SCRATCH_NBYTES = 4 * 2**20  # for what is not contiguous; a piece stays in the cache between copy and digest
LARGE_NBYTES = (
    256 * 2**10
)  # from here on a second thread gains more than it costs; two reach the memory's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The boxes that this rank holds together with exactly the same ranks: indices of leaves, in order."""

    ranks: tuple[tuple[int, int, int], ...]
    leaves: tuple[int, ...]
    names: str | None


class Digester:
    """Digests of one member's replicated boxes; remembers those of frozen ones. Not for several threads at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._frozen: dict[Shard, tuple[str, bytes]] = {}
        self._grouped: tuple[tuple[Shard, ...], tuple[_Group, ...]] = ((), ())

    def forget(self) -> None:
        """Take the digests of frozen tensors again next time: a save was refused, and they may be the reason."""
        self._frozen.clear()

    def take(self, leaves: Sequence[TensorLeaf], shards: tuple[Shard, ...]) -> tuple[ReplicaSet, ...]:
        """One set for each set of ranks that this one shares boxes with; `shards` are those of the leaves.

        The tensors are read before this returns and not after. Two threads share large CPU tensors; an
        accelerator is waited for once.
        """
        groups = self._groups(shards)
        wanted = [n for group in groups for n in group.leaves]
        digests = {n: self._frozen[shards[n]] for n in wanted if shards[n] in self._frozen}
        fresh = [n for n in wanted if n not in digests]
        digests.update(_take([leaves[n] for n in fresh], fresh))
        for n in fresh:
            if leaves[n].frozen:
                self._frozen[shards[n]] = digests[n]
        return tuple(_replica_set(group, [digests[n] for n in group.leaves]) for group in groups)

    def _groups(self, shards: tuple[Shard, ...]) -> tuple[_Group, ...]:
        if self._grouped[0] == shards:
            return self._grouped[1]
        sets: dict[tuple[int, ...], list[int]] = {}
        for n, shard in enumerate(shards):
            if len(shard.replicas) > 1 and shard.box.numel:
                sets.setdefault(shard.replicas, []).append(n)
        groups = []
        for ranks, members in sorted(sets.items()):
            places = {n: (shards[n].spec.name, shards[n].box.offset, shards[n].box.shape) for n in members}
            members.sort(key=places.__getitem__)
            boxes = (HeldBox(tensor=t, offset=o, shape=s) for t, o, s in map(places.__getitem__, members))
            names = pack_names(tuple(boxes)) if self._rank == ranks[0] else None
            groups.append(_Group(ranks=ranks_to_runs(ranks), leaves=tuple(members), names=names))
        self._grouped = (shards, tuple(groups))
        return self._grouped[1]


def _replica_set(group: _Group, digests: Sequence[tuple[str, bytes]]) -> ReplicaSet:
    kinds = "".join(kind for kind, _ in digests)
    if len(set(kinds)) == 1:
        kinds = kinds[0]
    whole = b"".join(digest for _, digest in digests)
    return ReplicaSet(
        ranks=group.ranks,
        count=len(digests),
        kinds=kinds,
        combined=xxhash.xxh3_128_hexdigest(kinds.encode() + b"\0" + whole),
        digests=pack_digests([digest for _, digest in digests]),
        names=group.names,
    )


def kind_of(leaf: TensorLeaf) -> str:
    """How the digest of a leaf is taken: by the host where its memory is the host's."""
    return XXH3 if isinstance(leaf.data, np.ndarray) or leaf.data.device.type == "cpu" else ROWS


def _take(leaves: Sequence[TensorLeaf], numbers: Sequence[int]) -> dict[int, tuple[str, bytes]]:
    """The digest of each leaf, by its number: those on devices are queued first and waited for last."""
    here: list[tuple[int, TensorLeaf]] = []
    devices: dict[Any, list[tuple[int, TensorLeaf]]] = {}
    for number, leaf in zip(numbers, leaves, strict=True):
        if kind_of(leaf) == XXH3:
            here.append((number, leaf))
        else:
            devices.setdefault(leaf.data.device, []).append((number, leaf))
    queued = []
    if devices:
        from ckptstore.interop.torch_digest import RowDigests

        queued = [(items, RowDigests([leaf.data for _, leaf in items])) for items in devices.values()]
    found = {number: (XXH3, digest) for (number, _), digest in zip(here, _host_digests(here), strict=True)}
    for items, under_way in queued:
        for (number, _), digest in zip(items, under_way.collect(), strict=True):
            found[number] = (ROWS, digest)
    return found


def _host_digests(items: Sequence[tuple[int, TensorLeaf]]) -> list[bytes]:
    """Large ones are dealt to two threads, largest first; small ones would only contend for the interpreter."""
    large = sorted((n for n, (_, leaf) in enumerate(items) if leaf.nbytes >= LARGE_NBYTES),
                   key=lambda n: -items[n][1].nbytes)  # fmt: skip
    mine, theirs, ahead = list[int](), list[int](), 0
    for n in large:
        (theirs if ahead >= 0 else mine).append(n)
        ahead += items[n][1].nbytes if ahead < 0 else -items[n][1].nbytes
    mine += [n for n, (_, leaf) in enumerate(items) if leaf.nbytes < LARGE_NBYTES]

    def digest(numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        return [(n, host_digest(items[n][1])) for n in numbers]

    if not mine or not theirs:
        done = dict(digest(mine or theirs))
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="ckptstore-digest") as pool:
            helper = pool.submit(digest, theirs)
            done = dict(digest(mine))
            done.update(helper.result())
    return [done[n] for n in range(len(items))]


def host_digest(leaf: TensorLeaf) -> bytes:
    """XXH3-128 of the box's bytes, row-major; what is not contiguous goes through bounded scratch memory."""
    view = _contiguous(leaf.data)
    if view is not None:
        return xxhash.xxh3_128_digest(view)
    size = itemsize(leaf.spec.dtype)
    scratch = np.empty(min(SCRATCH_NBYTES, leaf.nbytes), np.uint8)
    hasher = xxhash.xxh3_128()
    for piece in halve(Box.whole(leaf.box.shape), max(SCRATCH_NBYTES // size, 1)):
        out = scratch[: piece.numel * size]
        _copy(leaf.data[piece.slices] if piece.shape else leaf.data, out)
        hasher.update(out.data)
    return hasher.digest()


def _contiguous(data: Any) -> Any:
    """The bytes of row-major memory without a copy, valid while `data` lives; None where they are not that."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8).data if data.flags.c_contiguous else None
    if not data.is_contiguous() or data.is_conj() or data.is_neg():
        return None
    # A quarter of the time that a view through numpy takes, which is what small tensors cost.
    return (ctypes.c_ubyte * (data.numel() * data.element_size())).from_address(data.data_ptr())


def _copy(data: Any, out: Any) -> None:
    if isinstance(data, np.ndarray):
        np.copyto(out.view(data.dtype).reshape(data.shape), data)
        return
    from ckptstore.interop.torch_tensor import copy_to_bytes

    copy_to_bytes(data, out)
