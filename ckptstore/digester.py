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
from ckptstore.structure import FlatState
from ckptstore.tensor import Box, Shape, Shard, TensorSpec, halve, itemsize

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One leaf to digest. `view` is of its bytes in host memory; None where there is no run of them, or on a device."""

    number: int
    spec: TensorSpec
    shape: Shape
    nbytes: int
    kind: str
    view: Any


class Digester:
    """Digests of one member's replicated boxes; remembers those of frozen ones. Not for several threads at once.

    What follows from the structure is made once, and views of host memory once for each time that tensors lie
    elsewhere (`FlatState.places`): a small tensor then costs its bytes and one call.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._frozen: dict[Shard, tuple[str, bytes]] = {}
        self._grouped: tuple[tuple[Shard, ...], tuple[_Group, ...]] = ((), ())
        self._places: tuple[int, ...] | None = None
        self._sources: dict[int, Source] = {}
        self._dealt: tuple[list[int], _Dealt] = ([], _Dealt([], [], []))

    def forget(self) -> None:
        """Take the digests of frozen tensors again next time: a save was refused, and they may be the reason."""
        self._frozen.clear()

    def take(self, flat: FlatState, size: int) -> tuple[ReplicaSet, ...]:
        """One set for each set of ranks that this one of `size` shares boxes with.

        The tensors are read before this returns and not after. Two threads share large CPU tensors; an
        accelerator is waited for once.
        """
        shards, frozen = flat.structure.shards(size), flat.structure.frozen
        groups = self._groups(shards)
        wanted = [n for group in groups for n in group.leaves]
        digests: dict[int, tuple[str, bytes]] = {}
        if True in frozen:
            digests = {n: self._frozen[shards[n]] for n in wanted if frozen[n] and shards[n] in self._frozen}
        fresh = [n for n in wanted if n not in digests] if digests else wanted
        self._look(flat, shards, wanted)
        digests.update(_take(self._deal(fresh), flat))
        if True in frozen:
            self._frozen.update({shards[n]: digests[n] for n in fresh if frozen[n]})
        return tuple(_replica_set(group, [digests[n] for n in group.leaves]) for group in groups)

    def _look(self, flat: FlatState, shards: tuple[Shard, ...], wanted: Sequence[int]) -> None:
        """Sources of what this rank holds with others. Those of a place are right only while leaves lie there."""
        places = flat.places
        if places is not None and places is self._places:
            return
        data = flat.data
        self._sources = {}
        for n in wanted:
            kind, shard = kind_of(data[n]), shards[n]
            address = -1 if places is None or kind != XXH3 else places[n]
            view = _contiguous(data[n]) if places is None and kind == XXH3 else None
            if address >= 0:
                view = (ctypes.c_ubyte * shard.nbytes).from_address(address)
            self._sources[n] = Source(
                number=n, spec=shard.spec, shape=shard.box.shape, nbytes=shard.nbytes, kind=kind, view=view
            )
        self._places = places
        self._dealt = ([], _Dealt([], [], []))

    def _deal(self, fresh: list[int]) -> _Dealt:
        if self._dealt[0] != fresh or self._places is None:
            self._dealt = (fresh, _deal([self._sources[n] for n in fresh]))
        return self._dealt[1]

    def _groups(self, shards: tuple[Shard, ...]) -> tuple[_Group, ...]:
        if self._grouped[0] is shards or self._grouped[0] == shards:
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
    kinds = "".join([kind for kind, _ in digests])
    if len(set(kinds)) == 1:
        kinds = kinds[0]
    whole = b"".join([digest for _, digest in digests])
    return ReplicaSet(
        ranks=group.ranks,
        count=len(digests),
        kinds=kinds,
        combined=xxhash.xxh3_128_hexdigest(kinds.encode() + b"\0" + whole),
        digests=pack_digests([digest for _, digest in digests]),
        names=group.names,
    )


def kind_of(data: Any) -> str:
    """How the digest of a leaf is taken: by the host where its memory is the host's."""
    return XXH3 if isinstance(data, np.ndarray) or data.device.type == "cpu" else ROWS


@dataclass(frozen=True, slots=True)
class _Dealt:
    """What the caller's thread digests, what a second one does, and what devices do."""

    mine: list[Source]
    theirs: list[Source]
    devices: list[Source]


def _deal(sources: Sequence[Source]) -> _Dealt:
    """Large ones are dealt to two threads, largest first; small ones would only contend for the interpreter."""
    mine, theirs, ahead = list[Source](), list[Source](), 0
    here = [source for source in sources if source.kind == XXH3]
    for source in sorted(here, key=lambda each: -each.nbytes):
        if source.nbytes < LARGE_NBYTES:
            break
        (theirs if ahead >= 0 else mine).append(source)
        ahead += source.nbytes if ahead < 0 else -source.nbytes
    mine += [source for source in here if source.nbytes < LARGE_NBYTES]
    return _Dealt(mine, theirs, [source for source in sources if source.kind != XXH3])


def _take(dealt: _Dealt, flat: FlatState) -> dict[int, tuple[str, bytes]]:
    """The digest of each leaf, by its number: those on devices are queued first and waited for last."""
    queued = []
    if dealt.devices:
        from ckptstore.interop.torch_digest import RowDigests

        by_device: dict[Any, list[Source]] = {}
        for source in dealt.devices:
            by_device.setdefault(flat.data[source.number].device, []).append(source)
        for sources in by_device.values():
            queued.append((sources, RowDigests([flat.data[source.number] for source in sources])))
    if not dealt.mine or not dealt.theirs:
        found = _digest_all(dealt.mine or dealt.theirs, flat)
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="ckptstore-digest") as pool:
            helper = pool.submit(_digest_all, dealt.theirs, flat)
            found = _digest_all(dealt.mine, flat)
            found.update(helper.result())
    for sources, under_way in queued:
        for source, digest in zip(sources, under_way.collect(), strict=True):
            found[source.number] = (ROWS, digest)
    return found


def _digest_all(sources: Sequence[Source], flat: FlatState) -> dict[int, tuple[str, bytes]]:
    digests = host_digests(sources, flat)
    return {source.number: (XXH3, digest) for source, digest in zip(sources, digests, strict=True)}


def host_digests(sources: Sequence[Source], flat: FlatState) -> list[bytes]:
    """XXH3-128 of the bytes of each, row-major."""
    digest = xxhash.xxh3_128_digest
    return [
        _strided_digest(source, flat.data[source.number]) if source.view is None else digest(source.view)
        for source in sources
    ]


def _strided_digest(source: Source, data: Any) -> bytes:
    """What is not contiguous goes through bounded scratch memory."""
    size = itemsize(source.spec.dtype)
    scratch = np.empty(min(SCRATCH_NBYTES, source.nbytes), np.uint8)
    hasher = xxhash.xxh3_128()
    for piece in halve(Box.whole(source.shape), max(SCRATCH_NBYTES // size, 1)):
        out = scratch[: piece.numel * size]
        _copy(data[piece.slices] if piece.shape else data, out)
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
