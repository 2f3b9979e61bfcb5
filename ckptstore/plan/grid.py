"""Say how the stored boxes of one tensor lie: as a regular grid, in slabs that straight cuts part, or neither.

Array libraries read regular grids; stored chunks are uneven where ranks hold uneven shards or flat
ranges. Taking a tiling apart into grids lets such a library read exactly the chunks that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptstore.tensor import Box, Shape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`box` cut into boxes of shape `step`, from its offset on; the last of each dimension may be shorter."""

    box: Box
    step: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Mosaic:
    """`box` tiled by `tiles`: slabs, one after another along one dimension, or boxes that no straight cut parts."""

    box: Box
    tiles: tuple[Tiling, ...]


Tiling: TypeAlias = Grid | Mosaic


def arrange(boxes: Sequence[Box]) -> Tiling:
    """How these boxes, which tile the smallest box around them and are not empty, lie in it."""
    offset = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
    shape = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), -1)
    return _arrange(offset, shape)


def _arrange(offset: Ints, shape: Ints) -> Tiling:
    stop = offset + shape
    around = _box(offset.min(axis=0), stop.max(axis=0))
    step = _grid_step(offset, shape, stop)
    if step is not None:
        return Grid(box=around, step=step)
    groups = _slabs(offset, stop)
    if groups is None:
        groups = [np.array([n]) for n in range(len(offset))]
    return Mosaic(box=around, tiles=tuple(_arrange(offset[rows], shape[rows]) for rows in groups))


def _box(lo: Ints, hi: Ints) -> Box:
    return Box(offset=tuple(lo.tolist()), shape=tuple((hi - lo).tolist()))


def _grid_step(offset: Ints, shape: Ints, stop: Ints) -> Shape | None:
    """The shape of the grid's boxes; None when they are no regular grid."""
    step = shape.max(axis=0)
    # Enough for a tiling: its first box is whole, so the next one begins where the grid says, and so on.
    fitting = shape == np.minimum(step, stop.max(axis=0) - offset)
    return tuple(step.tolist()) if bool(fitting.all()) else None


def _slabs(offset: Ints, stop: Ints) -> list[npt.NDArray[np.intp]] | None:
    """Rows of each slab along the first dimension with a cut that no box crosses; None without one."""
    for dim in range(offset.shape[1]):
        order = np.argsort(offset[:, dim], kind="stable")
        reached = np.maximum.accumulate(stop[order, dim])
        cuts = np.flatnonzero(offset[order[1:], dim] >= reached[:-1]) + 1
        if len(cuts):
            return np.split(order, cuts)
    return None
