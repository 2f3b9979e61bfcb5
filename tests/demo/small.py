"""A demo configuration that is quick, and the pieces that tests of it share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ckptstore
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.engine import Engine
from ckptstore.demo.records import Group

SMALL = DemoConfig(
    seed=3,
    steps=4,
    prompts=6,
    samples=4,
    lease_prompts=2,
    warm_up_steps=3,
    warm_up_rows=24,
    evaluation_rows=12,
    hidden=32,
    expert_width=16,
    query_rank=16,
)


def bare(value: Any) -> Tensor:
    """Give the tensor of a leaf, sliced or not."""
    tensor: Tensor = value.tensor if isinstance(value, ckptstore.Sharded) else value
    return tensor


@cache
def generated(config: DemoConfig, step: int) -> tuple[Group, ...]:
    """Generate the groups of one step by an engine with the initial weights: equal in every process.

    Such weights answer nothing right, and equal rewards give no gradient: rewards are drawn instead.
    """
    engine = Engine(config)
    engine.install(version=0)
    first = step * config.prompts
    groups: list[Group] = []
    for start in range(first, first + config.prompts, config.lease_prompts):
        for group in engine.generate(range(start, start + config.lease_prompts)):
            drawn = np.random.default_rng(group.ordinal).integers(0, 2, size=config.samples)
            groups.append(replace(group, rewards=drawn.astype(np.float32)))
    return tuple(groups)


def write_in_place(target: Any, source: Any) -> None:
    """Do what a restore does: copy tensors into those of `target`, replace its other leaves."""
    for key, value in source.items():
        if isinstance(value, ckptstore.Frozen):
            write_in_place(target[key].tree, value.tree)
        elif isinstance(value, dict):
            write_in_place(target[key], value)
        elif isinstance(value, (torch.Tensor, ckptstore.Sharded)):
            bare(target[key]).copy_(bare(value))
        else:
            target[key] = value
