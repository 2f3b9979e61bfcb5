"""The task, the settings and the objective: pure functions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.demo import grpo, task
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.records import Group, join_digests
from ckptstore.errors import InvalidInputError

PROBLEMS = st.tuples(*[st.integers(0, task.LARGEST)] * 3)


@given(problem=PROBLEMS)
@settings(max_examples=20)
def test_only_the_right_answer_is_rewarded(problem: task.Problem) -> None:
    right = task.answer_tokens([problem])
    every = np.array(list(itertools.product(range(14), repeat=3)), dtype=np.int64)
    paid = task.rewards([problem] * len(every), every) > 0
    counted = np.where(task.answer_mask(every), every, task.PAD)
    assert (paid == (counted == right).all(axis=1)).all()


def test_one_warm_up_answer_in_four_has_the_order_that_is_rewarded() -> None:
    problems = [(7, 7, 3)] * 8
    right = task.answer_tokens(problems)
    shown = task.untidy_answer_tokens(problems)
    assert right[0].tolist() == [1, 7, task.END]
    assert task.rewards(problems, shown).tolist() == [1, 0, 0, 0] * 2
    assert (np.sort(shown, axis=1) == np.sort(right, axis=1)).all()


@given(seed=st.integers(0, 2**40), ordinal=st.integers(0, 2**40))
def test_a_prompt_is_a_function_of_its_ordinal_and_never_held_out(seed: int, ordinal: int) -> None:
    problem = task.problem(seed, ordinal)
    assert problem == task.problem(seed, ordinal) and not task.is_held_out(problem)
    tokens = task.prompt_tokens([problem])
    assert tokens.shape == (1, task.PROMPT_LENGTH) and tokens.max() < task.VOCABULARY


def test_seeds_and_streams_give_different_prompts() -> None:
    def first(seed: int, stream: int) -> list[task.Problem]:
        return [task.problem(seed, ordinal, stream) for ordinal in range(20)]

    assert first(0, task.TRAINING) != first(1, task.TRAINING) != first(1, task.WARM_UP)


def test_the_evaluation_set_is_fixed_distinct_and_held_out() -> None:
    rows = task.held_out(DemoConfig().evaluation_rows)
    assert (
        len(set(rows)) == len(rows) and all(map(task.is_held_out, rows)) and rows == task.held_out(len(rows))
    )
    with pytest.raises(InvalidInputError, match="choose 1 to"):
        task.held_out(10_000)


def test_a_setting_out_of_range_is_refused_by_name() -> None:
    for bad in ({"steps": 0}, {"seed": -1}, {"learning_rate": 0.0}, {"prompts": 30}, {"trainers": 9}):
        with pytest.raises(InvalidInputError):
            DemoConfig(**bad)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidInputError, match="speed"):
        DemoConfig.from_json({"speed": 1})


def test_settings_survive_json() -> None:
    config = DemoConfig(seed=7, steps=9)
    assert DemoConfig.from_json(config.to_json()) == config


def test_advantages_compare_samples_of_one_prompt_only() -> None:
    found = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(found[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-3, rtol=0)
    assert (found[1:] == 0).all()


def _gradient(policy: list[float], advantage: float, reference: list[float] | None = None) -> torch.Tensor:
    log_probs = torch.tensor([policy], requires_grad=True)
    still = torch.tensor([[-1.0] * len(policy)])
    terms = grpo.terms(
        log_probs,
        behaviour=still,
        reference=log_probs.detach() if reference is None else torch.tensor([reference]),
        advantage=torch.tensor([advantage]),
        mask=torch.tensor([[True] * (len(policy) - 1) + [False]]),
        ratio_clip=0.2,
        kl=0.5,
    )
    assert terms.kl >= 0
    terms.loss.backward()  # type: ignore[no-untyped-call]  # torch's backward has no types
    assert log_probs.grad is not None
    return log_probs.grad[0]


def test_the_objective_follows_the_advantage_until_the_ratio_is_clipped() -> None:
    on_policy = _gradient([-1.0, -1.0, -1.0], 2.0)
    torch.testing.assert_close(on_policy, torch.tensor([-2.0, -2.0, 0.0]))  # the last is masked
    beyond = _gradient([-0.5, -1.0, -1.0], 2.0)
    assert beyond[0] == 0 and beyond[1] == -2
    back = _gradient([-0.5, -1.0, -1.0], -2.0)
    assert back[0] > 2  # a bad sample that grew likelier is pushed back in full


def test_the_kl_term_pulls_towards_the_reference() -> None:
    pulled = _gradient([-1.0, -1.0, -1.0], 0.0, reference=[-0.5, -2.0, -9.0])
    assert pulled[0] < 0 < pulled[1] and pulled[2] == 0


def test_digests_join_by_name_whatever_rank_they_come_from() -> None:
    assert join_digests([{"a": "1", "b@0": "2"}, {"a": "1", "b@1": "3"}]) == join_digests(
        [{"b@1": "3", "b@0": "2", "a": "1"}]
    )
    with pytest.raises(InvalidInputError, match="a differs"):
        join_digests([{"a": "1"}, {"a": "2"}])


def test_a_group_of_unequal_shapes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="group 3"):
        Group(
            ordinal=3,
            version=0,
            prompt=np.zeros(6, dtype=np.int64),
            completions=np.zeros((4, 3), dtype=np.int64),
            logprobs=np.zeros((4, 2), dtype=np.float32),
            rewards=np.zeros(4, dtype=np.float32),
        )
