"""The segment: many chunks of one writer as one valid safetensors file.

The header's size is fixed before any data is written, so a snapshot can be staged straight into the
image. Chunks lie end to end, largest element size first, so each is aligned for readers that map the
file. A reader without ckptstore opens it with the `safetensors` package. Byte table:
docs/reference/format-v1.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.tensor import Box, Shape, TensorSpec, itemsize

HEADER_ALIGN = 4096
HEADER_NBYTES_MAX = 100_000_000  # what safetensors readers accept
CHUNKS_MAX = 20_000
_METADATA_NBYTES_MAX = 2048
_OFFSETS_NBYTES_MAX = 64  # `:{`, `,"data_offsets":[`, two numbers of at most 12 digits, `]},`

# safetensors 0.8; what it lacks (complex32, complex128) appears as U8.
_CODES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_FP4 = "float4_e2m1fn_x2"


def chunk_name(spec: TensorSpec, box: Box) -> str:
    """Name of a chunk in its segment: the tensor's without the role, and `@offset` when it is only a part."""
    name = spec.name.split("/", 1)[-1]
    if name.startswith("__metadata__"):
        name = "%5F" + name[1:]
    return name if box.shape == spec.shape else f"{name}@{','.join(map(str, box.offset))}"


def order(specs: Sequence[TensorSpec]) -> list[int]:
    """Indices of chunks in the order in which they lie: largest element size first, else as given."""
    return sorted(range(len(specs)), key=lambda n: -itemsize(specs[n].dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeaderTemplate:
    """What is known of a segment's header before it is known which chunks it holds, and where.

    `nbytes`, the length prefix included, is enough for every choice of its chunks: what is not used is spaces.
    Made once a structure, since at 20,000 chunks JSON costs as much as copying a gigabyte.
    """

    names: tuple[str, ...]  # as JSON, one a chunk
    kinds: tuple[str, ...]  # its dtype and shape as JSON
    nbytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], boxes: Sequence[Box]) -> HeaderTemplate:
        """Of chunks in the order in which they may lie. InvalidInputError for too many."""
        if len(specs) > CHUNKS_MAX:
            raise InvalidInputError(
                f"{len(specs)} chunks are too many for one segment: the limit is {CHUNKS_MAX}"
            )
        names, kinds, nbytes = list[str](), list[str](), _METADATA_NBYTES_MAX
        for spec, box in zip(specs, boxes, strict=True):
            size = box.numel * itemsize(spec.dtype)
            dtype, shape = _stored(spec.dtype, box.shape, size)
            names.append(json.dumps(chunk_name(spec, box)))
            kinds.append(f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}]')
            nbytes += len(names[-1]) + max(len(kinds[-1]), len(_bytes_kind(size))) + _OFFSETS_NBYTES_MAX
        return cls(names=tuple(names), kinds=tuple(kinds), nbytes=-(-nbytes // HEADER_ALIGN) * HEADER_ALIGN)

    def fill(
        self,
        chunks: Sequence[int],
        sizes: Sequence[int],
        metadata: Mapping[str, str],
        *,
        encoded: Collection[int] = (),
    ) -> bytes:
        """The header of these chunks, end to end, with these sizes in bytes; those in `encoded` are plain bytes.

        InvalidInputError for two chunks of one name, and for names that are too long.
        """
        names = [self.names[chunk] for chunk in chunks]
        if len(set(names)) < len(names):
            twice = next(name for n, name in enumerate(names) if name in names[:n])
            raise InvalidInputError(f"two chunks of one segment are named {twice}", name=twice)
        at, texts = 0, [f'{{"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"))}']
        for chunk, size in zip(chunks, sizes, strict=True):
            kind = _bytes_kind(size) if chunk in encoded else self.kinds[chunk]
            texts.append(f'{self.names[chunk]}:{{{kind},"data_offsets":[{at},{at + size}]}}')
            at += size
        data = (",".join(texts) + "}").encode()
        room = self.nbytes - 8
        if len(data) > room or room > HEADER_NBYTES_MAX:
            raise InvalidInputError(
                f"the names of {len(chunks)} chunks need a header of {len(data)} bytes, where {room} were kept and "
                f"{HEADER_NBYTES_MAX} are the limit: shorten the names"
            )
        return room.to_bytes(8, "little") + data.ljust(room)


def _bytes_kind(nbytes: int) -> str:
    return f'"dtype":"U8","shape":[{nbytes}]'


def _stored(dtype: str, shape: Shape, nbytes: int) -> tuple[str, Shape]:
    if dtype == _FP4 and shape:
        return "F4", (*shape[:-1], shape[-1] * 2)  # safetensors counts the packed numbers
    if dtype in _CODES:
        return _CODES[dtype], shape
    return "U8", (nbytes,)


def parse_header(data: bytes, what: str) -> dict[str, Any]:
    """The JSON of a header with its length prefix; CorruptError when it is not one."""
    if len(data) < 8 or int.from_bytes(data[:8], "little") != len(data) - 8:
        raise CorruptError(f"{what} does not begin with a safetensors header: it is damaged", what=what)
    try:
        value = json.loads(data[8:])
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{what} has a header that is not JSON ({error}): it is damaged", what=what
        ) from error
    if not isinstance(value, dict):
        raise CorruptError(f"{what} has a header that is not a JSON object: it is damaged", what=what)
    return value
