"""One value that is no tensor, as tagged JSON, and back: numbers, text, bytes and numpy scalars.

Plain JSON where it gives back every bit, a tag where it would not (infinities, integers beyond 64 bits,
lone surrogates). Apart from `state.py`, which walks the containers. The tags: docs/reference/format-v1.md.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.tensor import DTYPES

INTEGER_BITS = 63  # of JSON numbers: what other readers of JSON can be expected to hold, less the sign

_NUMPY_KINDS = "biufc"


def is_utf8(text: str) -> bool:
    """Has the text no lone surrogate?"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def numpy_dtype(array: Any, where: str) -> str:
    """ckptstore's name of a numpy dtype; masked and object arrays, strings and byte-swapped numbers are refused."""
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInputError(
            f"{where} is a masked array, whose mask would be lost: save .data and .mask as two arrays",
            name=where,
        )
    if dtype.kind not in _NUMPY_KINDS or not dtype.isnative or dtype.name not in DTYPES:
        raise InvalidInputError(
            f"{where} is a numpy array of dtype {dtype}, which cannot be stored: convert it to a native number or "
            f"bool dtype",
            name=where,
        )
    return str(dtype.name)


def encode_value(value: Any, path: str) -> Any:
    """One leaf that is no tensor. InvalidInputError names the path of what cannot be saved."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:  # JSON would join two lone surrogates into one character
        return value if is_utf8(value) else {"s": _text(value.encode("utf-8", "surrogatepass"))}
    if type(value) is int:  # Python refuses decimal text of thousands of digits
        return value if value.bit_length() <= INTEGER_BITS else {"i": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if type(value) is complex:
        return {"c": [encode_value(value.real, path), encode_value(value.imag, path)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": _text(bytes(value))}
    if isinstance(value, np.generic):
        return {"n": [numpy_dtype(value, path), _text(np.asarray(value).tobytes())]}
    raise InvalidInputError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without running "
        f"code at load: save its numbers, strings or tensors, or give it state_dict and load_state_dict",
        path=path,
    )


def decode_value(tag: str, inner: Any) -> Any:
    """The value that `encode_value` tagged."""
    if tag == "f":
        return float(inner)
    if tag == "i":
        return int(inner, 16)
    if tag == "s":
        return base64.b64decode(inner).decode("utf-8", "surrogatepass")
    if tag == "c":
        real, imag = (decode_value(*next(iter(v.items()))) if isinstance(v, dict) else v for v in inner)
        return complex(real, imag)
    if tag == "b":
        return base64.b64decode(inner)
    if tag == "n":
        return np.frombuffer(base64.b64decode(inner[1]), np.dtype(inner[0]))[0]
    raise InvalidInputError(f"skeleton tag {tag!r} is unknown: it was written by a newer ckptstore", tag=tag)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
