"""The planted bug of every snapshot: host memory is referenced, where it should be copied."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.snapshot import Piece, Snapshot
from ckptstore.sources import Sources, host_bytes
from ckptstore.staging import Block


def alias_instead_of_copying(patch: pytest.MonkeyPatch) -> None:
    """What is written is the caller's own memory, as it is by then."""
    copy, pieces = Sources.copy, Snapshot.pieces
    sources: dict[int, list[tuple[int, Any]]] = {}

    def noting(self: Sources, number: int, data: Any, block: Block, *more: Any) -> None:
        copy(self, number, data, block, *more)
        found, copies = [], self._blocks[number]
        for leaf, start, at, nbytes in zip(copies.leaf, copies.start, copies.at, copies.nbytes, strict=True):
            view = host_bytes(data[leaf])
            if view is not None:
                found.append((at, view[start : start + nbytes]))
        sources[block.memory.ctypes.data] = found

    def aliased(self: Snapshot, place: int, nbytes: int) -> list[Piece]:
        found = []
        for piece in pieces(self, place, nbytes):
            data = piece.data.copy()
            for at, view in sources[piece.block.memory.ctypes.data] if piece.block is not None else []:
                if piece.at <= at < piece.at + data.nbytes:
                    data[at - piece.at : at - piece.at + view.nbytes] = view
            found.append(Piece(data, None, 0))
        return found

    patch.setattr(Sources, "copy", noting)
    patch.setattr(Snapshot, "pieces", aliased)
