"""Who reads what several ranks want: each chunk once, by one that wants it, about equally much."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.plan.share import Want, deal


@st.composite
def wants(draw: st.DrawFn) -> list[list[Want]]:
    """Up to 40 chunks, each wanted by some of up to 6 ranks, listed in any order."""
    size = draw(st.integers(1, 6))
    ranks: list[list[Want]] = [[] for _ in range(size)]
    for n in range(draw(st.integers(0, 40))):
        want = Want(key=n.to_bytes(16, "big"), nbytes=draw(st.sampled_from([0, 1, 7, 100, 1000])))
        for rank in draw(st.sets(st.integers(0, size - 1), min_size=1)):
            ranks[rank].append(want)
    return [draw(st.permutations(each)) for each in ranks]


@given(wanted=wants(), batch=st.sampled_from([1, 150, 2000]))
def test_each_chunk_that_several_want_is_read_by_one_of_them_and_taken_by_the_others(
    wanted: list[list[Want]], batch: int
) -> None:
    batches = deal(wanted, batch_nbytes=batch)
    who = {want: {r for r, some in enumerate(wanted) if want in some} for some in wanted for want in some}
    found = Counter(want for each in batches for want in each.chunks)
    assert found == Counter(want for want, ranks in who.items() if len(ranks) > 1)
    for each in batches:
        assert all({each.reader, *each.takers} == who[want] for want in each.chunks)
        assert each.reader not in each.takers and each.chunks
        assert each.nbytes <= batch or len(each.chunks) == 1


@given(wanted=wants(), data=st.data())
def test_the_deal_is_the_same_whoever_makes_it(wanted: list[list[Want]], data: st.DataObject) -> None:
    assert deal([data.draw(st.permutations(each)) for each in wanted]) == deal(wanted)


def test_readers_read_about_equally_much_and_take_turns() -> None:
    everyone = [[Want(key=n.to_bytes(16, "big"), nbytes=100) for n in range(40)] for _ in range(4)]
    everyone[0] = [*everyone[0], Want(key=b"alone".ljust(16), nbytes=1000)]
    batches = deal(everyone, batch_nbytes=500)
    read = Counter({rank: 0 for rank in range(4)})
    for each in batches:
        read[each.reader] += each.nbytes
    assert (
        read[0] + 1000 - max(read.values()) <= 100
        and max(read.values()) - min(read[n] for n in (1, 2, 3)) <= 100
    )
    assert [each.reader for each in batches[:4]] == [0, 1, 2, 3]
