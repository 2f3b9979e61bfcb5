"""Copy what a member holds into reused host memory, so that the trainer may go on.

Everything is copied, CPU tensors too: aliasing them has torn other systems' checkpoints. The memory is
touched once and reused, since a fresh page costs seven times its copy. A snapshot lives in this
process and can be lost; what is durable is decided elsewhere (docs/explanation/cuts.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import InternalError
from ckptstore.plan.save import PlannedChunk
from ckptstore.state import TensorLeaf
from ckptstore.tensor import Box, TensorSpec, itemsize

ALIGN = 64
_PAGE = 1 << 21  # huge pages where the kernel grants them


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """One box of one tensor in staging memory, row-major; `data` is None for a frozen chunk that was not copied."""

    spec: TensorSpec
    box: Box
    data: npt.NDArray[np.uint8] | None
    frozen: bool

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.spec.dtype)

    def slice(self, box: Box) -> StagedChunk:
        """A piece that is contiguous in this chunk, sharing its memory."""
        size = itemsize(self.spec.dtype)
        start = box.start_in(self.box) * size if box.numel else 0
        data = None if self.data is None else self.data[start : start + box.numel * size]
        return StagedChunk(spec=self.spec, box=box, data=data, frozen=self.frozen)


class StagingArena:
    """Host memory for one snapshot at a time; grows, never shrinks, and is pre-faulted when it grows."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes)

    def reserve(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least `nbytes` of memory whose former content is gone."""
        if nbytes > self._memory.nbytes:
            size = -(-nbytes // _PAGE) * _PAGE
            self._memory = np.zeros(0, np.uint8)  # give the old memory back before taking the new
            region = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                region.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(region, np.uint8)
            self._memory[::4096] = 0
        return self._memory


def whole_leaves(leaves: Sequence[TensorLeaf]) -> tuple[PlannedChunk, ...]:
    """The plan that copies all that the rank holds, for when the real plan is not known yet."""
    return tuple(PlannedChunk(shard=n, box=leaf.box) for n, leaf in enumerate(leaves))


def stage(
    leaves: Sequence[TensorLeaf],
    plan: Sequence[PlannedChunk],
    arena: StagingArena,
    *,
    skip: Collection[int] = (),
) -> tuple[StagedChunk, ...]:
    """Copy the planned boxes; leaves whose index is in `skip` are noted but not copied.

    Valid until the arena is reserved again. Sources may be changed as soon as this returns.
    """
    sizes = [chunk.box.numel * itemsize(leaves[chunk.shard].spec.dtype) for chunk in plan]
    total = sum(
        -(-n // ALIGN) * ALIGN for chunk, n in zip(plan, sizes, strict=True) if chunk.shard not in skip
    )
    memory = arena.reserve(total)
    at, staged = 0, []
    for chunk, nbytes in zip(plan, sizes, strict=True):
        leaf = leaves[chunk.shard]
        data = None
        if chunk.shard not in skip:
            data = memory[at : at + nbytes]
            copy_box(leaf, chunk.box, data)
            at += -(-nbytes // ALIGN) * ALIGN
        staged.append(StagedChunk(spec=leaf.spec, box=chunk.box, data=data, frozen=leaf.frozen))
    return tuple(staged)


def copy_box(leaf: TensorLeaf, box: Box, out: npt.NDArray[np.uint8]) -> None:
    """Copy one box of a leaf, row-major, into `out`."""
    if not box.numel:
        return
    if isinstance(leaf.data, np.ndarray):
        part: Any = leaf.data[box.relative_to(leaf.box).slices] if box.shape else leaf.data
        np.copyto(out.view(leaf.data.dtype).reshape(box.shape), part)
        return
    from ckptstore.interop.torch_tensor import byte_view, copy_to_bytes

    whole = byte_view(leaf.data)
    if whole is not None and box == leaf.box:  # most chunks are whole shards: no box algebra for each
        np.copyto(out, whole)
    elif whole is not None and box.is_contiguous_in(leaf.box):
        start = box.start_in(leaf.box) * itemsize(leaf.spec.dtype)
        source = whole[start : start + out.nbytes]
        if source.nbytes != out.nbytes:
            raise InternalError(
                f"{leaf.spec.name}: {box} lies outside of the {whole.nbytes} bytes of its shard"
            )
        np.copyto(out, source)
    else:
        copy_to_bytes(leaf.data[box.relative_to(leaf.box).slices] if box.shape else leaf.data, out)
