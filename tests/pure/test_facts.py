"""What a commit takes out of a state in one walk is what the functions say that define it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import InconsistentCutError
from ckptstore.experts import check_experts, declared, is_number
from ckptstore.facts import facts_of
from ckptstore.ledger import Ledger
from ckptstore.manifest import AttemptId, Member
from ckptstore.skeleton import common_values, find_ledger, tensor_names

NAMES = st.text("aw.3@#", max_size=5)
FAMILIES = st.lists(
    st.tuples(st.sampled_from(["a.{expert}", "*.w.{expert}", "w"]), st.integers(0, 4)).map(list), max_size=2
)
LEAVES = st.one_of(
    st.sampled_from([None, True, 1, 1.0, 0.25, "", '{"T":"a"}', "ä"]),
    st.builds(lambda tag, name: {tag: name}, st.sampled_from("TTTN"), NAMES),
    st.integers(0, 2).map(lambda seed: {"ledger": Ledger(seed).to_json()}),
)
KEYS = st.sampled_from(["a", "b", "T", "d", 'quo"te', 3])


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(st.tuples(KEYS, children).map(list), max_size=4).map(lambda items: {"d": items}),
        st.builds(lambda tag, items: {tag: items}, st.sampled_from("lt"), st.lists(children, max_size=3)),
        st.builds(lambda tag, node: {tag: node}, st.sampled_from("zop"), children),
        st.builds(lambda families, node: {"x": [families, node]}, FAMILIES, children),
    )


@given(st.recursive(LEAVES, _containers, max_leaves=20))
def test_one_walk_finds_what_the_defining_functions_find(state: Any) -> None:
    facts = facts_of(state, {})
    assert sorted(facts.names) == sorted(tensor_names(state))
    assert facts.common == json.dumps(common_values(state), sort_keys=True)
    assert [(family, sorted(names)) for family, names in facts.families] == [
        (family, sorted(names)) for family, names in declared(state)
    ]
    ledger = find_ledger(state)
    assert (facts.ledger is None) == (ledger is None)
    if ledger is not None and facts.ledger is not None:
        assert facts.ledger.to_json() == ledger.to_json()


def test_equal_texts_of_many_states_are_one_object() -> None:
    pool: dict[str, str] = {}
    one, other = (facts_of(json.loads('{"d":[["w",{"T":"layers.w"}],["lr",0.5]]}'), pool) for _ in range(2))
    assert one.names[0] is other.names[0]
    assert one.common is other.common


def _place_of(pattern: str, name: str) -> tuple[str, int, str] | None:
    """(family, number, what follows), by looking at one part of the name after the other."""
    wanted, parts = pattern.split(".")[:-1], name.partition("#")[0].split(".")
    for at in range(len(wanted), len(parts)):
        window = parts[at - len(wanted) : at]
        if all(want in ("*", part) for want, part in zip(wanted, window, strict=True)) and is_number(
            parts[at]
        ):
            return ".".join(parts[:at]), int(parts[at]), "".join(f".{part}" for part in parts[at + 1 :])
    return None


@given(
    pattern=st.sampled_from(["a.{expert}", "*.a.{expert}", "a.*.{expert}", "a+.{expert}"]),
    names=st.lists(
        st.lists(
            st.sampled_from(["a", "a+", "aa", "b", "0", "1", "2", "02", "٣", "\n", "", "1#2"]), max_size=5
        )
    ),
)
def test_an_expert_is_missing_exactly_where_a_place_has_others(pattern: str, names: list[list[str]]) -> None:
    texts = [".".join(parts) for parts in names]
    found = [place for text in texts if (place := _place_of(pattern, text)) is not None]
    whole = bool(found) and all(
        (site, number, rest) in found for site, _, rest in found for number in range(3)
    )
    states = [(Member(role="r", rank=rank), (((pattern, 3), tuple(texts[rank::2])),)) for rank in range(2)]
    attempt = AttemptId(fence=1, step=1)
    if whole:
        check_experts(attempt, "r", states)
    else:
        with pytest.raises(InconsistentCutError, match="lacks experts"):
            check_experts(attempt, "r", states)


def test_the_first_rank_that_has_an_expert_is_named_for_it() -> None:
    names = [("a.0.w", "a.1.w"), ("a.1.w", "b"), ("a.3.w", "a.7.b.w")]
    states = [(Member(role="r", rank=rank), ((("a.{expert}", 4), held),)) for rank, held in enumerate(names)]
    with pytest.raises(InconsistentCutError) as error:
        check_experts(AttemptId(fence=1, step=1), "r", states)
    assert error.value.values["problems"] == (
        "experts 0 to 3 of a.{expert}.b.w are in no rank's state (r/2 has 7)",
    )
