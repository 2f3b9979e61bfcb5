"""Encode chunks beside the writer, by rule or where it pays, and keep the bases that deltas start from.

What pays is decided by pure functions (plan/encode.py) from what is measured here: how fast the device takes bytes,
how fast a codec makes them, and how few. Nothing is encoded before the device has been seen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from ckptstore.chunkbase import ChunkBase
from ckptstore.chunktable import RAW
from ckptstore.codec.base import WORDS, find_codec, word_nbytes_of
from ckptstore.decode import Decoder
from ckptstore.errors import CkptStoreError
from ckptstore.plan.encode import AUTO, DELTA, CodecRules, Measured, choose_codec
from ckptstore.store.base import Store
from ckptstore.tensor import Box, TensorSpec, itemsize

CHUNK_NBYTES_MIN: Final = 4096  # a frame's head and a row's digests cost more than less can save
DEVICE_NBYTES_MIN: Final = 16 << 20  # less says more of latency than of speed
SAMPLE_NBYTES: Final = 4 << 20
SPARSE_MAX: Final = 0.25  # of a sample's words changed: above, XOR of all words is smaller and as fast
DELTA_MAX: Final = 0.5  # of the chunk: a larger delta is not worth a second read at each restore
WORTH_MAX: Final = 0.97
_FULL: Final = ("zstd", "byteplane+zstd")
_LIKELY_DELTA: Final = Measured(
    ratio=0.05, nbytes_per_s=1e9
)  # until one was made: docs/explanation/performance.md
_DELTA_ITEM_NBYTES_MAX: Final = 2  # masters and moments change in nearly every word

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A chunk as it will be stored: `base` is "" for all but deltas, `reuses` counts the checkpoints on one base."""

    codec: str
    data: Bytes
    stored_digest: bytes
    base: str = ""
    reuses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a chunk may be a difference from, and how many checkpoints build on it, this one included."""

    base: ChunkBase
    reuses: int


class DeviceMeter:
    """How many bytes a second the device takes while it has something to do. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._flights, self._since = 0, 0.0
        self._busy_s, self._nbytes = 0.0, 0
        self.nbytes_per_s: float | None = None

    @contextmanager
    def busy(self, nbytes: int) -> Iterator[None]:
        """Around each call that writes; `nbytes` of it."""
        with self._lock:
            if not self._flights:
                self._since = self._clock()
            self._flights += 1
        try:
            yield
        finally:
            with self._lock:
                self._flights -= 1
                self._nbytes += nbytes
                if not self._flights:
                    self._busy_s += self._clock() - self._since

    @property
    def busy_s(self) -> float:
        """Since the last speed was taken; what is under way is not in it yet."""
        with self._lock:
            return self._busy_s

    def settle(self) -> None:
        """Between two saves: take what was seen as the speed, if it was enough."""
        with self._lock:
            if self._nbytes >= DEVICE_NBYTES_MIN and self._busy_s > 0:
                self.nbytes_per_s = self._nbytes / self._busy_s
                self._busy_s, self._nbytes = 0.0, 0


