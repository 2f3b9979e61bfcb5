"""Replicas are compared by what the parts say of them: which rank is odd, what cannot be compared, what is damaged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.chunktable import make_table
from ckptstore.errors import CorruptError, InconsistentCutError
from ckptstore.manifest import AttemptId, Member, Part
from ckptstore.replicas import check_replicas
from ckptstore.replicaset import (
    HeldBox,
    ReplicaSet,
    pack_digests,
    pack_names,
    ranks_to_runs,
    runs_to_ranks,
)
from ckptstore.tablefile import decode_part, encode_part

ATTEMPT = AttemptId(fence=1, step=5)
EMPTY = make_table(specs=[], boxes=[], segments=[], starts=[], nbytes=[], digests=[])


def part(rank: int, replicas: tuple[ReplicaSet, ...] | None) -> Part:
    return Part(
        run="run",
        write="write",
        id=ATTEMPT,
        member=Member(role="trainer", rank=rank),
        layout="layout",
        policy_version=None,
        planned=0,
        segments=(),
        witnesses={},
        state=None,
        nbytes_written=0,
        nbytes_reused=0,
        refused=None,
        table=EMPTY,
        replicas=replicas,
    )


def held(n: int) -> HeldBox:
    return HeldBox(tensor=f"trainer/w{n:02d}", offset=(n, 0), shape=(1, 4))


def replica_set(rank: int, ranks: Sequence[int], contents: Sequence[int], kinds: str = "x") -> ReplicaSet:
    digests = [xxhash.xxh3_128_digest(str(content).encode()) for content in contents]
    return ReplicaSet(
        ranks=ranks_to_runs(ranks),
        count=len(contents),
        kinds=kinds,
        combined=xxhash.xxh3_128_hexdigest(kinds.encode() + b"\0" + b"".join(digests)),
        digests=pack_digests(digests),
        names=pack_names([held(n) for n in range(len(contents))]) if rank == ranks[0] else None,
    )


@given(ranks=st.sets(st.integers(0, 2000), max_size=40).map(sorted))
def test_runs_give_the_ranks_back_and_equal_sets_have_equal_runs(ranks: list[int]) -> None:
    assert runs_to_ranks(ranks_to_runs(ranks)) == tuple(ranks)
    assert ranks_to_runs(list(ranks)) == ranks_to_runs(tuple(ranks))


def test_regular_sets_are_short() -> None:
    assert ranks_to_runs(range(1024)) == ((0, 1024, 1),)
    assert ranks_to_runs(range(3, 1024, 8)) == ((3, 128, 8),)


@given(data=st.data(), size=st.integers(2, 6), count=st.integers(1, 4))
def test_exactly_the_boxes_and_ranks_that_differ_are_named(
    data: st.DataObject, size: int, count: int
) -> None:
    """Two sets, the second of all ranks but the first; each content is 0, or at times another number."""
    content = st.sampled_from((0, 0, 0, 1, 2))
    sets = [tuple(range(size)), tuple(range(1, size))]
    contents = {
        (s, rank): data.draw(st.lists(content, min_size=count, max_size=count))
        for s, ranks in enumerate(sets)
        for rank in ranks
    }
    parts = []
    for rank in range(size):
        own = [s for s, ranks in enumerate(sets) if rank in ranks and len(ranks) > 1]
        parts.append(part(rank, tuple(replica_set(rank, sets[s], contents[s, rank]) for s in own)))
    parts = [decode_part(encode_part(each), "part") for each in data.draw(st.permutations(parts))]
    tensors, odd = [], set()
    for s, ranks in enumerate(sets):
        for n in range(count):
            values = [contents[s, rank][n] for rank in ranks]
            if len(set(values)) > 1:
                tensors.append(held(n).tensor)
                most = max(values, key=values.count)
                majority = values.count(most) * 2 > len(ranks)
                odd |= {r for r, value in zip(ranks, values, strict=True) if not majority or value != most}
    if not tensors:
        check_replicas(ATTEMPT, "trainer", parts)
        return
    with pytest.raises(InconsistentCutError) as caught:
        check_replicas(ATTEMPT, "trainer", parts)
    assert list(caught.value.tensors) == sorted(tensors)
    assert caught.value.ranks == tuple(sorted(odd))
    assert len(caught.value.problems) == len(tensors)


def test_the_minority_is_named_against_the_majority_and_of_two_both() -> None:
    three = [part(r, (replica_set(r, (0, 1, 2), [0, int(r == 1)]),)) for r in range(3)]
    with pytest.raises(
        InconsistentCutError, match=r"w01 at offset \(1, 0\), shape \(1, 4\): rank 1 against ranks 0, 2;"
    ):
        check_replicas(ATTEMPT, "trainer", three)
    two = [part(r, (replica_set(r, (0, 1), [r]),)) for r in range(2)]
    with pytest.raises(InconsistentCutError, match="rank 0 against rank 1;") as caught:
        check_replicas(ATTEMPT, "trainer", two)
    assert caught.value.ranks == (0, 1)


def test_digests_that_only_some_took_are_refused_and_none_at_all_are_not() -> None:
    taken = replica_set(0, (0, 1), [0])
    with pytest.raises(InconsistentCutError, match=r"trainer/1 .*without digests.*trainer/0.*check_replicas"):
        check_replicas(ATTEMPT, "trainer", [part(0, (taken,)), part(1, None)])
    check_replicas(ATTEMPT, "trainer", [part(0, None), part(1, None)])


def test_digests_of_two_kinds_are_refused_with_the_way_out() -> None:
    parts = [part(r, (replica_set(r, (0, 1), [0, 0], ("x", "xr")[r]),)) for r in range(2)]
    with pytest.raises(
        InconsistentCutError,
        match=r"w01 .*on the host on rank 0 and on an accelerator on rank 1.*one kind of",
    ) as caught:
        check_replicas(ATTEMPT, "trainer", parts)
    assert len(caught.value.problems) == 1 and "check_replicas=False" in str(caught.value)


def test_a_member_without_its_set_or_with_other_boxes_is_named() -> None:
    whole = [part(r, (replica_set(r, (0, 1, 2), [0, 0]),)) for r in range(3)]
    with pytest.raises(InconsistentCutError, match="ranks 0, 1, 2 hold together came from ranks 0, 2"):
        check_replicas(ATTEMPT, "trainer", [whole[0], part(1, ()), whole[2]])
    with pytest.raises(InconsistentCutError, match="ranks 0, 2 and rank 1 have digests of other numbers"):
        check_replicas(ATTEMPT, "trainer", [whole[0], part(1, (replica_set(1, (0, 1, 2), [0]),)), whole[2]])


@pytest.mark.parametrize("field", ["digests", "names"])
@pytest.mark.parametrize("text", ["?", "AAAA"])
def test_damaged_details_are_corrupt_and_not_opened_without_need(field: str, text: str) -> None:
    good = [replica_set(r, (0, 1), [r, 0]) for r in range(2)]
    bad = dataclasses.replace(good[0], **{field: text})
    with pytest.raises(CorruptError):
        check_replicas(ATTEMPT, "trainer", [part(0, (bad,)), part(1, (good[1],))])
    equal = dataclasses.replace(replica_set(0, (0, 1), [0]), **{field: text})
    check_replicas(ATTEMPT, "trainer", [part(0, (equal,)), part(1, (replica_set(1, (0, 1), [0]),))])


def test_a_part_without_the_field_is_one_without_digests() -> None:
    value = replica_set(0, (0, 1), [0]).to_json()
    assert ReplicaSet.from_json(json.loads(json.dumps(value))).boxes() == (held(0),)
    assert decode_part(encode_part(part(0, None)), "part").replicas is None
