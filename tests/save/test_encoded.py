"""Encoded chunks: read bit by bit as they were saved, within the budget, and every kind of damage named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.chunkbase import ChunkBase, nbytes_of_bases
from ckptstore.chunktable import DELTAS, RAW, ChunkTable, make_table, merge_tables
from ckptstore.codec.base import NAMES, find_codec, word_nbytes_of
from ckptstore.cut import check_part
from ckptstore.damage import find_damage
from ckptstore.decode import Decoder, working_nbytes
from ckptstore.errors import (
    BudgetExceededError,
    CkptStoreError,
    CorruptError,
    InconsistentCutError,
    UnsupportedFormatError,
)
from ckptstore.indexfile import decode_index, encode_index
from ckptstore.manifest import AttemptId, Index, Member, ObjectRef, Part, SegmentRef
from ckptstore.plan.load import all_reads
from ckptstore.reader import fetch_chunks, read_leaves
from ckptstore.state import TensorLeaf
from ckptstore.store.memory import MemoryStore
from ckptstore.tablefile import check_table, decode_part, encode_part
from ckptstore.tensor import Box, TensorSpec, itemsize

OWN, OLD = "data/f0001/s00000002-000/a", "data/f0001/s00000001-000/b"
DTYPES = ("bfloat16", "float32", "uint8", "complex128")
FULL = (RAW, "zstd", "byteplane+zstd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Chunks of one tensor each, in a segment OWN, whose bases lie in OLD."""

    objects: dict[str, bytes]
    table: ChunkTable
    whole: dict[str, npt.NDArray[np.uint8]]

    def store(self, **changed: bytes | None) -> MemoryStore:
        store = MemoryStore()
        for key, data in self.objects.items():
            if changed.get(key[-1], data) is not None:
                store.create(key, changed.get(key[-1]) or data)
        return store


def shorter(name: str, data: Any, word: int, base: Any) -> tuple[str, bytes]:
    """The codec, or raw where it does not pay, and the stored bytes."""
    form = data.tobytes() if name == RAW else find_codec(name).encode(data, word_nbytes=word, base=base)
    return (name, form) if len(form) < data.size else (RAW, data.tobytes())


def encoded(kinds: list[tuple[str, str, str]], *, words: int = 1000, seed: int = 0) -> Encoded:
    """A chunk for each (dtype, codec, codec of its base), compressible, with few changes since its base."""
    rng = np.random.default_rng(seed)
    own, old = bytearray(rng.bytes(8)), bytearray(rng.bytes(11))
    columns: dict[str, list[Any]] = {
        name: [] for name in ("spec", "start", "nbytes", "digest", "codec", "own", "base")
    }
    whole = {}
    for n, (dtype, name, base_name) in enumerate(kinds):
        spec = TensorSpec(name=f"r/t{n:03}", dtype=dtype, shape=(words,))
        word = word_nbytes_of(itemsize(dtype))
        before = rng.integers(0, 5, spec.nbytes, np.uint8)
        data = before.copy()
        data[rng.integers(0, data.size, 9)] ^= 17
        whole[spec.name] = data
        base = None
        name, form = shorter(name, data, word, before)
        if name in DELTAS:
            base_name, old_form = shorter(base_name, before, word, before)
            digest = xxhash.xxh3_128_digest(before)
            base = ChunkBase(
                segment=OLD, start=len(old), nbytes=len(old_form), codec=base_name, digest=digest
            )
            old += old_form
        values = (
            spec, len(own), len(form), xxhash.xxh3_128_digest(data), name,
            None if name == RAW else xxhash.xxh3_128_digest(form), "" if base is None else str(base),
        )  # fmt: skip
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        own += form
    table = make_table(
        specs=columns["spec"],
        boxes=[Box.whole(spec.shape) for spec in columns["spec"]],
        segments=[OWN] * len(kinds),
        starts=columns["start"],
        nbytes=columns["nbytes"],
        digests=columns["digest"],
        codecs=columns["codec"],
        stored_digests=columns["own"],
        bases=columns["base"],
    )
    return Encoded(objects={OWN: bytes(own), OLD: bytes(old)}, table=table, whole=whole)


MIXED = [
    (dtype, name, base)
    for dtype in DTYPES
    for name, base in [(RAW, RAW), *((n, FULL[k % 3]) for k, n in enumerate(NAMES)), ("sparse+zstd", "zstd")]
]


def leaves_of(mixed: Encoded) -> list[TensorLeaf]:
    return [
        TensorLeaf(
            spec=replace(spec, dtype=spec.dtype), box=Box.whole(spec.shape),
            data=np.zeros(spec.shape, np.dtype([("", np.uint8, itemsize(spec.dtype))])), replicas=None, frozen=False,
        )
        for spec in mixed.table.tensors
    ]  # fmt: skip


