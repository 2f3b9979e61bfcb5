"""The trainer: bitwise repeatable, resumable at any step, equal for any number of ranks up to rounding."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.demo import task
from ckptstore.demo.model import is_sharded
from ckptstore.demo.records import StepReport, join_digests
from ckptstore.demo.trainer import Trainer
from ckptstore.errors import InvalidInputError
from tests.demo.ranks import Ranks
from tests.demo.small import SMALL, bare, generated, write_in_place

Outcome = tuple[dict[str, str], list[StepReport], list[float]]


def train(rank: int, size: int, *, steps: int = 3, backwards: bool = False, seed: int = 0) -> Outcome:
    """Warm up and take some steps; `seed` is of this process's own random state, which must not matter."""
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    trainer = Trainer(SMALL, rank, size)
    trainer.warm_up()
    reports, accuracies = [], []
    for step in range(steps):
        groups = generated(SMALL, step)
        reports.append(trainer.step(groups[::-1] if backwards else groups))
        accuracies.append(trainer.evaluate())
    return trainer.digest_state(), reports, accuracies


def train_backwards(rank: int, size: int) -> Outcome:
    return train(rank, size, backwards=True, seed=9)


def train_with_interruption(rank: int, size: int) -> Outcome:
    """Like `train`, but with a copy of the state restored into a reset trainer after the first step."""
    trainer = Trainer(SMALL, rank, size)
    trainer.warm_up()
    reports, accuracies = [trainer.step(generated(SMALL, 0))], [trainer.evaluate()]
    saved = copy.deepcopy(trainer.state())
    trainer.step(generated(SMALL, 1))  # lost work, of a life that ends here
    trainer.reset(SMALL, rank, size)
    state = trainer.state()
    write_in_place(state, saved)
    trainer.adopt(state)
    assert [record.step for record in trainer.evaluations] == [1]
    for step in (1, 2):
        reports.append(trainer.step(generated(SMALL, step)))
        accuracies.append(trainer.evaluate())
    return trainer.digest_state(), reports, accuracies


def initial(rank: int, size: int) -> dict[str, str]:
    return Trainer(SMALL, rank, size).digest_state()


def gradients(rank: int, size: int) -> dict[str, Any]:
    """Reduce the gradients of one step of the model in FP32: what this rank holds of them, as numpy."""
    trainer = Trainer(SMALL, rank, size)
    trainer.model.float()
    trainer.reference.float()
    seen: dict[str, Any] = {}

    def look(**_: float) -> float:
        for name, gradient in zip(trainer.optimizer.parameters, trainer.optimizer._gradients, strict=True):
            seen[name] = gradient.numpy()
        seen["norm"] = np.array([trainer.optimizer._norm])
        return 0.0

    trainer.optimizer.apply = look  # type: ignore[method-assign]  # the fake of this test
    trainer.step(generated(SMALL, 0))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_the_whole_model_do_not_depend_on_the_ranks(ranks: Ranks, size: int) -> None:
    (alone,) = [gradients(0, 1)]
    several = ranks.run(size, gradients)
    for name, expected in alone.items():
        pieces = [rank[name] for rank in several]
        ours = np.concatenate(pieces) if is_sharded(name) else pieces[0]
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=2e-5, err_msg=name)
        assert is_sharded(name) or all(np.array_equal(piece, pieces[0]) for piece in pieces), name
    moved = [name for name in alone if np.any(alone[name])]
    assert len(moved) >= len(alone) - 6, "all but the six of the indexer get a gradient"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_initial_weights_are_equal_for_any_number_of_ranks(ranks: Ranks, size: int) -> None:
    assert join_digests(ranks.run(size, initial)) == join_digests(ranks.run(2, initial))


@pytest.fixture(scope="module")
def straight(ranks: Ranks) -> list[Outcome]:
    """An undisturbed run of two ranks."""
    outcomes: list[Outcome] = ranks.run(2, train)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("work", [train, train_backwards, train_with_interruption])
def test_runs_of_one_layout_are_bitwise_equal(ranks: Ranks, straight: list[Outcome], work: Any) -> None:
    """Fresh again; with groups handed over in another order; resumed from a copy of its state."""
    again = ranks.run(2, work)
    assert join_digests(digests for digests, _, _ in again) == join_digests(
        digests for digests, _, _ in straight
    )
    assert [outcome[1:] for outcome in again] == [outcome[1:] for outcome in straight]
    assert again[0][1:] == again[1][1:], "reports are equal on all ranks"


