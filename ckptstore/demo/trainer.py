"""One rank of the trainer: GRPO on the policy, and the state that a checkpoint of it holds.

It talks to its peers through torch.distributed and to nothing else: no store, no Ray. Equal seeds
and an equal number of ranks give bitwise equal states, because groups are sorted and split in one
fixed way and no global random source is used; across numbers of ranks only rounding differs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ckptstore.demo import grpo, sampling, task
from ckptstore.demo import model as policy
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.experts import ExpertRanks, share
from ckptstore.demo.optimizer import AdamW
from ckptstore.demo.records import Evaluation, Group, StepReport
from ckptstore.errors import InvalidInputError

RAMP_STEPS, DECLINE = 5, 0.9  # of the warm-up: its learning rate rises at first, then falls by this part


class Trainer:
    """The policy, its optimizer, its reference and its counters, of one rank.

    `step`, `evaluate` and `warm_up` are collectives: every rank must call them with equal arguments.
    When one of them raises, the state is spoiled: `reset` and restore, or throw the trainer away.
    """

    def __init__(
        self, config: DemoConfig, rank: int, size: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.reset(config, rank, size, group)

    def reset(self, config: DemoConfig, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        """Put the trainer in the state of a new one: initial weights, zero moments, nothing consumed.

        `group` None means the default process group, or none at all when `size` is 1. Global weights
        are equal for every `size`.
        """
        import ckptstore

        self.config = config
        self.ranks = ExpertRanks(rank=rank, size=size, experts=config.experts, group=group)
        self.model = policy.build_model(config, self.ranks)
        self.reference = policy.build_model(config, self.ranks).requires_grad_(False)
        self.optimizer = AdamW(dict(self.model.named_parameters()), ranks=self.ranks)
        self.updates = 0
        self.ledger: Any = ckptstore.Ledger(seed=config.seed)
        self.evaluations: list[Evaluation] = []
        self._state = self._tensors()

    def warm_up(self) -> None:
        """Teach the policy sums, their digits in either order; then make it the reference. Collective.

        The moments go on from here: with zero ones, the first updates of the loop, whose gradients are
        mostly noise, would move every weight by the full learning rate and undo what was learnt.
        """
        config = self.config
        for index in range(config.warm_up_steps):
            first = index * config.warm_up_rows
            rows = [
                task.problem(config.seed, first + row, task.WARM_UP) for row in range(config.warm_up_rows)
            ]
            answers = task.untidy_answer_tokens(rows)
            count = float(task.answer_mask(answers).sum())
            own = share(self.ranks.rank, self.ranks.size, len(rows))
            part = slice(own.start, own.stop)
            prompts, right = (torch.from_numpy(array[part]) for array in (task.prompt_tokens(rows), answers))
            mask = torch.from_numpy(task.answer_mask(answers)[part])
            chosen = policy.answer_log_probs(self.model, prompts, right)
            (-(chosen * mask).sum() / count).backward()  # type: ignore[no-untyped-call]  # torch's backward has no types
            self.optimizer.reduce(torch.zeros(0))
            height = min(1.0, (index + 1) / RAMP_STEPS) * (1 - DECLINE * index / config.warm_up_steps)
            self.optimizer.apply(rate=config.warm_up_rate * height, clip_norm=config.clip_norm)
        self.reference.load_state_dict(self.model.state_dict())

    def step(self, groups: Sequence[Group], on_computing: Callable[[], None] | None = None) -> StepReport:
        """Apply one update made from all of `groups`, whatever their order. Collective.

        Every rank gets every group and takes its own share. A group whose ordinal was consumed before
        is refused, before anything changes. `on_computing` is called between this rank's gradients
        and their reduction, when its peers may be waiting for it.
        """
        groups = self._admitted(groups)
        config = self.config
        count = float(sum(int(task.answer_mask(group.completions).sum()) for group in groups))
        own = share(self.ranks.rank, self.ranks.size, len(groups))
        terms = self._objective(groups[own.start : own.stop])
        (terms.loss / count).backward()  # type: ignore[no-untyped-call]  # torch's backward has no types
        if on_computing is not None:
            on_computing()
        sums = self.optimizer.reduce(torch.stack([terms.loss.detach(), terms.kl, terms.ratio]))
        norm = self.optimizer.apply(rate=config.learning_rate, clip_norm=config.clip_norm)
        self.updates += 1
        self.ledger.consume([group.ordinal for group in groups], self.updates)
        loss, kl, ratio = (sums / count).tolist()
        return StepReport(
            step=self.updates,
            reward_mean=float(np.mean([group.rewards for group in groups], dtype=np.float64)),
            loss=loss,
            kl=kl,
            ratio=ratio,
            gradient_norm=norm,
        )

    def _admitted(self, groups: Sequence[Group]) -> list[Group]:
        """Sort groups by ordinal; refuse what was consumed, repeated or of another shape."""
        ordered = sorted(groups, key=lambda group: group.ordinal)
        ordinals = [group.ordinal for group in ordered]
        if len(ordered) < self.ranks.size or len(set(ordinals)) != len(ordinals):
            raise InvalidInputError(
                f"step {self.updates + 1} needs at least {self.ranks.size} groups of different ordinals, "
                f"got {ordinals}; pass each group once",
                ordinals=ordinals,
            )
        doubled = [ordinal for ordinal in ordinals if self.ledger.consumed_at(ordinal) is not None]
        if doubled:
            raise InvalidInputError(
                f"step {self.updates + 1}: ordinals {doubled} were consumed before; drop these groups",
                ordinals=doubled,
            )
        expected = (self.config.samples, task.ANSWER_LENGTH)
        odd = [group.ordinal for group in ordered if group.completions.shape != expected]
        if odd:
            raise InvalidInputError(
                f"groups {odd} do not hold {expected[0]} samples of {expected[1]} tokens; generate them "
                "with this run's settings",
                ordinals=odd,
            )
        return ordered

    def _objective(self, groups: Sequence[Group]) -> grpo.Terms:
        """Compute this rank's sums over its groups, [groups · samples] rows in one batch."""
        samples = self.config.samples
        prompts = torch.from_numpy(np.stack([group.prompt for group in groups])).repeat_interleave(samples, 0)
        answers = torch.from_numpy(np.concatenate([group.completions for group in groups]))
        rewards = torch.from_numpy(np.stack([group.rewards for group in groups]))
        with torch.no_grad():
            reference = policy.answer_log_probs(self.reference, prompts, answers)
        return grpo.terms(
            policy.answer_log_probs(self.model, prompts, answers),
            behaviour=torch.from_numpy(np.concatenate([group.logprobs for group in groups])),
            reference=reference,
            advantage=grpo.advantages(rewards).flatten(),
            mask=torch.from_numpy(task.answer_mask(answers.numpy())),
            ratio_clip=self.config.ratio_clip,
            kl=self.config.kl,
        )

    def evaluate(self) -> float:
        """Measure greedy accuracy on the held-out rows and record it for this step, once. Collective."""
        problems = task.held_out(self.config.evaluation_rows)
        own = share(self.ranks.rank, self.ranks.size, len(problems))
        mine = problems[own.start : own.stop]
        prompts = torch.from_numpy(task.prompt_tokens(mine))
        answers = sampling.greedy(self.model, prompts, task.ANSWER_LENGTH)
        right = torch.tensor([task.rewards(mine, answers.numpy()).sum()], dtype=torch.float64)
        accuracy = float(self.ranks.sum_(right)) / len(problems)
        record = Evaluation(step=self.updates, accuracy=accuracy)
        if record not in self.evaluations:
            self.evaluations.append(record)
        return accuracy

    def _tensors(self) -> dict[str, Any]:
        """Build the nested state around the trainer's own tensors, which it keeps for life."""
        import ckptstore

        return {
            "model": self._named(self.model.state_dict()),
            "master": self._named(self.optimizer.master),
            "exp_avg": self._named(self.optimizer.exp_avg),
            "exp_avg_sq": self._named(self.optimizer.exp_avg_sq),
            "reference": ckptstore.Frozen(self._named(self.reference.state_dict())),
        }

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Mark the slices of experts as such; what stays plain is a replica on every rank."""
        import ckptstore

        start, size = self.ranks.local.start, self.config.experts
        return {
            name: ckptstore.Sharded.dim0(tensor, start=start, size=size)
            if policy.is_sharded(name)
            else tensor
            for name, tensor in tensors.items()
        }

    def state(self) -> dict[str, Any]:
        """Give all that the next step depends on, as one nested state: the same dict at every call.

        Its tensors are the trainer's own, so a restore in place changes the trainer; the other leaves
        are read back by `adopt`. Non-persistent buffers are not part of it. The evaluation records are
        one JSON text, because a list that grows would make every save a state of another structure.
        """
        import ckptstore

        self._state["step"] = self.updates
        self._state["updates"] = self.optimizer.updates
        self._state["seed"] = self.config.seed
        self._state["ledger"] = self.ledger
        self._state["evaluations"] = json.dumps([asdict(record) for record in self.evaluations])
        version, keys, _ = random.getstate()
        self._state["rng"] = ckptstore.PerRank(
            {
                "torch": torch.get_rng_state().numpy().tobytes(),
                "python": json.dumps([version, keys]),
            }
        )
        return self._state

    def adopt(self, state: dict[str, Any]) -> None:
        """Take the leaves of a restored `state()` back; its tensors were written in place."""
        if state["seed"] != self.config.seed:
            raise InvalidInputError(
                f"the state is of a run with seed {state['seed']}, not {self.config.seed}; use its settings",
                found=state["seed"],
                expected=self.config.seed,
            )
        self.updates = state["step"]
        self.optimizer.updates = state["updates"]
        self.ledger = state["ledger"]
        self.evaluations = [Evaluation(**record) for record in json.loads(state["evaluations"])]
        rng = state["rng"].value
        torch.set_rng_state(torch.from_numpy(np.frombuffer(rng["torch"], dtype=np.uint8).copy()))
        version, keys = json.loads(rng["python"])
        random.setstate((version, tuple(keys), None))

    def publication(self) -> dict[str, dict[str, Any]]:
        """Give the policy for the engines: FP8 weights, their block scales, and the rest as it is.

        `{"quantised": …, "scales": …, "rest": …}`, each by tensor name, experts as `Sharded`. Not a
        collective. The rest shares the model's memory: copy or publish it before the next step.
        """
        return {part: self._named(tensors) for part, tensors in policy.publication(self.model).items()}

    def digest_state(self) -> dict[str, str]:
        """Digest this rank's master weights and moments, `role/name` or `role/name@expert` -> hex.

        Experts are digested one by one, so that `records.join_digests` over all ranks does not depend
        on how many there are.
        """
        digests = {}
        for role in ("master", "exp_avg", "exp_avg_sq"):
            for name, tensor in getattr(self.optimizer, role).items():
                if not policy.is_sharded(name):
                    digests[f"{role}/{name}"] = xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
                    continue
                for expert, row in zip(self.ranks.local, tensor, strict=True):
                    digests[f"{role}/{name}@{expert}"] = xxhash.xxh3_128_hexdigest(row.numpy().tobytes())
        return digests
