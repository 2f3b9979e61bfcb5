"""What crosses processes in the demo loop: groups of samples and reports of steps.

Plain numpy and numbers, so that pickling is cheap and the coordinator, which has no torch, can
hand them on. Digests of state are here for the same reason: ranks make theirs, anyone joins them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptstore.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All samples of one prompt.

    `prompt` is int64 [prompt length]; `completions` int64 [samples, answer length], PAD after END;
    `logprobs` float32 of the same shape, by the policy that sampled (0 after END); `rewards`
    float32 [samples]; `version` the number of the publication that the engine served.
    """

    ordinal: int
    version: int
    prompt: NDArray[np.int64]
    completions: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    rewards: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.completions.shape != self.logprobs.shape or self.rewards.shape != self.completions.shape[:1]:
            raise InvalidInputError(
                f"group {self.ordinal}: completions {self.completions.shape}, logprobs {self.logprobs.shape} "
                f"and rewards {self.rewards.shape} do not belong together; pass arrays of one batch",
                ordinal=self.ordinal,
            )

    def same_samples(self, other: Group) -> bool:
        """Tell whether both hold bitwise equal samples, whatever the version that made them."""
        return self.ordinal == other.ordinal and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("prompt", "completions", "logprobs", "rewards")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one update did; equal on all ranks. `step` counts updates, this one included.

    `loss` and `kl` are means over answer tokens, `ratio` the mean importance ratio of the trainer
    against the engine that sampled, `gradient_norm` is taken before clipping.
    """

    step: int
    reward_mean: float
    loss: float
    kl: float
    ratio: float
    gradient_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Greedy accuracy on the held-out rows after `step` updates."""

    step: int
    accuracy: float


def join_digests(ranks: Iterable[Mapping[str, str]]) -> str:
    """Join the digests of all ranks into one, equal for any layout of equal tensors.

    A name that ranks digest differently is an InvalidInputError: replicas have drifted apart.
    """
    joined: dict[str, str] = {}
    for digests in ranks:
        for name, digest in digests.items():
            if joined.setdefault(name, digest) != digest:
                raise InvalidInputError(
                    f"{name} differs between ranks; find the first step after which it does", name=name
                )
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(joined.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
