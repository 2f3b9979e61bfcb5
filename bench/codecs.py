"""What codecs make of real training state, and how fast beside one copy of the same bytes by the same thread.

CPU time of the thread, the least of several runs: others on the machine then count for little. Targets that were
set in GB/s are those of a machine that copies 20 GB/s, so "at most 8 copies" stands for 2.5 GB/s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.rows import Row
from bench.small_model import Bytes, Trained, train
from ckptstore.codec.base import WORDS, find_codec
from ckptstore.codec.byteplane import join_planes, split_planes

CHUNK_NBYTES = 24 << 20
TRIES = 9


def rows() -> Iterator[Row]:
    """Deltas of BF16 weights, byte planes, then each codec on each kind of state."""
    state = train()
    yield from _deltas(state)
    for name, word in (("weights", 2), ("master", 4)):
        yield from _planes(f"{'BF16' if word == 2 else 'FP32'} {name}", _chunk(_of(state, name)), word)
    for name, word in (("weights", 2), ("master", 4), ("exp_avg", 4), ("exp_avg_sq", 4)):
        for codec in ("zstd", "byteplane+zstd"):
            yield from _codec(f"{name}, {codec}", codec, _chunk(_of(state, name)), word, targets=False)


def _of(state: Trained, name: str) -> Bytes:
    found: Bytes = getattr(state, {"weights": "before"}.get(name, name))
    return found


def _chunk(data: Bytes) -> Bytes:
    return data[:CHUNK_NBYTES]


def _copies(call: Callable[[], object], data: Bytes) -> tuple[float, float]:
    """CPU time of a call as a multiple of a copy's, taken in turn, and GB/s of `data`."""
    target = np.ones_like(data)
    taken: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(TRIES):
        for n, each in enumerate((lambda: np.copyto(target, data), call)):
            start = time.thread_time()
            each()
            taken[n].append(time.thread_time() - start)
    copy_s, call_s = min(taken[0]), min(taken[1])
    return call_s / copy_s, data.nbytes / call_s / 1e9


def _deltas(state: Trained) -> Iterator[Row]:
    before = _chunk(state.before)
    for steps, after in state.later.items():
        data = _chunk(after)
        changed = float((data.view(np.uint16) != before.view(np.uint16)).mean())
        for codec in ("sparse+zstd", "xor+zstd"):
            what = f"BF16 weights, {steps} steps at 1e-6, {changed:.2%} changed, {codec}"
            yield from _codec(
                what, codec, data, 2, base=before, targets=codec == "sparse+zstd" and changed < 0.02
            )


def _codec(
    what: str, name: str, data: Bytes, word: int, *, base: Bytes | None = None, targets: bool
) -> Iterator[Row]:
    codec = find_codec(name)
    stored = np.frombuffer(codec.encode(data, word_nbytes=word, base=base), np.uint8)
    out = np.empty_like(data)
    encode, encode_speed = _copies(lambda: codec.encode(data, word_nbytes=word, base=base), data)
    apply, apply_speed = _copies(lambda: codec.decode(stored, out, word_nbytes=word, base=base), data)
    yield Row(
        what=f"{what}: stored",
        value=100 * len(stored) / data.nbytes,
        unit="% of raw",
        at_most=2.5 if targets else None,
    )
    for how, copies, speed, at_most in (
        ("encode", encode, encode_speed, 8),
        ("decode", apply, apply_speed, 4),
    ):
        yield Row(
            what=f"{what}: {how}",
            value=copies,
            unit="× the copy",
            at_most=at_most if targets else None,
            note=f"{speed:.2f} GB/s",
        )


def _planes(what: str, data: Bytes, word: int) -> Iterator[Row]:
    words = data.view(WORDS[word])
    planes, out = np.empty((word, words.size), np.uint8), np.empty_like(words)
    for how, call in (
        ("split into byte planes", lambda: split_planes(words, planes)),
        ("joined from them", lambda: join_planes(planes, out)),
    ):
        copies, speed = _copies(call, data)
        yield Row(what=f"{what}: {how}", value=copies, unit="× the copy", at_most=5, note=f"{speed:.2f} GB/s")
