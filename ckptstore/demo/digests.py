"""Digests of the demo's tensors by name, equal for every layout of equal values.

Read from the store they are compared with what ranks hold in memory, so that neither a gather nor the
library's own checks vouch for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
from torch import Tensor

from ckptstore.demo import model as policy
from ckptstore.run import Run

OPTIMIZED = ("master", "exp_avg", "exp_avg_sq")


def digest_stored(run: Run, step: int) -> dict[str, str]:
    """Digest the global master weights and moments of a checkpoint, as `Trainer.digest_state` does its own."""
    state = run.read(step, role="trainer", names=[f"{role}.*" for role in OPTIMIZED])
    digests = {}
    for role in OPTIMIZED:
        for name, tensor in state[role].items():
            if not policy.is_sharded(name):
                digests[f"{role}/{name}"] = xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
                continue
            for expert, row in enumerate(tensor):
                digests[f"{role}/{name}@{expert}"] = xxhash.xxh3_128_hexdigest(row.numpy().tobytes())
    return digests


def digest_served(parts: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Digest the weights that an engine loaded, all of them."""
    import torch

    hasher = xxhash.xxh3_128()
    for part, tensors in sorted(parts.items()):
        for name, tensor in sorted(tensors.items()):
            hasher.update(f"{part}/{name}\n".encode())
            hasher.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
