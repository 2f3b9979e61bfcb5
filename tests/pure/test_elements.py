"""Elements compared by their bits: counts, distances and NaNs as numpy and ml_dtypes have them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.elements import ElementDiff, carrier, compare_elements, values
from ckptstore.tensor import DTYPES

FLOATS = sorted(d for d in DTYPES if d.startswith(("float8", "float16", "bfloat", "float32", "float64")))
WHOLE = sorted(d for d in DTYPES if d.startswith(("int", "uint")))


def native(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    known = getattr(ml_dtypes, dtype, None)
    return bits.view(np.dtype(known if known is not None else dtype))


def bits_of(draw: Any, dtype: str, count: int) -> np.ndarray[Any, Any]:
    size = DTYPES[dtype]
    raw = draw(st.binary(min_size=count * size, max_size=count * size))
    return np.frombuffer(raw, np.uint8).view(carrier(dtype)).copy()


@given(data=st.data(), dtype=st.sampled_from(FLOATS), count=st.integers(1, 12))
def test_floats_differ_as_numpy_says(data: st.DataObject, dtype: str, count: int) -> None:
    a, b = (bits_of(data.draw, dtype, count) for _ in range(2))
    same = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    b[same] = a[same]
    x, y = native(a, dtype).astype(np.float64), native(b, dtype).astype(np.float64)
    differ = a != b
    known = differ & ~np.isnan(x) & ~np.isnan(y)
    with np.errstate(all="ignore"):
        largest = float(np.where(x == y, 0, np.abs(x - y))[known].max()) if known.any() else None
    found = compare_elements(a, b, dtype)
    wanted = ElementDiff(
        elements=count,
        changed=int(differ.sum()),
        largest=largest,
        nan=int((differ & (np.isnan(x) | np.isnan(y))).sum()),
    )
    assert found == wanted


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.startswith("float8")])
def test_every_code_of_a_one_byte_float_has_its_value(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(values(codes, dtype)[:, 0], native(codes, dtype).astype(np.float64))


def test_packed_numbers_have_the_values_of_ml_dtypes() -> None:
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    codes = np.arange(256, dtype=np.uint8)
    expected = np.stack([nibbles[codes & 15], nibbles[codes >> 4]], axis=-1)
    np.testing.assert_array_equal(values(codes, "float4_e2m1fn_x2"), expected)
    both = compare_elements(
        np.array([0x70, 0x12], np.uint8), np.array([0x70, 0x1F], np.uint8), "float4_e2m1fn_x2"
    )
    assert both == ElementDiff(elements=2, changed=1, largest=7.0)


@given(data=st.data(), dtype=st.sampled_from(WHOLE), count=st.integers(1, 8))
def test_integers_differ_exactly(data: st.DataObject, dtype: str, count: int) -> None:
    a, b = (bits_of(data.draw, dtype, count) for _ in range(2))
    apart = [abs(int(x) - int(y)) for x, y in zip(a, b, strict=True) if x != y]
    found = compare_elements(a, b, dtype)
    assert (found.changed, found.largest, found.nan) == (len(apart), max(apart, default=None), 0)


def test_the_ends_of_64_bits_are_apart_exactly() -> None:
    ends = np.array([-(2**63)]), np.array([2**63 - 1])
    assert compare_elements(*ends, "int64").largest == 2**64 - 1


@pytest.mark.parametrize(("dtype", "real"), [("complex32", "f2"), ("complex64", "f4"), ("complex128", "f8")])
def test_complex_numbers_are_one_element(dtype: str, real: str) -> None:
    a = np.array([[1, 2], [0, 0], [5, np.nan], [np.inf, 1]], real)
    b = np.array([[1, 2], [3, 4], [5, 0], [np.inf, 3]], real)
    bits = [np.ascontiguousarray(x).reshape(-1).view(carrier(dtype)) for x in (a, b)]
    assert compare_elements(*bits, dtype) == ElementDiff(elements=4, changed=3, largest=5.0, nan=1)


def test_signs_of_zero_and_payloads_of_nan_are_changes_of_bits() -> None:
    a, b = (np.array(v, np.uint32) for v in ([0, 0x7FC00000], [0x80000000, 0x7FC00001]))
    assert compare_elements(a, b, "float32") == ElementDiff(elements=2, changed=2, largest=0.0, nan=1)


def test_a_bool_that_flips_is_one_apart() -> None:
    found = compare_elements(np.array([True, False]), np.array([True, True]), "bool")
    assert found == ElementDiff(elements=2, changed=1, largest=1)


def test_every_block_of_values_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptstore.elements.BLOCK", 3)
    a, b = np.zeros(10, np.float32), np.arange(10, dtype=np.float32)
    b[5] = np.nan
    found = compare_elements(a.view(np.uint32), b.view(np.uint32), "float32")
    assert found == ElementDiff(elements=10, changed=9, largest=9.0, nan=1)
