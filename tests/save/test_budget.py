"""A budget is never exceeded, nobody is passed over, and nothing that was leased is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.budget import ByteBudget, Lease
from ckptstore.errors import BudgetExceededError, InvalidInputError


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_what_is_free_is_leased_and_nothing_else(steps: list[tuple[int, bool]]) -> None:
    budget, held, most = ByteBudget(10), list[Lease](), 0
    for nbytes, give_back in steps:
        if give_back and held:
            one = held.pop(nbytes % len(held))
            one.release()
            one.release()
        else:
            got = budget.try_lease(nbytes)
            assert (got is not None) == (sum(each.nbytes for each in held) + nbytes <= 10)
            held += [got] if got is not None else []
        most = max(most, sum(each.nbytes for each in held))
        assert budget.leased == sum(each.nbytes for each in held) <= 10
        assert budget.high_water == most


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(0, 10), max_size=30), min_size=2, max_size=4))
def test_many_threads_never_exceed_it(wants: list[list[int]]) -> None:
    budget, lock = ByteBudget(10), threading.Lock()
    held, most = 0, 0

    def work(sizes: list[int]) -> None:
        nonlocal held, most
        for nbytes in sizes:
            with budget.lease(nbytes, timeout_s=60):
                with lock:
                    held += nbytes
                    most = max(most, held)
                with lock:
                    held -= nbytes

    with ThreadPoolExecutor(len(wants)) as pool:
        list(pool.map(work, wants))
    assert most <= 10 and budget.high_water <= 10 and budget.leased == 0


def test_leases_are_granted_in_the_order_of_asking() -> None:
    budget, order = ByteBudget(10), list[int]()
    first = budget.lease(10)

    def ask(nbytes: int) -> None:
        lease = budget.lease(nbytes, timeout_s=60)
        order.append(nbytes)
        lease.release()

    threads = []
    for n, nbytes in enumerate((9, 2, 3)):
        threads.append(threading.Thread(target=ask, args=(nbytes,)))
        threads[-1].start()
        while len(budget._waiting) <= n:
            threads[-1].join(0.001)
    assert budget.try_lease(0) is None, "nobody passes those who wait"
    first.release()
    for thread in threads:
        thread.join(60)
    assert order[0] == 9 and sorted(order) == [2, 3, 9] and budget.high_water == 10


def test_more_than_the_whole_budget_is_refused_at_once() -> None:
    budget = ByteBudget(10)
    with pytest.raises(BudgetExceededError) as caught:
        budget.lease(11)
    assert (caught.value.wanted_nbytes, caught.value.budget_nbytes) == (11, 10)
    assert budget.try_lease(11) is None
    assert budget.leased == 0


def test_a_wait_ends_and_lets_those_behind_go_on() -> None:
    budget = ByteBudget(10)
    held = budget.lease(5)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(budget.lease, 6, timeout_s=0.2)
        while not budget._waiting:
            threading.Event().wait(0.001)
        small = budget.lease(5, timeout_s=60)  # waits behind the large one until that gives up
        with pytest.raises(BudgetExceededError, match="were not free"):
            large.result(60)
    assert budget.leased == 10
    held.release()
    small.release()
    assert budget.leased == 0


@pytest.mark.parametrize("granted", [True, False])
def test_an_interrupted_wait_leaks_nothing(monkeypatch: pytest.MonkeyPatch, granted: bool) -> None:
    budget = ByteBudget(10)
    held = budget.lease(1 if granted else 10)

    def interrupted(self: Any, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        budget.lease(5)
    assert not budget._waiting
    held.release()
    assert budget.leased == 0


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        ByteBudget(0)
    with pytest.raises(InvalidInputError):
        ByteBudget(5).lease(-1)
