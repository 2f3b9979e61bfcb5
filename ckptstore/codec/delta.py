"""A chunk as its difference from the chunk of an earlier checkpoint.

One step of RL at a learning rate of 1e-6 changes a few words in a hundred of BF16 weights. `sparse` names them:
how many unchanged words lie between, and old XOR new; `xor` has that for every word, which is better when most
have changed. Both are exact in either direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.codec.base import WORDS, Bytes
from ckptstore.codec.byteplane import BLOCK_WORDS, join_planes, pack_planes, split_planes, unpack_planes
from ckptstore.codec.zstd import compress, decompress
from ckptstore.errors import CorruptError, InternalError

_GAP_MAX = 0xFFFF
_FIND_WIDE = 1 << 16
_APPLY_ENTRIES = 1 << 16


def _of_base(base: Bytes | None, nbytes: int) -> Bytes:
    if base is None or base.size != nbytes:
        size = None if base is None else base.size
        raise InternalError(f"a delta of {nbytes} bytes was asked against a base of {size}; please report it")
    return base


@dataclass(frozen=True, slots=True)
class Xor:
    """Every word XOR the base's, as byte planes."""

    name: str = "xor+zstd"
    needs_base: bool = True

    def encode(self, data: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> bytes:
        words = data.view(WORDS[word_nbytes])
        old = _of_base(base, data.size).view(WORDS[word_nbytes])
        planes = np.empty((word_nbytes, words.size), np.uint8)
        scratch = np.empty(min(BLOCK_WORDS, words.size), words.dtype)
        for at in range(0, words.size, BLOCK_WORDS):
            block = words[at : at + BLOCK_WORDS]
            np.bitwise_xor(block, old[at : at + block.size], out=scratch[: block.size])
            split_planes(scratch[: block.size], planes[:, at : at + block.size])
        return pack_planes(planes)

    def decode(self, stored: Bytes, out: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> None:
        old = _of_base(base, out.size).view(WORDS[word_nbytes])
        words = out.view(WORDS[word_nbytes])
        planes = np.empty((word_nbytes, words.size), np.uint8)
        unpack_planes(stored, planes)
        scratch = np.empty(min(BLOCK_WORDS, words.size), words.dtype)
        for at in range(0, words.size, BLOCK_WORDS):
            change = scratch[: min(BLOCK_WORDS, words.size - at)]
            join_planes(planes[:, at : at + BLOCK_WORDS], change)
            np.bitwise_xor(change, old[at : at + BLOCK_WORDS], out=words[at : at + BLOCK_WORDS])


@dataclass(frozen=True, slots=True)
class Sparse:
    """The words that changed.

    8 bytes: how many entries. One frame: the low bytes of all gaps, their high bytes, then the byte planes
    of all values. An entry skips `gap` words and XORs `value` onto the next; a longer gap takes entries of
    the longest gap whose value is 0.
    """

    name: str = "sparse+zstd"
    needs_base: bool = True

    def encode(self, data: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> bytes:
        words = data.view(WORDS[word_nbytes])
        old = _of_base(base, data.size).view(WORDS[word_nbytes])
        places, changes = _find_changed(words, old)
        gaps, values = _entries(places, changes)
        columns = np.empty((2 + word_nbytes, len(gaps)), np.uint8)
        split_planes(gaps, columns[:2])
        split_planes(values, columns[2:])
        return np.array([len(gaps)], "<u8").tobytes() + (compress(columns.reshape(-1)) if len(gaps) else b"")

    def decode(self, stored: Bytes, out: Bytes, *, word_nbytes: int, base: Bytes | None = None) -> None:
        words = out.view(WORDS[word_nbytes])
        head = stored[:8].tobytes()
        count = int.from_bytes(head, "little")
        # Every entry moves on by at least one word: more of them than words cannot be.
        if len(head) != 8 or count > words.size:
            raise CorruptError(f"a sparse delta of {len(stored)} bytes names {count} of {words.size} words")
        columns = np.empty((2 + word_nbytes, count), np.uint8)
        decompress(stored[8:], columns.reshape(-1))
        if base is not out:
            np.copyto(out, _of_base(base, out.size))
        gaps = np.empty(min(count, _APPLY_ENTRIES), np.uint16)
        values = np.empty(len(gaps), words.dtype)
        at = -1
        for first in range(0, count, _APPLY_ENTRIES):
            some = columns[:, first : first + _APPLY_ENTRIES]
            n = some.shape[1]
            join_planes(some[:2], gaps[:n])
            join_planes(some[2:], values[:n])
            places = np.cumsum(gaps[:n], dtype=np.int64)
            places += np.arange(at + 1, at + 1 + n)
            at = int(places[-1])
            if at >= words.size:  # places rise, so this is the one to look at
                raise CorruptError(f"a sparse delta reaches word {at} of {words.size}")
            changed = words.take(places)
            np.bitwise_xor(changed, values[:n], out=changed)
            words[places] = changed


def _find_changed(
    words: npt.NDArray[Any], old: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Indices of the words that differ, rising, and old XOR new of each.

    Eight bytes at a time, and word by word only within those that differ: marking and looking through marks
    cost more than all else. Block by block, so that the marks stay in the cache.
    """
    per = 8 // words.itemsize
    bits = per.bit_length() - 1
    whole = words.size // per * per
    wide, wide_old = words[:whole].view(np.uint64), old[:whole].view(np.uint64)
    places, values = [np.zeros(0, np.int64)], [np.zeros(0, words.dtype)]
    marks = np.empty(min(_FIND_WIDE, wide.size), np.bool_)
    for at in range(0, wide.size, _FIND_WIDE):
        block, block_old = wide[at : at + _FIND_WIDE], wide_old[at : at + _FIND_WIDE]
        np.not_equal(block, block_old, out=marks[: block.size])
        hits = np.flatnonzero(marks[: block.size])
        change = (block.take(hits) ^ block_old.take(hits)).view(words.dtype)
        inner = np.flatnonzero(change != 0)
        values.append(change.take(inner))
        hits += at
        hits <<= bits
        found = hits.take(inner >> bits)
        found += inner & (per - 1)
        places.append(found)
    rest = words[whole:] ^ old[whole:]
    places.append(np.flatnonzero(rest) + whole)
    values.append(rest[rest != 0])
    return np.concatenate(places), np.concatenate(values)


def _entries(
    places: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
    """Gaps before each place, none longer than 16 bits hold."""
    gaps = np.diff(places, prepend=-1) - 1
    fillers = gaps // (_GAP_MAX + 1)
    if not fillers.any():
        return gaps.astype(np.uint16), values
    at = np.cumsum(fillers) + np.arange(len(places))
    long = np.full(len(places) + int(fillers.sum()), _GAP_MAX, np.uint16)
    filled = np.zeros(len(long), values.dtype)
    long[at] = gaps - fillers * (_GAP_MAX + 1)
    filled[at] = values
    return long, filled
