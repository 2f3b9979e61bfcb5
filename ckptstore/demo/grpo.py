"""Group-relative policy optimisation: advantages within a group, a clipped ratio, a KL term.

Pure functions of tensors, apart from the trainer so that they can be checked by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Sums over the counted tokens: `loss` (policy and KL together, differentiable), `kl`, `ratio`."""

    loss: Tensor
    kl: Tensor
    ratio: Tensor


def advantages(rewards: Tensor) -> Tensor:
    """Give each sample's reward relative to its group's mean, in deviations: FP32 [groups, samples].

    A group whose rewards are all equal teaches nothing: its advantages are 0.
    """
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True).sqrt() + 1e-4)


def terms(
    policy: Tensor,
    *,
    behaviour: Tensor,
    reference: Tensor,
    advantage: Tensor,
    mask: Tensor,
    ratio_clip: float,
    kl: float,
) -> Terms:
    """Sum the objective over tokens where `mask` is true.

    `policy` (differentiable), `behaviour` (of the engine that sampled) and `reference` are
    log-probabilities [rows, T]; `advantage` is [rows]. The KL estimate is exp(d) - d - 1 with
    d = reference - policy: never negative, and right in the mean.
    """
    weight = mask.float()
    ratio = torch.exp((policy - behaviour) * weight)
    gain = advantage.unsqueeze(-1)
    clipped = ratio.clamp(1 - ratio_clip, 1 + ratio_clip)
    difference = (reference - policy) * weight
    divergence = torch.exp(difference) - difference - 1
    objective = -torch.minimum(ratio * gain, clipped * gain) + kl * divergence
    return Terms(
        loss=(objective * weight).sum(),
        kl=(divergence.detach() * weight).sum(),
        ratio=(ratio.detach() * weight).sum(),
    )
