"""What ckptstore needs to know of a torch tensor: its dtype's name, its bytes, its box.

Stands apart because nothing else may import torch at module level: a process without torch (a
coordinator, a tool) uses the rest of the package. Devices are reached through the tensor itself,
never by name. DTensor placements and what they mean for boxes: docs/explanation/layouts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptstore.errors import InvalidInputError
from ckptstore.tensor import DTYPES, Box, Shape

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """ckptstore's name of a torch dtype; InvalidInputError naming `where` for one that it cannot store."""
    if dtype not in _NAMES:
        raise InvalidInputError(
            f"{where} has dtype {dtype}, which cannot be stored: save a tensor of another dtype", name=where
        )
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InvalidInputError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: read it with a newer torch", dtype=name
        )
    return _DTYPES[name]


def check_dense(tensor: torch.Tensor, where: str) -> None:
    """Refuse what has no plain bytes: meta, sparse, quantized, nested and wrapping tensors."""
    reason = (
        "is not initialized yet"
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
        else "is on the meta device"
        if tensor.is_meta
        else f"has layout {tensor.layout}"
        if tensor.layout != torch.strided
        else "is nested"
        if tensor.is_nested
        else "is quantized"
        if tensor.is_quantized
        else "wraps other tensors"
        if bool(is_traceable_wrapper_subclass(tensor))
        else None
    )
    if reason is not None:
        raise InvalidInputError(f"{where} {reason} and has no plain bytes: save a dense tensor", name=where)


def shares_elements(tensor: torch.Tensor) -> bool:
    """Do several elements lie in the same memory (an expanded tensor), so that they cannot be filled?"""
    return tensor.numel() > 0 and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def byte_view(tensor: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """The tensor's own memory as bytes, or None where it is not contiguous CPU memory.

    Writing to the view writes the tensor.
    """
    plain = tensor.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return None
    nbytes = plain.numel() * plain.element_size()
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    view = torch.empty(0, dtype=torch.uint8)
    view.set_(plain.untyped_storage(), plain.storage_offset() * plain.element_size(), (nbytes,), (1,))
    return view.numpy()


def from_bytes(data: npt.NDArray[np.uint8], dtype: str, shape: Shape) -> torch.Tensor:
    """A CPU tensor over `data` (no copy); `data` is aligned to the element size."""
    if data.size == 0:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.from_numpy(data).view(torch_dtype(dtype)).view(shape)


def copy_to_bytes(tensor: torch.Tensor, out: npt.NDArray[np.uint8]) -> None:
    """Copy the elements, row-major, into `out` (as many bytes, aligned to the element size)."""
    view = byte_view(tensor)
    if view is not None:
        np.copyto(out, view)
    elif out.size:
        plain = tensor.detach()
        target = torch.from_numpy(out).view(plain.dtype).view(plain.shape)
        target.copy_(plain)


def copy_box_from_bytes(
    tensor: torch.Tensor, box: Box, data: npt.NDArray[np.uint8], source: Box, wanted: Box
) -> None:
    """Write the elements of `wanted` from a chunk into a tensor.

    `tensor` holds `box`, `data` holds `source`, both row-major; all three boxes are in the coordinates
    of the global tensor, and `wanted` lies within the other two.
    """
    with torch.no_grad():
        target = tensor.detach()
        chunk = torch.from_numpy(data).view(target.dtype).view(source.shape)
        if wanted.shape:
            target = target[wanted.relative_to(box).slices]
            chunk = chunk[wanted.relative_to(source).slices]
        target.copy_(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """What this rank holds of a distributed tensor: the local tensor, its box and who else holds that box."""

    tensor: torch.Tensor
    box: Box
    shape: Shape
    replicas: tuple[int, ...]


def is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def local_shard(tensor: Any, rank: int, where: str) -> LocalShard:
    """The local shard of a DTensor whose mesh ranks are the role's ranks.

    Shard splits as torch.chunk does: ceil(n / parts) elements a rank, the last ones fewer or none.
    Partial is refused (it has no value yet), and so are strided shards.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    ranks = mesh.mesh
    if coordinate is None:
        raise InvalidInputError(
            f"{where} is a DTensor on a mesh of ranks {ranks.flatten().tolist()} that this process is not in: "
            f"leave it out of this rank's state",
            name=where,
        )
    if int(ranks[tuple(coordinate)]) != rank:
        raise InvalidInputError(
            f"{where} is a DTensor whose mesh calls this process rank {int(ranks[tuple(coordinate)])}, but the "
            f"Checkpointer was given rank {rank}: give it the rank of torch.distributed",
            name=where,
            rank=rank,
        )
    shape: Shape = tuple(tensor.shape)
    offset, extent = [0] * len(shape), list(shape)
    select: list[Any] = []
    for dim, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            select.append(slice(None))
            continue
        if kind != "Shard":
            raise InvalidInputError(
                f"{where} is a DTensor with placement {placement}, which cannot be saved: redistribute it to "
                f"Shard or Replicate first",
                name=where,
            )
        axis, parts, at = placement.dim % len(shape), mesh.size(dim), coordinate[dim]
        step = -(-extent[axis] // parts)
        begin = min(step * at, extent[axis])
        offset[axis] += begin
        extent[axis] = min(step, extent[axis] - begin)
        select.append(at)
    box = Box(offset=tuple(offset), shape=tuple(extent))
    local = tensor.to_local()
    if tuple(local.shape) != box.shape:
        raise InvalidInputError(
            f"{where} is a DTensor whose local tensor has shape {tuple(local.shape)}, where its placements "
            f"{tensor.placements} give {box.shape}: redistribute it first",
            name=where,
        )
    replicas = tuple(sorted(int(r) for r in ranks[tuple(select)].flatten().tolist()))
    return LocalShard(
        tensor=local, box=box, shape=shape, replicas=replicas if len(replicas) > 1 and box.numel else ()
    )


def broadcast_json(message: dict[str, str], group: Any) -> dict[str, str]:
    """Rank 0's message on all ranks of a process group; as bytes, so that nothing is unpickled."""
    import json

    import torch.distributed as dist

    source = 0 if group is None else dist.get_global_rank(group, 0)
    device = torch.device("cpu")
    if dist.get_backend(group) not in ("gloo", "mpi") and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    data = json.dumps(message).encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    if dist.get_rank(group) == 0:
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        body = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(body, src=source, group=group)
    return dict(json.loads(body.cpu().numpy().tobytes()))