@pytest.mark.parametrize("words", [1, 1000, 70_001])
def test_what_is_read_is_what_was_saved(words: int) -> None:
    mixed = encoded(MIXED, words=words)
    leaves = leaves_of(mixed)
    report = read_leaves(mixed.store(), mixed.table, leaves)
    for leaf in leaves:
        assert leaf.data.tobytes() == mixed.whole[leaf.spec.name].tobytes()
    assert report.nbytes_read >= int(mixed.table.nbytes.sum()) + nbytes_of_bases(mixed.table)
    assert find_damage(mixed.store(), mixed.table, []) == []


def test_decoding_stays_within_the_budget_and_says_when_it_cannot() -> None:
    """Chunks of 200,000 words: the largest needs its stored bytes, its own, and what decoding takes."""
    mixed = encoded(MIXED, words=200_000)
    rows = np.arange(len(mixed.table))
    need = int((mixed.table.nbytes + mixed.table.sizes + working_nbytes(mixed.table, rows)).max()) + (1 << 20)
    report = read_leaves(mixed.store(), mixed.table, leaves_of(mixed), memory_budget=need)
    assert report.nbytes_leased <= need
    with pytest.raises(BudgetExceededError):
        read_leaves(mixed.store(), mixed.table, leaves_of(mixed), memory_budget=need // 4)


@settings(max_examples=150)
@given(data=st.data())
def test_any_flipped_byte_of_chunk_or_base_is_named_with_its_segment(data: st.DataObject) -> None:
    row_kind = data.draw(st.sampled_from([kind for kind in MIXED if kind[1] != RAW]))
    mixed = encoded([row_kind], words=300)
    segment = data.draw(st.sampled_from([OWN, OLD] if mixed.table.base else [OWN]))
    at = data.draw(st.integers(8 if segment == OWN else 11, len(mixed.objects[segment]) - 1))
    flipped = bytearray(mixed.objects[segment])
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    store = mixed.store(**{segment[-1]: bytes(flipped)})
    with pytest.raises(CorruptError, match="r/t000") as caught:
        read_leaves(store, mixed.table, leaves_of(mixed))
    assert caught.value.segment == segment
    (found,) = find_damage(store, mixed.table, [])
    assert found.tensor == "r/t000" and segment in found.problem


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_base_that_is_not_there_is_named(how: str) -> None:
    mixed = encoded([("bfloat16", "sparse+zstd", RAW)])
    store = mixed.store(b=None if how == "gone" else mixed.objects[OLD][:-1])
    with pytest.raises(CorruptError, match="r/t000") as caught:
        read_leaves(store, mixed.table, leaves_of(mixed))
    assert caught.value.segment == OLD


def test_a_base_that_is_read_wrong_once_is_read_again() -> None:
    mixed = encoded([("bfloat16", "sparse+zstd", RAW)])
    store, reads = mixed.store(), []

    def once_wrong(segment: str, start: int, buffers: Any) -> None:
        store.read_into(segment, start, buffers)
        reads.append(segment)
        if len(reads) == 1:
            buffers[0][3] ^= 1

    out = np.zeros(2000, np.uint8)
    own = mixed.objects[OWN][int(mixed.table.start[0]) :]
    Decoder(once_wrong)(mixed.table, 0, memoryview(own), out)
    assert out.tobytes() == mixed.whole["r/t000"].tobytes() and reads == [OLD, OLD]


def test_stored_bytes_are_verified_although_the_decoded_ones_are_right() -> None:
    """Bytes that decode to the right ones, and are not those that were written: a frame behind an empty one."""
    mixed = encoded([("float32", "zstd", RAW)])
    form = find_codec("zstd").encode(np.zeros(0, np.uint8), word_nbytes=1)
    own = mixed.objects[OWN] + form
    table = replace(mixed.table, nbytes=mixed.table.nbytes + len(form))
    with pytest.raises(CorruptError, match="has digest"):
        fetch_chunks(mixed.store(a=own), table, all_reads(table)[0], [np.zeros(4000, np.uint8)])


# -- tables


def with_rows(mixed: Encoded, **columns: Any) -> ChunkTable:
    return replace(mixed.table, **columns)


DELTA = ("bfloat16", "sparse+zstd", RAW)


def base_of(mixed: Encoded, **changed: Any) -> str:
    return str(replace(ChunkBase.parse(mixed.table.base[0]), **changed))


REFUSED: dict[str, Callable[[Encoded], ChunkTable]] = {
    "a chain of two deltas": lambda m: with_rows(m, base=(base_of(m, codec="xor+zstd", nbytes=40),)),
    "no base": lambda m: with_rows(m, base=()),
    "a base of another size": lambda m: with_rows(m, base=(base_of(m, nbytes=1999),)),
    "an encoded base that is not smaller": lambda m: with_rows(
        m, base=(base_of(m, codec="zstd", nbytes=2000),)
    ),
    "a base that is no text of one": lambda m: with_rows(m, base=("data/a:0:7",)),
    "an index that is no number": lambda m: with_rows(m, base=(m.table.base[0].replace(":", ":+", 1),)),
    "no digest of the stored bytes": lambda m: with_rows(m, stored_digest=None),
    "more stored bytes than its own": lambda m: with_rows(m, nbytes=np.array([2000])),
    "no stored bytes": lambda m: with_rows(m, nbytes=np.array([0])),
    "a base of a chunk that has none": lambda m: with_rows(m, codecs=("zstd",)),
    "a raw chunk with a digest of stored bytes": lambda m: with_rows(
        m, codecs=("raw",), nbytes=np.array([2000]), base=()
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rows_that_can_never_be_true_are_refused(what: str) -> None:
    mixed = encoded([DELTA])
    check_table(mixed.table, "part")
    with pytest.raises(CorruptError, match="part"):
        check_table(REFUSED[what](mixed), "part")


def test_a_codec_of_a_later_version_is_refused_before_anything_is_read() -> None:
    mixed = encoded([DELTA])
    later = with_rows(mixed, codecs=("lz99",))
    check_table(later, "part")
    with pytest.raises(UnsupportedFormatError, match="'lz99', which this version"):
        read_leaves(MemoryStore(), later, leaves_of(mixed))
    with pytest.raises(UnsupportedFormatError, match="lz99"):
        later = with_rows(mixed, base=(base_of(mixed, codec="lz99", nbytes=40),))
        read_leaves(mixed.store(), later, leaves_of(mixed))


ID = AttemptId(fence=1, step=2)
MEMBER = Member(role="r", rank=0)


def refs(mixed: Encoded) -> tuple[SegmentRef, ...]:
    return tuple(SegmentRef(key=key, nbytes=len(mixed.objects[key]), header="0" * 32) for key in (OLD, OWN))


def part_of(mixed: Encoded) -> Part:
    return Part(
        run="run", write="w", id=ID, member=MEMBER, layout="l", policy_version=None, planned=len(mixed.table),
        segments=refs(mixed), witnesses={OLD: "f0001/s00000001-000"}, state={"d": []}, nbytes_written=1,
        nbytes_reused=0, refused=None, table=mixed.table,
    )  # fmt: skip


def same(one: ChunkTable, other: ChunkTable) -> bool:
    one, other = merge_tables([one]), merge_tables([other])
    return (
        one.base == other.base
        and [one.codecs[n] for n in one.codec] == [other.codecs[n] for n in other.codec]
        and (one.stored_digests.tobytes() == other.stored_digests.tobytes())
    )


def test_parts_and_indexes_keep_codecs_digests_and_bases() -> None:
    mixed = encoded(MIXED)
    assert same(decode_part(encode_part(part_of(mixed)), "part").table, mixed.table)
    check_part(ID, MEMBER, part_of(mixed), "run")
    index = Index(run="run", id=ID, parts=(), segments=refs(mixed), table=mixed.table)
    made = encode_index(index, "index/x.parquet")
    side = {ref.key: data for ref, data in made.side}
    assert same(decode_index(made.chunks, "index", lambda ref: side[ref.key]).table, mixed.table)


def unlisted(part: Part) -> Part:
    return replace(part, segments=part.segments[1:], witnesses={})


def short(part: Part) -> Part:
    return replace(part, segments=(replace(part.segments[0], nbytes=12), part.segments[1]))


@pytest.mark.parametrize("wrong", [unlisted, short, lambda part: replace(part, witnesses={})])
def test_a_part_whose_bases_are_not_listed_with_a_witness_is_refused(wrong: Callable[[Part], Part]) -> None:
    with pytest.raises(InconsistentCutError, match="which its part does not list with a witness"):
        check_part(ID, MEMBER, wrong(part_of(encoded([DELTA]))), "run")


@pytest.mark.parametrize("wrong", [unlisted, short])
def test_an_index_whose_bases_are_not_listed_is_refused(wrong: Callable[[Part], Part]) -> None:
    part = wrong(part_of(encoded([DELTA])))
    made = encode_index(
        Index(run="run", id=ID, parts=(), segments=part.segments, table=part.table), "index/x.parquet"
    )
    side: dict[str, bytes] = {ref.key: data for ref, data in made.side}

    def read(ref: ObjectRef) -> bytes:
        return side[ref.key]

    with pytest.raises(CkptStoreError, match="that no listed segment has"):
        decode_index(made.chunks, "index", read)
