"""AdamW over FP32 master weights, from which the BF16 weights are derived.

Own code because torch's optimizers create a parameter's state at its first gradient (the indexer's
six tensors never get one, so a strict restore would ask for moments that no checkpoint has) and cast
the FP32 moments of a BF16 parameter to BF16 when a state is loaded. Here every state exists from the
start, in FP32, and is written by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ckptstore.demo.experts import ExpertRanks
from ckptstore.demo.model import is_sharded

BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01


class AdamW:
    """Master weights and moments of one rank: of its experts, and of everything that is replicated.

    `master`, `exp_avg` and `exp_avg_sq` hold FP32 tensors by parameter name; a restore writes into
    them in place. `updates` counts all updates, those of the warm-up included.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, ranks: ExpertRanks) -> None:
        self.parameters = dict(parameters)
        self.ranks = ranks
        self.master = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.exp_avg = {name: torch.zeros_like(master) for name, master in self.master.items()}
        self.exp_avg_sq = {name: torch.zeros_like(master) for name, master in self.master.items()}
        self.updates = 0
        self._gradients: list[Tensor] = []
        self._norm = 0.0

    def reduce(self, sums: Tensor) -> Tensor:
        """Add up gradients, and the caller's FP32 `sums`, over all ranks; give the total of `sums`.

        Expert gradients are complete already: the backward exchange brought every rank's tokens.
        The rest travels in one flat buffer, together with `sums` and the experts' part of the norm.
        Collective. A parameter without gradient counts as zero.
        """
        names = [name for name in self.parameters if not is_sharded(name)]
        sizes = [self.parameters[name].numel() for name in names]
        flat = torch.zeros(sum(sizes) + 1 + len(sums), dtype=torch.float32)
        pieces = dict(zip(names, torch.split(flat[: sum(sizes)], sizes), strict=True))
        tail = flat[sum(sizes) :]
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if name in pieces:
                gradients[name] = pieces[name].view_as(parameter)
                if parameter.grad is not None:
                    gradients[name].copy_(parameter.grad)
            else:
                found = parameter.grad
                gradients[name] = torch.zeros_like(self.master[name]) if found is None else found.float()
                tail[0] += gradients[name].square().sum()
            parameter.grad = None
        tail[1:] = sums
        self.ranks.sum_(flat)
        replicated = flat[: sum(sizes)]
        self._norm = math.sqrt(float(replicated.square().sum() + tail[0]))
        self._gradients = list(gradients.values())
        return tail[1:].clone()

    def apply(self, *, rate: float, clip_norm: float) -> float:
        """Apply the reduced gradients and derive the weights; give the norm before clipping."""
        gradients, self._gradients = self._gradients, []
        if self._norm > clip_norm:
            torch._foreach_mul_(gradients, clip_norm / self._norm)
        self.updates += 1
        masters, means = list(self.master.values()), list(self.exp_avg.values())
        squares = list(self.exp_avg_sq.values())
        first, second = BETAS
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, math.sqrt(1 - second**self.updates))
        torch._foreach_add_(divisors, EPSILON)
        torch._foreach_mul_(masters, 1 - rate * WEIGHT_DECAY)
        torch._foreach_addcdiv_(masters, means, divisors, -rate / (1 - first**self.updates))
        self.derive()
        return self._norm

    def derive(self) -> None:
        """Round the master weights to the model's own dtypes."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.master[name])
