"""Compare stored elements of any dtype by their bits, and say how far apart the values are.

An element has changed when its bits have: the rule of the digests, so a count does not depend on what was
settled by a digest and what was read. Needs numpy alone, so a checkpoint of a machine with BF16 and FP8 can
be compared anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ckptstore.tensor import DTYPES

BLOCK = 1 << 20  # elements whose values are held as float64 at once

Array = npt.NDArray[Any]

# exponent bits, mantissa bits, bias, and what the codes at the upper end mean
_FLOAT8: Final = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
_FLOAT4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDiff:
    """`changed` elements have other bits. `largest` is the largest |a - b| among those without a NaN on either
    side, an int for integers, None when there is none; `nan` counts the changed ones with a NaN."""

    elements: int = 0
    changed: int = 0
    largest: float | int | None = None
    nan: int = 0

    def __add__(self, other: ElementDiff) -> ElementDiff:
        known = [each for each in (self.largest, other.largest) if each is not None]
        return ElementDiff(
            elements=self.elements + other.elements,
            changed=self.changed + other.changed,
            largest=max(known, default=None),
            nan=self.nan + other.nan,
        )


def carrier(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds the bits of one element: the dtype itself, or an unsigned integer of its size."""
    own = dtype in ("complex64", "complex128") or dtype.startswith(("int", "uint", "bool"))
    return np.dtype(dtype if own else f"u{DTYPES[dtype]}")


def compare_elements(before: Array, after: Array, dtype: str) -> ElementDiff:
    """Two equally shaped arrays of the dtype's carrier, compared element by element."""
    differ = _bits(before) != _bits(after)
    if dtype == "complex128":
        differ = differ.any(axis=-1)
    changed = int(np.count_nonzero(differ))
    found = ElementDiff(elements=before.size, changed=changed)
    if not changed:
        return found
    old, new = before[differ], after[differ]
    for start in range(0, changed, BLOCK):
        found += _distance(old[start : start + BLOCK], new[start : start + BLOCK], dtype)
    return found


def _bits(array: Array) -> Array:
    """Unsigned integers to compare; an axis of two more where an element is wider than any of them."""
    size = array.dtype.itemsize
    if size > 8:
        return np.ascontiguousarray(array)[..., None].view(np.uint64)
    return array.view(f"u{size}")


def _distance(old: Array, new: Array, dtype: str) -> ElementDiff:
    """Of changed elements; their numbers of elements and of changes are counted by the caller."""
    if carrier(dtype).kind in "iub" and not dtype.startswith(("float", "bfloat", "complex")):
        return ElementDiff(largest=_integer_distance(old, new))
    a, b = values(old, dtype), values(new, dtype)  # [elements, numbers in one]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))
        far = apart.max(axis=-1) if dtype.startswith("float4") else np.hypot.reduce(apart, axis=-1)
    nan = (np.isnan(a) | np.isnan(b)).any(axis=-1)
    kept = far[~nan]
    return ElementDiff(largest=float(kept.max()) if len(kept) else None, nan=int(np.count_nonzero(nan)))


def _integer_distance(old: Array, new: Array) -> int:
    """Exact, also between the ends of 64 bits."""
    wide = np.uint64 if old.dtype == np.uint64 else np.int64
    a, b = old.astype(wide), new.astype(wide)
    return int((np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)).max())


def values(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The numbers in a flat array of the carrier of a floating dtype: `[elements, 1]`, 2 of complex and packed ones."""
    if dtype in ("float16", "float32", "float64"):
        found = bits.view(dtype).astype(np.float64)
    elif dtype == "bfloat16":
        found = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    elif dtype.startswith("complex"):
        parts = {"complex32": "f2", "complex64": "f4", "complex128": "f8"}[dtype]
        found = bits.view(parts).astype(np.float64).reshape(-1, 2)
    else:
        found = _codes(dtype)[bits]
    numbers: npt.NDArray[np.float64] = found.reshape(len(bits), -1)
    return numbers


@functools.cache
def _codes(dtype: str) -> npt.NDArray[np.float64]:
    """The value of each of the 256 codes of a one-byte dtype; of packed float4 both numbers."""
    codes = np.arange(256)
    if dtype == "float4_e2m1fn_x2":
        nibble = np.array([*_FLOAT4, *(-v for v in _FLOAT4)])
        return np.stack([nibble[codes & 15], nibble[codes >> 4]], axis=-1)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    exponent_bits, mantissa_bits, bias, end = _FLOAT8[dtype]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    whole = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
    value: npt.NDArray[np.float64] = np.ldexp(
        whole.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits
    )
    value = np.where(codes >= 128, -value, value)
    if end == "fnuz":
        value[128] = np.nan
    elif end == "fn":
        value[(codes & 127) == 127] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        value[top] = np.where(mantissa[top] > 0, np.nan, np.sign(value[top]) * np.inf)
    return value
