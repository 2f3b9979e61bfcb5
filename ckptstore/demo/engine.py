"""A rollout engine: an FP8 copy of the policy that generates leases.

It does no I/O: the orchestration loads a publication into `target()` and calls `install`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ckptstore.demo import model as policy
from ckptstore.demo import sampling, task
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.experts import ExpertRanks
from ckptstore.demo.records import Group
from ckptstore.errors import InvalidInputError


class Engine:
    """Generates groups with the weights of one publication; holds all experts, alone."""

    def __init__(self, config: DemoConfig) -> None:
        self.reset(config)

    def reset(self, config: DemoConfig) -> None:
        """Put the engine in the state of a new one, for another run in the same process."""
        self.config = config
        self.version: int | None = None
        self.model = policy.build_model(config, ExpertRanks(rank=0, size=1, experts=config.experts))
        self.model.requires_grad_(False)
        parts = policy.publication(self.model)
        parts["rest"] = {name: tensor.clone() for name, tensor in parts["rest"].items()}
        self._target = parts

    def target(self) -> dict[str, dict[str, Tensor]]:
        """Give the tensors to load a publication into, in place: the same ones at every call.

        `{"quantised": {name: float8_e4m3fn}, "scales": {name: float32}, "rest": {name: any}}`, each
        of the full global shape.
        """
        return self._target

    def install(self, *, version: int) -> None:
        """Serve what was loaded into `target()` from now on, as publication number `version`."""
        policy.install(self.model, self._target)
        self.version = version

    def generate(self, ordinals: Sequence[int]) -> list[Group]:
        """Generate the groups of one lease: `lease_prompts` consecutive ordinals, in one batch.

        The groups are bitwise the same on every engine that serves the same weights.
        """
        lease, samples = self.config.lease_prompts, self.config.samples
        if (
            not ordinals
            or list(ordinals) != list(range(ordinals[0], ordinals[0] + lease))
            or ordinals[0] % lease
        ):
            raise InvalidInputError(
                f"ordinals {list(ordinals)} are no lease; pass {lease} consecutive ones, "
                f"the first a multiple of {lease}",
                ordinals=list(ordinals),
            )
        if self.version is None:
            raise InvalidInputError(
                "this engine serves no publication; load one into target() and call install()"
            )
        problems = [task.problem(self.config.seed, ordinal) for ordinal in ordinals]
        prompts = task.prompt_tokens(problems)
        draws = torch.from_numpy(sampling.uniforms(self.config.seed, ordinals, samples))
        rows = torch.from_numpy(prompts).repeat_interleave(samples, 0)
        tokens, log_probs = sampling.sample(self.model, rows, draws)
        groups = []
        for index, (ordinal, problem) in enumerate(zip(ordinals, problems, strict=True)):
            part = slice(index * samples, (index + 1) * samples)
            completions = tokens[part].numpy().copy()
            groups.append(
                Group(
                    ordinal=ordinal,
                    version=self.version,
                    prompt=prompts[index],
                    completions=completions,
                    logprobs=log_probs[part].numpy().copy(),
                    rewards=task.rewards([problem] * samples, completions),
                )
            )
        return groups
