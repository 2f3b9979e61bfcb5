"""A crash at every store call of two commits and a publication leaves the old run or the new, never between.

The simulation plays the same history each time, so one play tells what the store holds before and after
each call: a request that is lost leaves the one, a lost reply the other. From each of them the run is
opened, verified, restored and saved to again; real crashes at sampled calls leave exactly those objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import incarnation
from ckptstore.checkpointer import Checkpointer
from ckptstore.errors import AlreadyExistsError, NotFoundError
from ckptstore.held import Frozen, PerRank
from ckptstore.incarnation import begin
from ckptstore.publish import Publisher, Subscriber
from ckptstore.store.memory import MemoryStore
from ckptstore.testing.simulated import mounted
from ckptstore.testing.simulation import Simulation
from tests.protocol.loop import MEMBERS, ROSTER

STEPS = (10, 20)
Objects = dict[str, bytes]


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "probe", lambda store: None)


def state_at(role: str, rank: int, step: int) -> dict[str, Any]:
    """The state of a member at a step; other bits at each step but for what is frozen."""
    if role == "loop":
        return {"seen": np.arange(5) + step, "note": f"step {step}"}
    random = np.random.default_rng(step)
    return {
        "weights": {"a": random.normal(size=(4, 3)), "b": random.integers(0, 9, (7,), np.int8)},
        "moment": random.normal(size=(2, 2)).astype(np.float32),
        "reference": Frozen({"r": np.arange(6.0)}),
        "rng": PerRank(f"{rank} at {step}"),
        "step": step,
    }


def policy_at(step: int) -> dict[str, Any]:
    return {"a": np.full((4, 3), float(step))}


class Recording(Simulation):
    """Notes what the store holds before each call."""

    def __init__(self, *, seed: int, crash_at: int | None = None) -> None:
        super().__init__(seed=seed)
        self.before: list[Objects] = []
        self.crash_at = crash_at

    def step(self) -> bool:
        taking_part = super().step()
        if taking_part:
            self.before.append(self.store.objects)
            if len(self.before) - 1 == self.crash_at:
                for actor in {actor.process for actor in self._actors}:
                    self.kill(actor)
                return super().step()  # dies here, with the request lost
        return taking_part


def two_commits(sim: Simulation) -> None:
    """Two trainers and a loop member save steps 10 and 20; the trainers publish in between."""

    def member(token: str, role: str, rank: int) -> Callable[[], None]:
        def run() -> None:
            ck = Checkpointer(token, role=role, rank=rank, clock=sim.clock, commit_timeout_s=30)
            for step in STEPS:
                handle = ck.save(step, state_at(role, rank, step), policy_version=0)
                sim.wait(handle.done)
                assert handle.result(0).step == step
                if role == "trainer" and step == STEPS[0]:
                    Publisher(token, role=role, rank=rank, clock=sim.clock).publish(0, policy_at(step))

        return run

    def launcher() -> None:
        inc = begin(sim.url, ROSTER, clock=sim.clock)
        inc._stop.set()
        for role, rank in MEMBERS:
            sim.spawn(f"{role}{rank}", member(inc.token, role, rank))

    sim.spawn("launcher", launcher)
    sim.run()


@functools.cache
def states(seed: int) -> tuple[Objects, ...]:
    """What the store holds before each call, and after the last: the number of calls, and one more."""
    sim = Recording(seed=seed)
    two_commits(sim)
    return (*sim.before, sim.store.objects)


def distinct(held: Sequence[Objects]) -> Iterator[tuple[int, Objects]]:
    for number, objects in enumerate(held):
        if number == 0 or objects != held[number - 1]:
            yield number, objects


def reopen(objects: Objects, name: str) -> MemoryStore:
    store = MemoryStore(name=name)
    store._objects.update(objects)
    return store


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Frozen):
        one = one.tree
    if isinstance(one, PerRank):
        one = one.value
    if isinstance(other, Frozen | PerRank):
        return equal(one, other.tree if isinstance(other, Frozen) else other.value)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def steps_of(url: str) -> tuple[int, ...]:
    try:
        run = ckptstore.open(url)
    except NotFoundError:
        return ()
    return tuple(info.step for info in run.checkpoints())


def check_listed(url: str, steps: Sequence[int]) -> None:
    """Whatever is listed verifies, and its tensors come back bit by bit."""
    if not steps:
        return
    run = ckptstore.open(url)
    report = run.verify()
    assert report.ok, report.damage
    for step in steps:
        trainer = run.read(step)
        ranks = trainer.pop("rng")
        wanted = state_at("trainer", 0, step)
        del wanted["rng"]
        assert equal(trainer, {**wanted, "reference": wanted["reference"].tree}), f"{step=}"
        assert list(ranks.value) == [f"{rank} at {step}" for rank in range(2)]
        assert equal(run.read(step, role="loop"), state_at("loop", 0, step))


def go_on(url: str, steps: Sequence[int], *, late: Callable[[], None] = lambda: None) -> None:
    """The next incarnation restores the newest of `steps` on every member, and saves step 30."""
    inc = begin(url, ROSTER, takeover=True)
    try:
        assert inc.step == (steps[-1] if steps else None)
        late()
        handles = []
        for role, rank in MEMBERS:
            ck = Checkpointer(inc.token, role=role, rank=rank, commit_timeout_s=60)
            state = state_at(role, rank, 0)
            assert ck.restore(state) == inc.step
            assert equal(state, state_at(role, rank, inc.step or 0)), f"{role}/{rank}"
            handles.append(ck.save(30, state_at(role, rank, 30)))
        for handle in handles:
            assert handle.result(60).step == 30
    finally:
        inc._stop.set()
    assert steps_of(url) == (*steps, 30)


@pytest.mark.parametrize("seed", [0])
def test_a_crash_at_any_store_call_leaves_old_or_new(seed: int) -> None:
    held = states(seed)
    assert len(held) > 100, "the scenario has become too small to prove anything"
    seen = []
    for number, objects in distinct(held):
        name = f"crash-{seed}-{number}"
        with mounted(reopen(objects, name), name) as url:
            steps = steps_of(url)
            assert steps in ((), (10,), (10, 20)), f"{seed=} {number=}"
            check_listed(url, steps)
            go_on(url, steps)
        seen.append(steps)
    assert seen == sorted(seen, key=len), "a later crash lost what an earlier one had"
    assert set(seen) == {(), (10,), (10, 20)}


@pytest.mark.parametrize("seed", [0])
def test_a_request_that_lands_after_the_next_incarnation_began_changes_nothing(seed: int) -> None:
    held = states(seed)
    late = 0
    for number in range(1, len(held)):
        made = held[number].keys() - held[number - 1].keys() - {"run.json"}
        for key in sorted(key for key in made if not key.startswith("alive/")):
            name = f"late-{seed}-{number}"
            store = reopen(held[number - 1], name)

            def land(store: MemoryStore = store, key: str = key, data: bytes = held[number][key]) -> None:
                try:
                    store.create(key, data)
                except AlreadyExistsError:
                    assert key.startswith("journal/"), f"{key} was made by two lives"

            with mounted(store, name) as url:
                steps = steps_of(url)
                go_on(url, steps, late=land)
                check_listed(url, steps)
            late += 1
    assert late > 20


@pytest.mark.parametrize("seed", [0])
def test_a_real_crash_leaves_exactly_what_the_enumeration_says(seed: int) -> None:
    held = states(seed)
    for number in range(3, len(held) - 1, len(held) // 8):
        sim = Recording(seed=seed, crash_at=number)
        two_commits(sim)
        assert sim.store.objects == held[number], f"{seed=} {number=}"


@pytest.mark.parametrize("seed", [0])
def test_a_publication_is_served_whole_or_not_at_all_after_a_crash_at_any_call(seed: int) -> None:
    served = []
    for number, objects in distinct(states(seed)):
        name = f"publication-{seed}-{number}"
        if "run.json" not in objects:
            continue
        with mounted(reopen(objects, name), name) as url:
            subscriber = Subscriber(url)
            id = subscriber.newest()
            served.append(id is not None)
            if id is not None:
                into = {"a": np.zeros((4, 3))}
                subscriber.load(id, into)
                assert equal(into, policy_at(10))
    assert served == sorted(served) and any(served) and not all(served)