class Encoder:
    """Encodes the chunks of one member. `encode` may be called from several threads at once.

    At most `bases_nbytes` of memory hold the bytes of bases. Under the rule "delta" the others are read back from the
    store when they are needed; under "auto" chunks without a base in memory are stored in full.
    """

    def __init__(
        self, *, rules: CodecRules, store: Store, bases_nbytes: int, cores: int | None = None
    ) -> None:
        self.rules = rules
        self.cores = cores or max(1, len(os.sched_getaffinity(0)) // 2)
        self.meter = DeviceMeter()
        self._decoder = Decoder(store.read_into)
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str], Measured] = {}
        self._bases: dict[tuple[str, Box], tuple[str, Bytes]] = {}
        self._left_nbytes = bases_nbytes

    def may_encode(self, spec: TensorSpec, nbytes: int) -> bool:
        """False where a chunk is raw without a look at it."""
        if nbytes < CHUNK_NBYTES_MIN:
            return False
        choice = self._choice(spec)
        return choice != RAW and (choice != AUTO or self.meter.nbytes_per_s is not None)

    def encode(self, spec: TensorSpec, box: Box, data: Bytes, start: Start | None) -> Form | None:
        """The form in which to store a chunk; None: raw."""
        choice = self._choice(spec)
        word = word_nbytes_of(itemsize(spec.dtype))
        base = self._base(spec, box, data, start, word, read=choice == DELTA) if start is not None else None
        name = choice
        if choice == AUTO:
            name = self._choose(spec, data, base, word)
        if name == DELTA:
            if base is not None and start is not None:
                form = self._make(spec, DELTA, data, base, word)
                if form.data.size <= DELTA_MAX * data.size:
                    return Form(
                        codec=form.codec, data=form.data, stored_digest=form.stored_digest,
                        base=str(start.base), reuses=start.reuses,
                    )  # fmt: skip
            name = RAW if choice == DELTA else self._choose(spec, data, None, word)
        if name == RAW:
            return None
        form = self._make(spec, name, data, None, word)
        return form if form.data.size < WORTH_MAX * data.size else None

    def wants_base(self, spec: TensorSpec, nbytes: int) -> bool:
        """Will deltas be made against a chunk that is now stored in full?"""
        choice = self._choice(spec)
        if nbytes < CHUNK_NBYTES_MIN or choice not in (DELTA, AUTO):
            return False
        if choice == DELTA:
            return True
        pays = choose_codec(
            {DELTA: self._measured.get((spec.dtype, DELTA), _LIKELY_DELTA)},
            device_nbytes_per_s=self.meter.nbytes_per_s,
            cores=self.cores,
        )
        return pays != RAW and itemsize(spec.dtype) <= _DELTA_ITEM_NBYTES_MAX

    def keep(self, spec: TensorSpec, box: Box, place: ChunkBase, data: Bytes) -> None:
        """Hold a copy of the bytes of a chunk that was stored in full, if there is room."""
        key = (spec.name, box)
        with self._lock:
            _, memory = self._bases.pop(key, ("", None))
            if memory is not None and memory.size != data.size:
                self._left_nbytes += memory.size
                memory = None
            if memory is None:
                if data.size > self._left_nbytes:
                    return
                self._left_nbytes -= data.size
        memory = np.empty_like(data) if memory is None else memory
        np.copyto(memory, data)
        with self._lock:
            self._bases[key] = (str(place), memory)

    # -- inside

    def _choice(self, spec: TensorSpec) -> str:
        return self.rules.find(spec.name.partition("/")[2], spec.dtype)

    def _base(
        self, spec: TensorSpec, box: Box, data: Bytes, start: Start, word: int, *, read: bool
    ) -> Bytes | None:
        with self._lock:
            place, memory = self._bases.get((spec.name, box), ("", None))
        if memory is not None and place == str(start.base) and memory.size == data.size:
            return memory
        if not read:
            return None
        memory = np.empty_like(data)
        try:
            self._decoder.read_base(start.base, memory, word)
        except CkptStoreError:  # the chunk is stored in full then, whatever became of its base
            return None
        self.keep(spec, box, start.base, memory)
        return memory

    def _choose(self, spec: TensorSpec, data: Bytes, base: Bytes | None, word: int) -> str:
        names = (*_FULL, DELTA) if base is not None else _FULL
        for name in names:
            if (spec.dtype, name) not in self._measured:
                part = None if base is None else base[:SAMPLE_NBYTES]
                self._make(spec, name, data[:SAMPLE_NBYTES], part, word)
        return choose_codec(
            {name: self._measured[spec.dtype, name] for name in names},
            device_nbytes_per_s=self.meter.nbytes_per_s,
            cores=self.cores,
        )

    def _make(self, spec: TensorSpec, name: str, data: Bytes, base: Bytes | None, word: int) -> Form:
        began = time.perf_counter()
        codec = name if name != DELTA else _kind_of_delta(data, base, word)
        form = np.frombuffer(find_codec(codec).encode(data, word_nbytes=word, base=base), np.uint8)
        digest = xxhash.xxh3_128_digest(form.data)
        taken_s = max(time.perf_counter() - began, 1e-9)
        found = Measured(ratio=form.size / data.size, nbytes_per_s=data.size / taken_s)
        before = self._measured.get((spec.dtype, name), found)
        self._measured[spec.dtype, name] = Measured(
            ratio=(3 * before.ratio + found.ratio) / 4,
            nbytes_per_s=(3 * before.nbytes_per_s + found.nbytes_per_s) / 4,
        )
        return Form(codec=codec, data=form, stored_digest=digest)


def _kind_of_delta(data: Bytes, base: Bytes | None, word: int) -> str:
    sample = data[: SAMPLE_NBYTES // 16].view(WORDS[word])
    if base is None or not sample.size:
        return "sparse+zstd"
    changed = np.count_nonzero(sample != base[: SAMPLE_NBYTES // 16].view(WORDS[word]))
    return "sparse+zstd" if changed <= SPARSE_MAX * sample.size else "xor+zstd"
