"""The dead are named, not the survivors that failed because of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import FencedError, StoreUnavailableError
from ckptstore.manifest import Member
from ckptstore.recovery.detector import (
    Answered,
    Died,
    Failed,
    Outcome,
    Silent,
    is_death,
    is_peer_failure,
    judge,
    peers_blamed,
)
from ckptstore.recovery.launcher import MemberDiedError, PeerLostError

RANKS = [Member(role="trainer", rank=rank) for rank in range(4)]
LOST = Failed(error=PeerLostError("a peer"))
DEAD = Died(why="ActorDiedError")
OUTCOMES = st.sampled_from(
    [
        Answered(value=1),
        DEAD,
        LOST,
        Silent(alive=True),
        Silent(alive=False),
        Failed(error=FencedError("older", held=1, current=2)),
        Failed(error=ValueError("a mistake")),
    ]
)


def test_all_answers_are_given_by_member() -> None:
    assert judge({rank: Answered(value=rank.rank) for rank in RANKS}) == {rank: rank.rank for rank in RANKS}


def test_a_survivor_that_failed_first_is_not_blamed() -> None:
    with pytest.raises(MemberDiedError) as caught:
        judge({RANKS[0]: LOST, RANKS[1]: DEAD, RANKS[2]: Silent(alive=True)})
    assert caught.value.members == (RANKS[1],)


def test_a_lost_connection_without_a_death_asks_for_a_new_fence_only() -> None:
    with pytest.raises(MemberDiedError) as caught:
        judge({RANKS[0]: LOST, RANKS[1]: Answered(value=1)})
    assert caught.value.members == ()


def test_a_mistake_of_one_rank_is_not_hidden_by_the_effect_on_its_peers() -> None:
    with pytest.raises(ValueError, match="a mistake"):
        judge({RANKS[0]: LOST, RANKS[1]: Failed(error=ValueError("a mistake"))})


@given(found=st.lists(OUTCOMES, min_size=1, max_size=4))
def test_exactly_the_dead_and_the_mute_are_named(found: list[Outcome]) -> None:
    outcomes = dict(zip(RANKS, found, strict=False))
    gone = tuple(m for m, o in outcomes.items() if isinstance(o, Died) or o == Silent(alive=False))
    try:
        judge(outcomes)
    except MemberDiedError as error:
        assert error.members == gone
    except (FencedError, ValueError):
        assert not gone
    else:
        assert all(isinstance(outcome, Answered) for outcome in found)


class DistBackendError(RuntimeError):
    pass


class ActorDiedError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
        ),
        RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"),
        RuntimeError("Timed out waiting 30000ms for recv operation to complete"),
        ConnectionRefusedError("Connection refused"),
        DistBackendError("anything"),
    ],
)
def test_failures_of_collectives_are_recognised(error: Exception) -> None:
    assert is_peer_failure(error)
    with (
        pytest.raises(PeerLostError, match="update 3 failed because a peer was lost"),
        peers_blamed("update 3"),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("broken pipe"),
        StoreUnavailableError("disk"),
    ],
)
def test_other_failures_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peers_blamed("update 3"):
        raise error
    assert caught.value is error


def test_deaths_are_recognised_by_class() -> None:
    assert is_death(ActorDiedError())
    assert not is_death(RuntimeError("ActorDiedError"))
