"""Engines: every bit of a lease is a function of weights, seed and ordinals."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from ckptstore.demo import sampling, task
from ckptstore.demo.engine import Engine
from ckptstore.demo.model import answer_log_probs
from ckptstore.demo.trainer import Trainer
from ckptstore.errors import InvalidInputError
from tests.demo.small import SMALL, bare


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    trained = Trainer(SMALL, 0, 1)
    trained.warm_up()
    return trained


def _serving(trainer: Trainer, version: int = 0) -> Engine:
    engine = Engine(SMALL)
    for part, tensors in trainer.publication().items():
        assert tensors.keys() == engine.target()[part].keys()
        for name, leaf in tensors.items():
            engine.target()[part][name].copy_(bare(leaf))
    engine.install(version=version)
    return engine


def test_engines_generate_a_lease_alike_whatever_they_did_before(trainer: Trainer) -> None:
    one, other = _serving(trainer), _serving(trainer, version=7)
    first = [*one.generate([0, 1]), *one.generate([2, 3])]
    torch.manual_seed(77)  # of the process: must not matter
    second = [*other.generate([2, 3]), *other.generate([0, 1])]
    second.sort(key=lambda group: group.ordinal)
    assert [group.ordinal for group in first] == [0, 1, 2, 3]
    assert all(a.same_samples(b) for a, b in zip(first, second, strict=True))
    assert {group.version for group in second} == {7}


def test_weights_matter(trainer: Trainer) -> None:
    """Else all engines would agree for a bad reason."""
    engine = Engine(SMALL)
    engine.install(version=0)
    assert not any(
        a.same_samples(b)
        for a, b in zip(engine.generate([0, 1]), _serving(trainer).generate([0, 1]), strict=True)
    )


def test_an_installed_engine_has_the_trainers_weights_but_for_fp8(trainer: Trainer) -> None:
    engine = _serving(trainer)
    exact = trainer.publication()["rest"]
    for name, tensor in engine.model.state_dict().items():
        ours = trainer.model.state_dict()[name]
        assert tensor.dtype == ours.dtype
        if name in exact:
            assert torch.equal(tensor, ours), name
        else:
            assert not torch.equal(tensor, ours) and torch.allclose(tensor, ours, rtol=0.07, atol=1e-3), name


def test_log_probs_are_those_of_the_policy_that_sampled(trainer: Trainer) -> None:
    engine = _serving(trainer)
    for group in engine.generate([4, 5]):
        rows = torch.from_numpy(group.prompt).expand(SMALL.samples, -1)
        with torch.no_grad():
            expected = answer_log_probs(engine.model, rows, torch.from_numpy(group.completions)).numpy()
        counted = task.answer_mask(group.completions)
        np.testing.assert_allclose(group.logprobs[counted], expected[counted], atol=0.05)
        assert (group.logprobs[~counted] == 0).all() and (group.completions[~counted] == task.PAD).all()
        problem = task.problem(SMALL.seed, group.ordinal)
        assert (group.rewards == task.rewards([problem] * SMALL.samples, group.completions)).all()


def test_tokens_are_drawn_in_proportion(trainer: Trainer) -> None:
    prompts = torch.from_numpy(task.prompt_tokens([(1, 2, 3)])).expand(2000, -1)
    draws = torch.from_numpy(np.random.default_rng(0).random((2000, 1)))
    tokens, log_probs = sampling.sample(trainer.model, prompts, draws)
    counted = torch.bincount(tokens[:, 0], minlength=task.VOCABULARY) / 2000
    likelihood = torch.zeros(task.VOCABULARY)
    likelihood[tokens[:, 0]] = log_probs[:, 0].exp()
    assert (counted - likelihood).abs().max() < 0.05


def test_a_lease_is_whole_and_aligned(trainer: Trainer) -> None:
    engine = _serving(trainer)
    for ordinals in ([], [0], [1, 2], [0, 2], [0, 1, 2, 3]):
        with pytest.raises(InvalidInputError, match="lease"):
            engine.generate(ordinals)
    with pytest.raises(InvalidInputError, match="publication"):
        Engine(SMALL).generate([0, 1])


def test_a_reset_engine_is_a_new_one(trainer: Trainer) -> None:
    engine = _serving(trainer)
    engine.reset(SMALL)
    engine.install(version=0)
    fresh = Engine(SMALL)
    fresh.install(version=0)
    assert all(
        a.same_samples(b) for a, b in zip(engine.generate([0, 1]), fresh.generate([0, 1]), strict=True)
    )


def test_groups_cross_to_a_process_without_torch(trainer: Trainer) -> None:
    groups = _serving(trainer).generate([0, 1])
    code = (
        "import pickle, sys; groups = pickle.load(sys.stdin.buffer); "
        "import ckptstore.demo.config, ckptstore.demo.task; "
        "assert not {'torch', 'transformers'} & set(sys.modules); print([g.ordinal for g in groups])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(groups), capture_output=True, check=False, timeout=60
    )
    assert done.stdout.strip() == b"[0, 1]", done.stderr.decode()