def test_the_digest_sees_one_bit() -> None:
    trainer = Trainer(SMALL, 0, 1)
    before = trainer.digest_state()
    bits = trainer.optimizer.exp_avg["lm_head.weight"].view(torch.int32)
    bits[0, 0] ^= 1
    after = trainer.digest_state()
    assert [name for name in before if before[name] != after[name]] == ["exp_avg/lm_head.weight"]


def test_a_consumed_group_is_refused_and_nothing_changes() -> None:
    trainer = Trainer(SMALL, 0, 1)
    groups = generated(SMALL, 0)
    trainer.step(groups)
    before = trainer.digest_state()
    with pytest.raises(InvalidInputError) as refused:
        trainer.step([*generated(SMALL, 1), groups[4]])
    assert refused.value.ordinals == [4]
    with pytest.raises(InvalidInputError):
        trainer.step([*generated(SMALL, 1), generated(SMALL, 1)[0]])
    assert trainer.digest_state() == before and trainer.updates == 1
    assert trainer.step(generated(SMALL, 1)).step == 2
    assert [trainer.ledger.consumed_at(ordinal) for ordinal in (0, 6, 12)] == [1, 2, None]


def test_the_marked_point_lies_before_anything_changes() -> None:
    trainer = Trainer(SMALL, 0, 1)
    before = trainer.digest_state()
    at_the_point = []
    trainer.step(generated(SMALL, 0), on_computing=lambda: at_the_point.append(trainer.digest_state()))
    assert at_the_point == [before]
    assert trainer.digest_state() != before


def test_the_state_holds_every_kind_of_tensor_and_nothing_that_is_computed_again() -> None:
    trainer = Trainer(SMALL, 1, 3)
    state = trainer.state()
    model = {name: bare(leaf) for name, leaf in state["model"].items()}
    assert not [name for name in model if "inv_freq" in name]
    assert any("inv_freq" in name for name, _ in trainer.model.named_buffers())
    kept = [name for name, tensor in model.items() if tensor.dtype == torch.float32]
    assert len(kept) == 43 + 2  # the parameters that stay FP32, and two routers' biases
    assert model["model.layers.0.mlp.gate.tid2eid"].dtype == torch.int64
    assert len(state["master"]) == len(state["exp_avg"]) == len(state["exp_avg_sq"]) == 86
    assert all(bare(leaf).dtype == torch.float32 for leaf in state["master"].values())
    assert state["reference"].tree.keys() == model.keys()
    sharded = {name for name, leaf in state["model"].items() if isinstance(leaf, ckptstore.Sharded)}
    assert len(sharded) == 6
    assert {state["model"][name].offset[0] for name in sharded} == {3}
    assert {state["model"][name].global_shape[0] for name in sharded} == {8}
    assert trainer.state() is state


def test_the_routing_table_sends_a_token_to_different_experts() -> None:
    """It is all zeros after construction: every token to expert 0, twice."""
    table = Trainer(SMALL, 0, 1).state()["model"]["model.layers.0.mlp.gate.tid2eid"]
    assert (table[:, 0] != table[:, 1]).all() and len(table.unique()) == SMALL.experts


def test_weights_are_the_rounded_masters_after_a_step() -> None:
    trainer = Trainer(SMALL, 0, 1)
    trainer.step(generated(SMALL, 0))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, trainer.optimizer.master[name].to(parameter.dtype)), name


def test_the_reference_stays_what_the_warm_up_made() -> None:
    trainer = Trainer(SMALL, 0, 1)
    trainer.warm_up()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first = trainer.step(generated(SMALL, 0))
    assert first.kl == 0.0, "the policy is the reference until the first update"
    trainer.step(generated(SMALL, 1))
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.reference.state_dict().items())


def test_the_warm_up_teaches() -> None:
    """Most answers start with a digit that has been seen, instead of any of 16 tokens."""
    trainer = Trainer(SMALL, 0, 1)
    problems = task.held_out(SMALL.evaluation_rows)
    from ckptstore.demo.model import answer_log_probs

    prompts, answers = task.prompt_tokens(problems), task.untidy_answer_tokens(problems)
    likelihoods = []
    for _ in range(2):
        with torch.no_grad():
            found = answer_log_probs(trainer.model, torch.from_numpy(prompts), torch.from_numpy(answers))
        likelihoods.append(float(found[torch.from_numpy(task.answer_mask(answers))].mean()))
        trainer.warm_up()
    assert likelihoods[1] > likelihoods[0]


def test_a_state_of_another_seed_is_refused() -> None:
    trainer = Trainer(SMALL, 0, 1)
    state = dict(trainer.state(), seed=4)
    with pytest.raises(InvalidInputError, match="seed 4"):
        trainer.adopt(state)
