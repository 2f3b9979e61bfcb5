"""Where a writer takes the chunks of a part from: a snapshot that is still being staged, or memory of the caller's.

Small chunks are handed out many at a time: to be asked for each costs a chunk of 54 KiB more than its digest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ckptstore.chunktable import TableFrame
from ckptstore.image import Image, make_images
from ckptstore.snapshot import Piece, Snapshot, block_sizes
from ckptstore.sources import Bytes
from ckptstore.store.base import BLOCK_NBYTES
from ckptstore.tensor import Box, TensorSpec

SMALL_NBYTES: Final = 256 << 10  # chunks below are taken together
TOGETHER_MAX: Final = 64  # a third of a millisecond
PAUSE_S: Final = 20e-6


class ChunkSource(Protocol):
    """The chunks of one part, in the order of `frame`, and the images of the segments that they may make.

    Chunks in `skipped` were not staged: the caller has promised that they are stored already.
    """

    @property
    def frame(self) -> TableFrame: ...
    @property
    def images(self) -> tuple[Image, ...]: ...
    @property
    def skipped(self) -> Collection[int]: ...

    def runs(self, image: Image) -> Sequence[range]:
        """All places of the image in order, in ranges to be taken at once; of several chunks, a range is one piece."""

    def pieces(self, image: Image, places: range) -> Sequence[Piece]:
        """The bytes of one such range end to end, once they are staged; raises what staging failed of."""

    def passed(self, chunks: Sequence[int]) -> None:
        """The writer has done with the chunks, or holds the blocks that it still needs."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlaces:
    """Where the chunks of some images lie in a snapshot's blocks; made once where the images stay.

    `place[chunk]` is its first byte (-1: not there), `blocks[chunk]` the blocks it lies in, `uses[block]` how many
    chunks lie in it, `runs[image]` what is taken at once.
    """

    images: tuple[Image, ...]
    place: Sequence[int]
    blocks: Sequence[range]
    uses: Sequence[int]
    runs: Mapping[Image, Sequence[range]]

    @classmethod
    def of(cls, images: tuple[Image, ...], place: Sequence[int], block_count: int) -> ChunkPlaces:
        blocks, uses = [range(0)] * len(place), [0] * block_count
        for image in images:
            for chunk, size in zip(image.chunks, image.sizes, strict=True):
                if size:
                    last = place[chunk] + size - 1
                    blocks[chunk] = range(place[chunk] // BLOCK_NBYTES, last // BLOCK_NBYTES + 1)
                for block in blocks[chunk]:
                    uses[block] += 1
        runs = {image: list(_runs(image, place, blocks)) for image in images}
        return cls(images=images, place=place, blocks=blocks, uses=uses, runs=runs)


def _runs(image: Image, place: Sequence[int], blocks: Sequence[range]) -> Iterator[range]:
    low, end = 0, -1
    for n, (chunk, size) in enumerate(zip(image.chunks, image.sizes, strict=True)):
        at = place[chunk]
        small = 0 < size < SMALL_NBYTES and len(blocks[chunk]) == 1
        if n > low and not (small and at == end and at % BLOCK_NBYTES and n - low < TOGETHER_MAX):
            yield range(low, n)
            low = n
        end = at + size if small else -1
    if image.chunks:
        yield range(low, len(image.chunks))


class SnapshotChunks:
    """The chunks of a plan, in a snapshot: as they were staged, or cut out of whole leaves when the plan came later.

    Blocks are given back as the last chunk of each is passed. `in_place` promises that the images are those that the
    snapshot was staged as.
    """

    def __init__(self, snapshot: Snapshot, frame: TableFrame, places: ChunkPlaces, *, in_place: bool) -> None:
        self.frame = frame
        self.images = places.images
        self.skipped = [chunk for chunk, place in enumerate(places.place) if place < 0]
        self._snapshot = snapshot
        self._places = places
        self._in_place = in_place
        self._uses = list(places.uses)
        self._passed = 0

    def runs(self, image: Image) -> Sequence[range]:
        return self._places.runs[image]

    def pieces(self, image: Image, places: range) -> list[Piece]:
        start = self._places.place[image.chunks[places.start]]
        found = self._snapshot.pieces(start, sum(image.sizes[places.start : places.stop]))
        if self._in_place:
            return found
        # What lies before a piece may still be wanted, so its block is not one to lay a header in.
        return [Piece(piece.data, None, piece.at) for piece in found]

    def block_sizes(self) -> tuple[list[int], list[int]]:
        """Bytes of each block that a snapshot staged as these images takes: of ordinary ones, and of pinned ones."""
        numbers = {number for number in range(len(self._uses)) if self._snapshot.devices_of(number)}
        found: tuple[list[int], list[int]] = ([], [])
        for image in self.images:
            pinned = set[int]()
            for chunk, start, size in zip(image.chunks, image.starts, image.sizes, strict=True):
                if numbers and not numbers.isdisjoint(self._places.blocks[chunk]):
                    pinned.update(range(start // BLOCK_NBYTES, -(-(start + size) // BLOCK_NBYTES)))
            for number, nbytes in enumerate(block_sizes(image)):
                found[number in pinned].append(nbytes)
        return found

    def passed(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            for block in self._places.blocks[chunk]:
                self._uses[block] -= 1
                if not self._uses[block]:
                    self._snapshot.give_back(block)
        self._passed += len(chunks)
        if self._passed >= TOGETHER_MAX:
            self._passed = 0
            # The trainer's threads would wait 5 ms for the interpreter each time they want it back.
            time.sleep(PAUSE_S)


class ListedChunks:
    """Chunks that lie in memory of their own, which does not change before they are written."""

    skipped: Sequence[int] = ()

    def __init__(self, specs: Sequence[TensorSpec], boxes: Sequence[Box], data: Sequence[Bytes]) -> None:
        self.frame = TableFrame.of(specs, boxes)
        self.images = make_images(specs, boxes)
        self._data = data

    def runs(self, image: Image) -> list[range]:
        return [range(place, place + 1) for place in range(len(image.chunks))]

    def pieces(self, image: Image, places: range) -> list[Piece]:
        return [Piece(self._data[image.chunks[place]], None, 0) for place in places]

    def passed(self, chunks: Sequence[int]) -> None:
        """They are the caller's."""
