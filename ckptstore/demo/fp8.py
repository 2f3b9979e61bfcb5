"""FP8 weights for the engines: e4m3 with one FP32 scale for each block of 128 × 128.

A block never spans two experts, so a slice of the stacked experts has the bytes of that slice of
the whole, and a publication does not depend on how many ranks made it. For BF16 weights, quantising
what was dequantised gives the same bytes again: a block's largest value is 448 times its scale,
which rounds back to the BF16 number that it came from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
LARGEST = 448.0  # the largest finite e4m3fn


def _blocks(padded: Tensor) -> Tensor:
    """View [..., R·128, C·128] as [..., R, 128, C, 128]."""
    *lead, rows, columns = padded.shape
    return padded.view(*lead, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Give every element its block's scale: [..., R, C] -> [..., rows, columns]."""
    return scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :columns]


def quantise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Give (float8_e4m3fn of the same shape, FP32 scales): weights [..., rows, columns], scales a block each.

    Edge blocks are smaller. A block of zeros has scale 1.
    """
    rows, columns = weights.shape[-2:]
    wide = weights.detach().float()
    padded = functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = _blocks(padded).abs().amax(dim=(-3, -1))
    scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    scaled = (wide / _spread(scales, rows, columns)).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn), scales


def dequantise(quantised: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Give the weights of `quantise` back, rounded to `dtype`."""
    rows, columns = quantised.shape[-2:]
    return (quantised.float() * _spread(scales, rows, columns)).to(dtype)
