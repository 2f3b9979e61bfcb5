"""Generation whose every bit is a function of weights, run seed and ordinals.

Two rules make it so. The unit is a lease, a fixed number of prompts in one batch of fixed shape,
because a row's logits depend on its batch. And a sample's random numbers come from (run seed,
ordinal, sample), never from an engine, a version or an attempt, so whoever generates a lease again
generates the same. Choosing a token compares FP64 numbers, so rounding cannot flip it unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ckptstore.demo import task
from ckptstore.demo.model import logits


def uniforms(seed: int, ordinals: Sequence[int], samples: int) -> NDArray[np.float64]:
    """Draw numbers in [0, 1) for each sample of each ordinal: [ordinals · samples, ANSWER_LENGTH]."""
    rows = [
        task.generator(seed, task.SAMPLING, ordinal, sample).random(task.ANSWER_LENGTH)
        for ordinal in ordinals
        for sample in range(samples)
    ]
    return np.stack(rows)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Continue prompts [B, P] by one token a column of `draws` FP64 [B, T], drawn from the policy.

    Gives tokens int64 [B, T] (PAD after END) and their log-probabilities FP32 [B, T] (0 after END).
    Rows that have ended stay in the batch, so that its shape never changes.
    """
    tokens, log_probs = prompts, torch.zeros(draws.shape, dtype=torch.float32)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for column in range(draws.shape[1]):
        predicted = logits(model, tokens, 1)[:, -1].double().log_softmax(dim=-1)
        bounds = predicted.exp().cumsum(dim=-1)
        draw = draws[:, column : column + 1].contiguous()
        chosen = torch.searchsorted(bounds, draw, right=True).squeeze(-1)
        chosen = chosen.clamp(max=predicted.shape[-1] - 1)  # the last bound may fall short of 1
        found = predicted.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        log_probs[:, column] = torch.where(ended, 0.0, found).float()
        chosen = torch.where(ended, task.PAD, chosen)
        ended = ended | (chosen == task.END)
        tokens = torch.cat([tokens, chosen.unsqueeze(-1)], dim=1)
    return tokens[:, prompts.shape[1] :], log_probs


@torch.no_grad()
def greedy(model: nn.Module, prompts: Tensor, length: int) -> Tensor:
    """Continue prompts [B, P] by the `length` likeliest tokens: int64 [B, length]. Collective."""
    tokens = prompts
    for _ in range(length):
        tokens = torch.cat([tokens, logits(model, tokens, 1)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens[:, prompts.shape[1] :]
