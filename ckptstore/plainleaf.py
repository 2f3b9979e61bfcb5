"""Leaves of plain tensors, made with as few calls and objects as that takes.

Nearly all leaves of a state are whole torch tensors on the host, each one run of memory. What `pieces.describe` says
of such a one follows from its dtype and its shape, so that a load of 20,000 of them need not ask each what it is not.
It stands apart as the fast way beside the general one, which it must equal: tests compare them.
"""

from __future__ import annotations

from typing import Any

from ckptstore.held import torch_module
from ckptstore.structure import TensorLeaf
from ckptstore.tensor import Box, Shape, TensorSpec


class PlainLeaves:
    """Makes leaves; those of one shape share a box. Not for several threads at once."""

    def __init__(self) -> None:
        torch = torch_module()
        self._types: tuple[Any, ...] = () if torch is None else (torch.Tensor, torch.nn.Parameter)
        self._strided = None if torch is None else torch.strided
        self._dtypes: dict[Any, str] = {}
        self._boxes: dict[Shape, Box] = {}

    def leaf(self, value: Any, name: str) -> TensorLeaf | None:
        """The leaf of a tensor that all ranks hold, under `name`; None where `describe` must be asked.

        What has a leaf can be written to: its elements lie apart.
        """
        if type(value) not in self._types or not value.is_cpu or value.layout is not self._strided:
            return None
        if value.is_quantized or value.is_nested or not value.is_contiguous():
            return None
        dtype = self._dtypes.get(value.dtype) or self._note_dtype(value.dtype)
        if not dtype:
            return None
        box = self._boxes.get(value.shape)
        if box is None:
            shape = tuple(value.shape)
            box = self._boxes[shape] = Box.whole(shape)
        spec = TensorSpec(name=name, dtype=dtype, shape=box.shape)
        return TensorLeaf(spec=spec, box=box, data=value, replicas=None, frozen=False)

    def _note_dtype(self, dtype: Any) -> str:
        from ckptstore.interop.torch_tensor import find_dtype_name

        name = self._dtypes[dtype] = find_dtype_name(dtype) or ""
        return name
