"""What ckptstore needs to know of a torch tensor: its dtype's name, its bytes, its box.

Stands apart because nothing else may import torch at module level: a process without torch (a
coordinator, a tool) uses the rest of the package. Devices are reached through the tensor itself,
never by name. DTensor placements and what they mean for boxes: docs/explanation/layouts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import attrgetter
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
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """ckptstore's name of a torch dtype; InvalidInputError naming `where` for one that it cannot store."""
    if dtype not in _NAMES:
        raise InvalidInputError(
            f"{where} has dtype {dtype}, which cannot be stored: save a tensor of another dtype", name=where
        )
    return _NAMES[dtype]


def find_dtype_name(dtype: torch.dtype) -> str | None:
    """As `dtype_name`; None for what cannot be stored."""
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InvalidInputError(
            f"this torch ({torch.__version__}) has no dtype {name!r}: read it with a newer torch", dtype=name
        )
    return _DTYPES[name]


def check_dense(tensor: torch.Tensor, where: str) -> None:
    """Refuse what has no plain bytes: meta, sparse, quantized, nested and wrapping tensors."""
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout is torch.strided
    if plain and not tensor.is_quantized and not tensor.is_nested:
        return  # nearly all; the questions below take longer than all else that is asked of a tensor
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


def host_address_of(tensor: torch.Tensor, nbytes: int) -> int:
    """Where the tensor's elements begin in host memory; -1 where they are not one run of `nbytes` there.

    A tenth of what `byte_view` takes: loads ask it of twenty thousand tensors.
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.nbytes != nbytes:
        return -1
    if tensor.is_complex() and (tensor.is_conj() or tensor.is_neg()):
        return -1
    return tensor.data_ptr()


def host_runs_of(tensors: Sequence[Any]) -> npt.NDArray[np.int64] | None:
    """[address, bytes] of each, if all are plain tensors of one run of host memory each; None: ask `host_address_of`.

    A loop that C runs: a tenth of what asking each in Python takes.
    """
    if not set(map(type, tensors)) <= set(_PLAIN):
        return None
    if not all(map(attrgetter("is_cpu"), tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        return None
    found = np.empty((len(tensors), 2), np.int64)
    found[:, 0] = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    found[:, 1] = np.fromiter(map(attrgetter("nbytes"), tensors), np.int64, len(tensors))
    return found


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


def concatenate(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Copy the parts end to end into `out`, which is as long. One call, during which other threads run."""
    torch.cat(parts, out=out)


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


def versions_of(data: Sequence[Any]) -> list[int | None]:
    """Of each tensor a number that grows with every change in place that torch knows of; None for what counts none."""
    return [
        each._version if isinstance(each, torch.Tensor) and not each.is_inference() else None for each in data
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShards:
    """What this rank holds of a distributed tensor: boxes with views of the local tensor, and who else holds them.

    One box, unless a strided placement left several. `replicas` is empty where nobody else does.
    """

    shape: Shape
    boxes: tuple[tuple[Box, torch.Tensor], ...]
    replicas: tuple[int, ...]


def is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def local_shards(tensor: Any, rank: int, where: str, *, holders: Sequence[int] | None = None) -> LocalShards:
    """The boxes of a DTensor that this rank holds, on a mesh (or a slice of one) of the role's ranks.

    Whether the other slices of a mesh hold the same tensor only the caller knows: those of `holders` do.

    Every placement but Partial, which has no value yet. On each dimension the local tensor is a list of
    runs of global indices, which each mesh dimension splits further; runs of several dimensions make boxes.
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
    runs = [[range(extent)] for extent in shape]
    select: list[Any] = [slice(None)] * ranks.dim()
    for dim in _split_order(tensor):
        placement = tensor.placements[dim]
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            reason = "holds sums that are not added up yet" if "Partial" in kind else "is of an unknown kind"
            raise InvalidInputError(
                f"{where} is a DTensor with placement {placement}, which {reason} and cannot be saved: redistribute "
                f"it to Shard or Replicate first",
                name=where,
            )
        axis, parts, at = placement.dim % len(shape), mesh.size(dim), coordinate[dim]
        runs[axis] = _take(runs[axis], parts, at, getattr(placement, "split_factor", 1))
        select[dim] = at
    local = tensor.to_local()
    held = tuple(sum(map(len, runs_of)) for runs_of in runs)
    if tuple(local.shape) != held:
        raise InvalidInputError(
            f"{where} is a DTensor whose local tensor has shape {tuple(local.shape)}, where its placements "
            f"{tensor.placements} give {held}: redistribute it first",
            name=where,
        )
    same = ranks[tuple(select)] if holders is None else _over_slices(mesh, select)
    replicas = tuple(sorted(int(r) for r in same.flatten().tolist() if holders is None or r in holders))
    return LocalShards(
        shape=shape,
        boxes=tuple(_boxes(local.detach(), runs)),
        replicas=replicas if len(replicas) > 1 and local.numel() else (),
    )


def _over_slices(mesh: Any, select: Sequence[Any]) -> torch.Tensor:
    """The ranks at the selected places of the mesh and of every other slice of the mesh that it was cut from."""
    root = mesh._get_root_mesh()
    names, own = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
    whole: torch.Tensor = root.mesh
    if root is mesh or not set(own) <= set(names):
        return mesh.mesh[tuple(select)]  # type: ignore[no-any-return]  # DeviceMesh has no types
    place: list[Any] = [slice(None)] * whole.dim()
    for name, at in zip(own, select, strict=True):
        place[names.index(name)] = at
    return whole[tuple(place)]


def _split_order(tensor: Any) -> list[int]:
    """The mesh dimensions in the order in which they split the tensor: left to right, unless it says otherwise."""
    order = [dim for entry in getattr(tensor._spec, "shard_order", None) or () for dim in entry.mesh_dims]
    return order + [dim for dim in range(len(tensor.placements)) if dim not in order]


def _take(runs: list[range], parts: int, at: int, split: int) -> list[range]:
    """Part `at` of each of `split` parts of the listed indices, as torch.chunk cuts; adjacent runs are joined."""
    length = sum(map(len, runs))
    taken: list[range] = []
    for whole in (_chunk(0, length, split, n) for n in range(split)):
        part = _chunk(whole.start, len(whole), parts, at)
        start = 0
        for run in runs:
            lo, hi = max(part.start, start), min(part.stop, start + len(run))
            if lo < hi:
                found = run[lo - start : hi - start]
                if taken and taken[-1].stop == found.start:
                    found = range(taken.pop().start, found.stop)
                taken.append(found)
            start += len(run)
    return taken or [range(runs[-1].stop, runs[-1].stop)]


def _chunk(start: int, length: int, parts: int, at: int) -> range:
    step = -(-length // parts)
    return range(start + min(step * at, length), start + min(step * (at + 1), length))


def _boxes(local: torch.Tensor, runs: list[list[range]]) -> Iterator[tuple[Box, torch.Tensor]]:
    """One box for each choice of a run on each dimension, with its part of the local tensor."""
    starts = [list(accumulate(map(len, runs_of), initial=0)) for runs_of in runs]
    for chosen in product(*(range(len(runs_of)) for runs_of in runs)):
        view = local
        for axis, n in enumerate(chosen):
            if len(runs[axis]) > 1:
                view = view.narrow(axis, starts[axis][n], len(runs[axis][n]))
        held = [runs_of[n] for runs_of, n in zip(runs, chosen, strict=True)]
        yield Box(offset=tuple(r.start for r in held), shape=tuple(map(len, held))), view


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
