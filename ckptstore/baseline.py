"""What a member has stored before: the chunks that its next part may refer to instead of writing them.

A chunk is reused only from a checkpoint that was seen committed, by tensor, box and digest (protocol R16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptstore.chunktable import ChunkTable, TableFrame
from ckptstore.manifest import AttemptId, SegmentRef
from ckptstore.tensor import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """Chunks of the newest checkpoint that this member has seen committed and good.

    `frame` is that of `table` when this member wrote it, so that the same plan finds its rows without looking.
    """

    id: AttemptId
    table: ChunkTable
    segments: Mapping[str, SegmentRef]
    frame: TableFrame | None

    @classmethod
    def of(
        cls,
        id: AttemptId,
        table: ChunkTable,
        segments: Sequence[SegmentRef],
        frame: TableFrame | None = None,
    ) -> Baseline:
        return cls(id=id, table=table, segments={ref.key: ref for ref in segments}, frame=frame)

    def rows(self, frame: TableFrame) -> Sequence[int]:
        """Of each chunk of a plan, the row of the stored chunk of exactly that tensor and box; -1 for none."""
        if self.frame is frame:
            return frame.rows
        return self.find_all(frame.specs, frame.boxes)

    def find_all(self, specs: Sequence[TensorSpec], boxes: Sequence[Box]) -> list[int]:
        """As `rows`, of chunks that are no plan's."""
        table = self.table
        numbers = {spec.name: n for n, spec in enumerate(table.tensors)}
        bounds = np.searchsorted(table.tensor, np.arange(len(table.tensors) + 1, dtype=np.int32)).tolist()
        offsets, shapes = table.offset.tolist(), table.shape.tolist()
        found = list[int]()
        places: dict[int, dict[tuple[object, ...], int]] = {}
        for spec, box in zip(specs, boxes, strict=True):
            number = numbers.get(spec.name)
            if number is None or table.tensors[number] != spec:
                found.append(-1)
                continue
            if number not in places:
                ndim = len(spec.shape)
                places[number] = {
                    (*offsets[row][:ndim], *shapes[row][:ndim]): row
                    for row in reversed(range(bounds[number], bounds[number + 1]))
                }
            found.append(places[number].get((*box.offset, *box.shape), -1))
        return found
