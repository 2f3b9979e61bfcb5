"""Every codec gives back what it was given, bit by bit, and refuses what it did not write."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.chunktable import DELTAS
from ckptstore.codec.base import NAMES, WORDS, find_codec, word_nbytes_of
from ckptstore.codec.byteplane import BLOCK_WORDS, join_planes, split_planes
from ckptstore.codec.zstd import compress
from ckptstore.errors import CorruptError, InternalError, UnsupportedFormatError
from ckptstore.tensor import DTYPES

Bytes = npt.NDArray[np.uint8]


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, Bytes, Bytes]:
    """(word nbytes, data, base): few, many or all words changed, runs of zeros, sizes around the blocks."""
    word = draw(st.sampled_from(sorted(WORDS)))
    count = draw(
        st.one_of(
            st.integers(0, 70),
            st.sampled_from([BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 70_000, 140_000, 200_001]),
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["noise", "zeros", "normal"]))
    if kind == "normal":
        data = (rng.standard_normal(count * word // 4 + 1).astype(np.float32)).view(np.uint8)[: count * word]
    else:
        data = rng.integers(0, 256 if kind == "noise" else 1, count * word, np.uint8)
    base = data.copy()
    changed = rng.random(count) < draw(st.sampled_from([0.0, 2e-5, 0.02, 0.5, 1.0]))
    base.view(WORDS[word])[changed] ^= np.asarray(rng.integers(0, 256, int(changed.sum())), WORDS[word])
    return word, data, base


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(chunk=chunks())
def test_what_is_decoded_is_what_was_encoded(name: str, chunk: tuple[int, Bytes, Bytes]) -> None:
    word, data, base = chunk
    codec = find_codec(name)
    stored = np.frombuffer(codec.encode(data, word_nbytes=word, base=base), np.uint8)
    out = np.full(data.size, 0xA5, np.uint8)
    codec.decode(stored, out, word_nbytes=word, base=base)
    assert out.tobytes() == data.tobytes()
    in_place = base.copy()
    codec.decode(stored, in_place, word_nbytes=word, base=in_place)
    assert in_place.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(chunk=chunks(), data=st.data())
def test_a_damaged_form_is_refused_or_gives_other_bytes_of_the_same_size(
    name: str, chunk: tuple[int, Bytes, Bytes], data: st.DataObject
) -> None:
    word, plain, base = chunk
    codec = find_codec(name)
    stored = bytearray(codec.encode(plain, word_nbytes=word, base=base))
    how = data.draw(st.sampled_from(["cut", "longer", "flip", "other"]))
    if how == "cut":
        stored = stored[: data.draw(st.integers(0, max(len(stored) - 1, 0)))]
    elif how == "longer":
        stored += b"\0" * data.draw(st.integers(1, 9))
    elif how == "flip" and stored:
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        stored = bytearray(data.draw(st.binary(max_size=40)))
    memory = np.full(plain.size + 16, 0xA5, np.uint8)
    with suppress(CorruptError):
        codec.decode(
            np.frombuffer(bytes(stored), np.uint8), memory[: plain.size], word_nbytes=word, base=base
        )
    assert (memory[plain.size :] == 0xA5).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_form_that_is_cut_anywhere_is_refused(name: str) -> None:
    data = np.random.default_rng(0).standard_normal(300).astype(np.float32).view(np.uint8)
    base = data.copy()
    base[::16] ^= 1
    codec = find_codec(name)
    stored = np.frombuffer(codec.encode(data, word_nbytes=4, base=base), np.uint8)
    for stop in range(len(stored)):
        with pytest.raises(CorruptError):
            codec.decode(stored[:stop], np.empty_like(data), word_nbytes=4, base=base)


@given(gaps=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=8), words=st.integers(0, 300_000))
def test_gaps_that_leave_the_chunk_are_refused_and_others_land_where_they_say(
    gaps: list[int], words: int
) -> None:
    columns = np.zeros((4, len(gaps)), np.uint8)
    split_planes(np.array(gaps, np.uint16), columns[:2])
    columns[2] = 1
    stored = len(gaps).to_bytes(8, "little") + compress(columns.reshape(-1))
    memory = np.full(2 * words + 16, 0xA5, np.uint8)
    base = np.zeros(2 * words, np.uint8)
    codec = find_codec("sparse+zstd")
    places = np.cumsum(gaps) + np.arange(len(gaps))
    if places[-1] < words:
        codec.decode(np.frombuffer(stored, np.uint8), memory[: 2 * words], word_nbytes=2, base=base)
        assert np.flatnonzero(memory[: 2 * words].view(np.uint16)).tolist() == places.tolist()
    else:
        with pytest.raises(CorruptError, match="of"):
            codec.decode(np.frombuffer(stored, np.uint8), memory[: 2 * words], word_nbytes=2, base=base)
    assert (memory[2 * words :] == 0xA5).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("claim", [0, 7, 9, 1 << 20, 1 << 42, (1 << 64) - 3])
def test_a_frame_that_claims_another_size_is_refused_before_memory_is_taken(name: str, claim: int) -> None:
    frame = (0xFD2FB528).to_bytes(4, "little") + bytes([0xE0]) + claim.to_bytes(8, "little") + b"\1\0\0"
    head = {"zstd": b"", "sparse+zstd": (2).to_bytes(8, "little")}.get(
        name, (2 * len(frame) + 1).to_bytes(8, "little") + (2 * len(frame) + 1).to_bytes(8, "little")
    )
    stored = np.frombuffer(head + frame * (1 + (len(head) == 16)), np.uint8)
    size = 8 if name in ("zstd", "sparse+zstd") else 16
    with pytest.raises(CorruptError, match="frame"):
        find_codec(name).decode(
            stored, np.empty(size, np.uint8), word_nbytes=2, base=np.empty(size, np.uint8)
        )


def test_a_sparse_delta_that_claims_more_words_than_there_are_allocates_nothing() -> None:
    claim = np.frombuffer((2**60).to_bytes(8, "little"), np.uint8)
    with pytest.raises(CorruptError, match="names 1152921504606846976 of 8 words"):
        find_codec("sparse+zstd").decode(
            claim, np.empty(16, np.uint8), word_nbytes=2, base=np.empty(16, np.uint8)
        )


def test_one_changed_word_after_a_long_gap_costs_a_few_bytes() -> None:
    base = np.zeros(1_000_000, np.uint8)
    data = base.copy()
    data[-2] = 7
    assert len(find_codec("sparse+zstd").encode(data, word_nbytes=2, base=base)) < 64


def test_weights_after_a_small_step_shrink_to_a_few_hundredths() -> None:
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    data = base.copy()
    data[rng.random(base.size) < 0.017] += 1
    stored = find_codec("sparse+zstd").encode(data.view(np.uint8), word_nbytes=2, base=base.view(np.uint8))
    assert len(stored) < 0.025 * data.nbytes


def test_noise_grows_by_no_more_than_its_heads() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    assert len(find_codec("byteplane+zstd").encode(noise, word_nbytes=4)) <= noise.size + 4 * 8


@pytest.mark.parametrize("word", sorted(WORDS))
def test_planes_are_bytes_by_significance(word: int) -> None:
    words = np.random.default_rng(word).integers(0, 256, 40_000 * word, np.uint8).view(WORDS[word])
    planes = np.empty((word, words.size), np.uint8)
    split_planes(words, planes)
    assert (words.astype(f"<u{word}").view(np.uint8).reshape(-1, word) == planes.T).all()
    joined = np.empty_like(words)
    join_planes(planes, joined)
    assert (joined == words).all()


@pytest.mark.parametrize("name", ["xor+zstd", "sparse+zstd"])
@pytest.mark.parametrize("base", [None, np.zeros(7, np.uint8)])
def test_a_delta_without_its_base_is_our_own_fault(name: str, base: Bytes | None) -> None:
    with pytest.raises(InternalError, match="a delta of 8 bytes"):
        find_codec(name).encode(np.zeros(8, np.uint8), word_nbytes=2, base=base)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(UnsupportedFormatError, match="'lz99' is not known"):
        find_codec("lz99")


def test_chunk_tables_know_which_codecs_have_a_base() -> None:
    assert {name for name in NAMES if find_codec(name).needs_base} == DELTAS


def test_every_dtype_consists_of_words() -> None:
    assert all(size % word_nbytes_of(size) == 0 for size in DTYPES.values())
