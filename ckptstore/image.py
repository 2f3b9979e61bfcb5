"""Where chunks may lie in the segments of one writer, before anything is known of their content.

A snapshot is staged straight into these images, so that a segment whose chunks are all stored, as they are, is
written from the memory that holds them. Pure; made once a structure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptstore.errors import InvalidInputError
from ckptstore.segment import CHUNKS_MAX, HeaderTemplate, order
from ckptstore.tensor import Box, TensorSpec, itemsize

SEGMENT_NBYTES = 2 << 30
BLOCK_NBYTES = 16 << 20  # of uploads (store/base.py), which is above this layer
_ENTRY_NBYTES = 256  # of a header, besides the name: at most about
HEADER_NBYTES = 4 << 20  # about; it must lie within the first block, which is written last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Image:
    """One segment if all its chunks are stored raw: `starts` and `sizes` in bytes, of each of `chunks`, in order.

    `chunks` are indices into the sequence that the image was made of; `header` counts from 0 to len(chunks).
    """

    chunks: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    header: HeaderTemplate
    nbytes: int


def make_images(
    specs: Sequence[TensorSpec],
    boxes: Sequence[Box],
    *,
    skip: Collection[int] = (),
    segment_nbytes: int = SEGMENT_NBYTES,
) -> tuple[Image, ...]:
    """Images of all chunks but those in `skip`; of about `segment_nbytes`, more only for a single chunk."""
    sizes = [box.numel * itemsize(spec.dtype) for spec, box in zip(specs, boxes, strict=True)]
    headers = [len(spec.name) + _ENTRY_NBYTES for spec in specs]
    groups = _groups(sizes, headers, skip, segment_nbytes)
    return tuple(_image(group, specs, boxes, sizes) for group in groups)


def _groups(
    sizes: Sequence[int], headers: Sequence[int], skip: Collection[int], most: int
) -> Iterator[list[int]]:
    group, nbytes, header = list[int](), 0, 0
    for chunk, size in enumerate(sizes):
        if chunk in skip:
            continue
        full = len(group) >= CHUNKS_MAX or nbytes + size > most or header + headers[chunk] > HEADER_NBYTES
        if group and full:
            yield group
            group, nbytes, header = [], 0, 0
        group.append(chunk)
        nbytes, header = nbytes + size, header + headers[chunk]
    if group:
        yield group


def _image(
    group: Sequence[int], specs: Sequence[TensorSpec], boxes: Sequence[Box], sizes: Sequence[int]
) -> Image:
    chunks = [group[n] for n in order([specs[chunk] for chunk in group])]
    header = HeaderTemplate.of([specs[chunk] for chunk in chunks], [boxes[chunk] for chunk in chunks])
    if header.nbytes > BLOCK_NBYTES:
        raise InvalidInputError(
            f"the name of {specs[chunks[0]].name[:100]}… has {len(specs[chunks[0]].name)} characters, which no header "
            f"holds: shorten it",
            name=specs[chunks[0]].name[:1000],
        )
    at, starts = header.nbytes, []
    for chunk in chunks:
        starts.append(at)
        at += sizes[chunk]
    return Image(
        chunks=tuple(chunks),
        starts=tuple(starts),
        sizes=tuple(sizes[chunk] for chunk in chunks),
        header=header,
        nbytes=at,
    )
