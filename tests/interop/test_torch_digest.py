"""The digest that accelerators take: 13 ways to differ are found, and nothing but bytes and their places counts.

CPU tensors stand in for the accelerator's: only integer operations that every backend has are used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.interop.torch_digest import ROW_NBYTES, ROW_WORDS, RowDigests, weights
from ckptstore.interop.torch_tensor import torch_dtype
from ckptstore.tensor import DTYPES

BLOCK = 4 * ROW_NBYTES
ROWS, COLUMNS = 24, 1500  # of float32: rows of the digest begin within the rows of the tensor


def digest(tensor: torch.Tensor, block_nbytes: int = BLOCK) -> bytes:
    return RowDigests([tensor], block_nbytes=block_nbytes).collect()[0]


def sample(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def reference(data: bytes) -> bytes:
    """The definition, in numpy: docs/explanation/replicas.md."""
    import xxhash

    padded = np.frombuffer(data + bytes(-len(data) % ROW_NBYTES), "<i4").astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        sums = (padded.reshape(-1, ROW_WORDS) * weights()).sum(axis=1, dtype=np.uint64)
    return xxhash.xxh3_128_digest(len(data).to_bytes(8, "little") + sums.astype("<u8").tobytes())


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32).view(-1)


def flipped(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    """The same bit of several words turned over: `(word, bit)`."""
    out = tensor.clone()
    for word, bit in places:
        words(out)[word] ^= int(np.int32(np.uint32(1 << bit).view(np.int32)))
    return out


def moved(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1)[order].view(tensor.shape)


def swapped(tensor: torch.Tensor, a: slice | int, b: slice | int) -> torch.Tensor:
    out = tensor.clone()
    out[a], out[b] = tensor[b], tensor[a]
    return out


def zeros_moved(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out.view(-1)[100:200], out.view(-1)[200:300] = tensor.view(-1)[200:300], tensor.view(-1)[100:200]
    return out


Attack = Callable[[torch.Tensor], torch.Tensor]
ATTACKS: dict[str, Attack] = {
    "one bit": lambda t: flipped(t, (777, 3)),
    "the same bit of two words": lambda t: flipped(t, (5, 31), (900, 31)),
    "the same bit of two words, rows apart": lambda t: flipped(t, (5, 31), (5 + ROW_WORDS, 31)),
    "two elements swapped": lambda t: swapped(t.view(-1), 10, 4321).view(t.shape),
    "two rows swapped": lambda t: swapped(t, 3, 17),
    "two blocks swapped": lambda t: swapped(
        t.view(-1), slice(0, ROW_WORDS), slice(ROW_WORDS, 2 * ROW_WORDS)
    ).view(t.shape),
    "rolled by an element": lambda t: t.view(-1).roll(1).view(t.shape),
    "rolled by a row": lambda t: t.roll(1, 0),
    "all signs turned": lambda t: -t,
    "shuffled": lambda t: moved(t, torch.randperm(t.numel(), generator=torch.Generator().manual_seed(1))),
    "zeros at another place": zeros_moved,
    "backwards": lambda t: t.view(-1).flip(0).view(t.shape),
    "transposed": lambda t: t.T.contiguous().view(t.shape),
    "bytes of all words swapped": lambda t: (
        t.view(torch.uint8).view(-1, 4).flip(1).contiguous().view(torch.float32).view(t.shape)
    ),
    "two halves exchanged": lambda t: torch.cat([t[ROWS // 2 :], t[: ROWS // 2]]),
    "negative zeros": lambda t: torch.where(t == 0, -0.0, t),
    "one added to a word and taken from another": lambda t: (
        (
            words(t)
            + torch.zeros(t.numel(), dtype=torch.int32).index_put_(
                (torch.tensor([7, 8]),), torch.tensor([1, -1], dtype=torch.int32)
            )
        )
        .view(torch.float32)
        .view(t.shape)
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("seed", range(3))
def test_every_attack_changes_the_digest(name: str, seed: int) -> None:
    tensor = sample(seed)
    tensor.view(-1)[150:260] = 0
    attacked = ATTACKS[name](tensor.clone())
    assert words(attacked).tolist() != words(tensor).tolist()
    assert digest(attacked) != digest(tensor)


def test_weights_leave_no_pair_of_words_that_could_hide_each_other() -> None:
    """What docs/explanation/replicas.md claims for certain: any two flipped bits, any two words swapped."""
    low = weights() & np.uint64(2**33 - 1)
    assert (low & np.uint64(1)).all()
    both = np.concatenate([low, (np.uint64(2**33) - low) & np.uint64(2**33 - 1)])
    assert len(np.unique(both)) == 2 * ROW_WORDS
    assert weights()[[0, 1, 4095]].tolist() == [
        16294208416658607535,
        7960286522194355701,
        13142190088612651345,
    ]


@given(
    data=st.data(),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 9), max_size=3),
    block_rows=st.integers(1, 3),
)
def test_the_digest_is_that_of_the_bytes_whatever_the_dtype_the_strides_and_the_block(
    data: st.DataObject, dtype: str, shape: list[int], block_rows: int
) -> None:
    numel = int(np.prod(shape, dtype=int))
    raw = data.draw(st.binary(min_size=numel * DTYPES[dtype], max_size=numel * DTYPES[dtype]))
    held = torch.frombuffer(bytearray(raw + b"\0" * 16), dtype=torch.uint8)[: len(raw)]
    tensor = held.view(torch_dtype(dtype)).view(shape)
    expected = reference(raw)
    assert digest(tensor, block_rows * ROW_NBYTES) == expected
    wide = torch.stack([held.view(numel, DTYPES[dtype])] * 2, dim=1).contiguous()
    wide[:, 1] = 7
    strided = wide.view(-1).view(torch_dtype(dtype)).view([*shape, 2]).select(-1, 0)
    assert digest(strided, block_rows * ROW_NBYTES) == expected


@given(
    sizes=st.lists(st.integers(0, 5 * ROW_NBYTES), max_size=6),
    offset=st.integers(0, 3),
    block_rows=st.sampled_from((1, 2, 3, 8)),
)
def test_many_tensors_at_once_have_the_digests_of_each_alone(
    sizes: list[int], offset: int, block_rows: int
) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    memory = torch.randint(0, 256, (sum(sizes) + offset,), dtype=torch.uint8, generator=generator)
    tensors = list(memory[offset:].split(sizes)) if sizes else []
    found = RowDigests(tensors, block_nbytes=block_rows * ROW_NBYTES).collect()
    assert found == [reference(tensor.numpy().tobytes()) for tensor in tensors]


def test_strided_tensors_larger_than_a_block() -> None:
    tensor = sample()
    for view in (tensor.T, tensor[:, ::3], tensor[:, :1].expand(ROWS, 700), torch.zeros(()).expand(3, 5000)):
        assert digest(view) == reference(view.contiguous().numpy().tobytes())
    turned = torch.complex(tensor, tensor).conj()
    assert digest(turned) == reference(turned.resolve_conj().numpy().tobytes())
    assert digest(turned.to(torch.complex128).T) == reference(
        turned.T.resolve_conj().contiguous().numpy().astype(np.complex128).tobytes()
    )


def test_one_transfer_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: calls.append(self.numel()) or cpu(self))
    RowDigests([sample(seed) for seed in range(5)] + [torch.ones(3)] * 40, block_nbytes=BLOCK).collect()
    assert len(calls) == 1
