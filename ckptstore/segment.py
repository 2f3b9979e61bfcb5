"""The segment: many chunks of one writer as one valid safetensors file.

The header's size is fixed before any data is written, so a snapshot can be staged straight into the
image. Chunks lie end to end, largest element size first, so each is aligned for readers that map the
file. A reader without ckptstore opens it with the `safetensors` package. Byte table:
docs/reference/format-v1.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptstore.errors import CorruptError, InvalidInputError
from ckptstore.tensor import Box, Shape, TensorSpec, itemsize

HEADER_ALIGN = 4096
HEADER_NBYTES_MAX = 100_000_000  # what safetensors readers accept
CHUNKS_MAX = 20_000

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A segment's header: its bytes (the length prefix included) and where each chunk starts in the file."""

    data: bytes
    starts: tuple[int, ...]
    nbytes: int  # of the whole segment


def chunk_name(spec: TensorSpec, box: Box) -> str:
    """Name of a chunk in its segment: the tensor's without the role, and `@offset` when it is only a part."""
    name = spec.name.split("/", 1)[-1]
    if name.startswith("__metadata__"):
        name = "%5F" + name[1:]
    return name if box.shape == spec.shape else f"{name}@{','.join(map(str, box.offset))}"


def order(specs: Sequence[TensorSpec]) -> list[int]:
    """Indices of chunks in the order in which they lie: largest element size first, else as given."""
    return sorted(range(len(specs)), key=lambda n: -itemsize(specs[n].dtype))


def make_header(specs: Sequence[TensorSpec], boxes: Sequence[Box], metadata: Mapping[str, str]) -> Header:
    """The header of raw chunks that lie in this order. InvalidInputError when there are too many."""
    if len(specs) > CHUNKS_MAX:
        raise InvalidInputError(
            f"{len(specs)} chunks are too many for one segment: the limit is {CHUNKS_MAX}"
        )
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset, offsets = 0, []
    for spec, box in zip(specs, boxes, strict=True):
        nbytes = box.numel * itemsize(spec.dtype)
        dtype, shape = _stored(spec.dtype, box.shape, nbytes)
        name = chunk_name(spec, box)
        if name in fields:
            raise InvalidInputError(
                f"two chunks of one segment are named {name}: {spec.name} {box}", name=name
            )
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offsets.append(offset)
        offset += nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // HEADER_ALIGN) * HEADER_ALIGN
    if padded > HEADER_NBYTES_MAX:
        raise InvalidInputError(
            f"a segment header of {padded} bytes exceeds {HEADER_NBYTES_MAX}: use shorter tensor names",
            nbytes=padded,
        )
    data = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return Header(data=data, starts=tuple(padded + at for at in offsets), nbytes=padded + offset)


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
