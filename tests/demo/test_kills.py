"""A plan of kills is read, or refused, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.demo.config import DemoConfig
from ckptstore.demo.kills import Kill, is_saved, parse_kills
from ckptstore.errors import InvalidInputError

RUN = DemoConfig(steps=30, every=5, trainers=2, rollouts=2, seed=0)


def test_each_form_is_read_in_order() -> None:
    kills = parse_kills("trainer:1@17,rollout:0@23, coordinator@29,trainer:0@20+save", RUN)
    assert kills == (
        Kill(who="trainer:1", step=17, phase="update"),
        Kill(who="rollout:0", step=23, phase="generate"),
        Kill(who="coordinator", step=29, phase="middle"),
        Kill(who="trainer:0", step=20, phase="save"),
    )
    assert [str(kill) for kill in kills] == [
        "trainer:1@17",
        "rollout:0@23",
        "coordinator@29",
        "trainer:0@20+save",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not understood"),
        ("trainer:1@7,", "not understood"),
        ("trainer@7", "give trainer a rank"),
        ("coordinator:0@7", "give coordinator no rank"),
        ("trainer:x@7", "not understood"),
        ("trainer:1@-7", "not understood"),
        ("trainer:1", "not understood"),
        ("driver@7", "not understood"),
        ("trainer:1@7+load", "not understood"),
        ("trainer:1@31", "steps 1 to 30"),
        ("trainer:1@0", "steps 1 to 30"),
        ("trainer:2@7", "trainer 0 to 1"),
        ("rollout:2@7", "rollout 0 to 1"),
        ("trainer:0@7+save", "step 7 is not saved; choose a multiple of 5"),
        ("rollout:0@5+save", "trainers alone"),
        ("coordinator@5+save", "trainers alone"),
        ("random:0", "choose 1 to 30"),
        ("random:31", "choose 1 to 30"),
        ("random", "not understood"),
    ],
)
def test_what_can_never_fire_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        parse_kills(text, RUN)


def test_the_last_step_and_a_resize_are_saved_too() -> None:
    assert parse_kills("trainer:0@32+save", replace(RUN, steps=32))[0].step == 32
    with pytest.raises(InvalidInputError):
        parse_kills("trainer:0@8+save", RUN)
    assert parse_kills("trainer:0@8+save", RUN, saves=(8,))[0].step == 8
    assert not is_saved(0, RUN)


@given(
    seed=st.integers(0, 99), count=st.integers(1, 30), trainers=st.integers(1, 4), rollouts=st.integers(1, 4)
)
def test_random_kills_are_a_function_of_the_seed_and_would_be_accepted(
    seed: int, count: int, trainers: int, rollouts: int
) -> None:
    run = replace(RUN, seed=seed, trainers=trainers, rollouts=rollouts)
    kills = parse_kills(f"random:{count}", run)
    assert kills == parse_kills(f"random:{count}", run)
    assert len(kills) == len({kill.step for kill in kills}) == count
    assert parse_kills(",".join(map(str, kills)), run) == kills


def test_a_kill_hits_its_own_moment_only() -> None:
    kill = Kill(who="trainer:1", step=17, phase="update")
    assert kill.hits("trainer:1", 17, "update")
    assert not kill.hits("trainer:0", 17, "update")
    assert not kill.hits("trainer:1", 18, "update")
    assert not kill.hits("trainer:1", 17, "save")


def test_an_engine_that_was_away_is_hit_when_it_generates_next() -> None:
    kill = Kill(who="rollout:0", step=17, phase="generate")
    assert not kill.hits("rollout:0", 16, "generate")
    assert kill.hits("rollout:0", 19, "generate")
