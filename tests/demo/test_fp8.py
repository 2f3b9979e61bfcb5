"""FP8 blocks: idempotent on BF16, blind to how experts are sliced."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckptstore.demo.experts import ExpertRanks
from ckptstore.demo.fp8 import BLOCK, dequantise, quantise
from ckptstore.demo.model import build_model, is_sharded, publication
from tests.demo.small import SMALL


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@st.composite
def weights(draw: st.DrawFn, experts: int = 1) -> Tensor:
    """BF16 [experts, rows, columns] of very different sizes, also of zeros and of subnormal FP8 values."""
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0]))
    values = source.standard_normal((experts, rows, columns)) * np.exp(
        spread * source.standard_normal((experts, rows, columns))
    )
    scale = 10.0 ** draw(st.integers(-20, 20))
    return torch.from_numpy(values * scale * draw(st.sampled_from([0.0, 1.0]))).to(torch.bfloat16)


@given(matrix=weights())
@settings(max_examples=60)
def test_quantising_what_was_dequantised_gives_the_same_bytes(matrix: Tensor) -> None:
    values, scales = quantise(matrix)
    again, scales_again = quantise(dequantise(values, scales))
    assert _bytes(again) == _bytes(values) and _bytes(scales_again) == _bytes(scales)


@given(stack=weights(experts=4), cut=st.integers(1, 3))
@settings(max_examples=30)
def test_slices_of_experts_have_the_bytes_of_the_whole(stack: Tensor, cut: int) -> None:
    values, scales = quantise(stack)
    for part in (slice(0, cut), slice(cut, 4)):
        own_values, own_scales = quantise(stack[part])
        assert _bytes(own_values) == _bytes(values[part]) and _bytes(own_scales) == _bytes(scales[part])


@given(matrix=weights())
@settings(max_examples=30)
def test_the_error_is_within_half_a_step_of_three_bits(matrix: Tensor) -> None:
    values, scales = quantise(matrix)
    error = (dequantise(values, scales, torch.float32) - matrix.float()).abs()
    step = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    step = step[..., : matrix.shape[-2], : matrix.shape[-1]]
    assert (error <= matrix.float().abs() * 2.0**-4 * 1.001 + step * 2.0**-10 * 1.001).all()


def test_a_publication_has_the_same_bytes_whoever_made_it() -> None:
    whole = publication(build_model(SMALL, ExpertRanks(rank=0, size=1, experts=8)))
    slices = [publication(build_model(SMALL, ExpertRanks(rank=rank, size=3, experts=8))) for rank in range(3)]
    assert whole["quantised"] and whole["rest"]
    for part, tensors in whole.items():
        for name, tensor in tensors.items():
            pieces = [_bytes(each[part][name]) for each in slices]
            if is_sharded(name):
                assert b"".join(pieces) == _bytes(tensor), name
            else:
                assert set(pieces) == {_bytes(tensor)}, name
