"""Digests of tensors taken where they live, for comparing the replicas of one box.

Stands apart because it is the only arithmetic that runs on an accelerator, and because no kernel of torch
does it: `torch.hash_tensor` is blind to order and knows neither float8 nor complex. The bytes are read as
rows of 4,096 signed 32-bit words; the device gives one 64-bit sum a row, each word times the weight of its
place; the sums come to the host in one transfer, and XXH3-128 over a tensor's sums and its length is the
digest. So what is weak in a sum is confined to one row, and the order of rows is XXH3's matter.

What is found for certain within a row, and with what odds the rest: docs/explanation/replicas.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ckptstore.tensor import Box, halve

WORD_NBYTES = 4
ROW_WORDS = 4096
ROW_NBYTES = ROW_WORDS * WORD_NBYTES
BLOCK_NBYTES = 32 * 2**20  # of a kernel's input; its products take twice that
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights() -> npt.NDArray[np.uint64]:
    """The weight of each place in a row: odd, and no two equal or opposite in their low 33 bits.

    SplitMix64 from a fixed seed, so that every device, version and rank has the same; changing one
    of them is another kind of digest.
    """
    with np.errstate(over="ignore"):
        x = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


class RowDigests:
    """Digests under way of tensors on one device: made, they are queued there; `collect` waits for them.

    Extra memory on the device: four blocks of `block_nbytes`, and 1/2048 of the tensors' bytes. The
    tensors may change once `collect` has returned.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._block = max(block_nbytes // ROW_NBYTES, 1) * ROW_NBYTES
        self._nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        self._sums: list[torch.Tensor | None] = []  # None: a batch that is still being filled
        self._places: list[
            list[tuple[int, int, int]]
        ] = []  # of each tensor: output, first row, number of rows
        self._batch: list[torch.Tensor] = []
        self._batch_rows = self._batch_number = 0
        if not tensors:
            return
        self._device = tensors[0].device
        self._weights = _weights_on(self._device)
        self._padding = torch.zeros(ROW_NBYTES, dtype=torch.uint8, device=self._device)
        largest = min(self._block, sum(-(-n // ROW_NBYTES) * ROW_NBYTES for n in self._nbytes))
        self._products = torch.empty(
            (largest // ROW_NBYTES, ROW_WORDS), dtype=torch.int64, device=self._device
        )
        with torch.no_grad():
            for tensor in tensors:
                self._places.append([])
                for piece in _pieces(tensor.detach(), self._block):
                    self._add(piece)
            self._flush()

    def collect(self) -> list[bytes]:
        """The 16-byte digest of each tensor, in order; one transfer from the device."""
        if not self._nbytes:
            return []
        queued = [sums for sums in self._sums if sums is not None]
        starts = np.cumsum([0, *(len(sums) for sums in queued)])
        joined = torch.cat(queued) if queued else self._padding[:0].view(torch.int64)
        sums = joined.cpu().numpy().astype("<i8", copy=False).view(np.uint8)
        digests = []
        for places, nbytes in zip(self._places, self._nbytes, strict=True):
            hasher = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
            for output, first, rows in places:
                start = int(starts[output]) + first
                hasher.update(sums[start * 8 : (start + rows) * 8].data)
            digests.append(hasher.digest())
        return digests

    def _add(self, piece: torch.Tensor) -> None:
        """Queue a flat piece of bytes: alone if it is large and aligned, else copied into a block with others."""
        nbytes = piece.numel()
        rows = -(-nbytes // ROW_NBYTES)
        if nbytes % ROW_NBYTES == 0 and nbytes * 4 >= self._block and _is_aligned(piece):
            self._places[-1].append((len(self._sums), 0, rows))
            self._sums.append(self._sum(piece))
            return
        if (self._batch_rows + rows) * ROW_NBYTES > self._block:
            self._flush()
        if not self._batch:
            self._batch_number = len(self._sums)
            self._sums.append(None)
        self._places[-1].append((self._batch_number, self._batch_rows, rows))
        self._batch.append(piece)
        if nbytes % ROW_NBYTES:
            self._batch.append(self._padding[: rows * ROW_NBYTES - nbytes])
        self._batch_rows += rows

    def _flush(self) -> None:
        if self._batch:
            self._sums[self._batch_number] = self._sum(torch.cat(self._batch))
            self._batch, self._batch_rows = [], 0

    def _sum(self, data: torch.Tensor) -> torch.Tensor:
        words = data.view(torch.int32).view(-1, ROW_WORDS)
        products = torch.mul(words, self._weights, out=self._products[: len(words)])
        return products.sum(dim=1)  # modulo 2^64: exact in any order


@cache
def _weights_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights().view(np.int64)).to(device)


def _is_aligned(flat: torch.Tensor) -> bool:
    return flat.storage_offset() % WORD_NBYTES == 0 and flat.data_ptr() % WORD_NBYTES == 0


def _pieces(tensor: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """The row-major bytes in flat pieces of whole rows, the last one excepted; at most two blocks are copied."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield from torch.split(_flat_bytes(tensor), block)
        return
    rest: torch.Tensor | None = None
    for box in halve(Box.whole(tuple(tensor.shape)), max(block // tensor.element_size(), 1)):
        part = tensor[box.slices] if box.shape else tensor
        data = _flat_bytes(_dense(part))
        if rest is not None and len(rest):
            data = torch.cat([rest, data])
        whole = len(data) // ROW_NBYTES * ROW_NBYTES
        yield from torch.split(data[:whole], block) if whole else ()
        rest = data[whole:]
    if rest is not None and len(rest):
        yield rest


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A row-major copy, made by integers where torch has no copy kernel for the dtype."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.element_size() in _SAME_SIZE:
        plain = plain.view(_SAME_SIZE[plain.element_size()])
    return plain.contiguous()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing its memory."""
    if tensor.element_size() in _SAME_SIZE:
        words = tensor.view(_SAME_SIZE[tensor.element_size()])
    else:
        words = torch.view_as_real(tensor)
    # A dimension of one element may have any stride, and then `view` refuses to count in bytes.
    return words.as_strided((words.numel(),), (1,)).view(torch.uint8)
