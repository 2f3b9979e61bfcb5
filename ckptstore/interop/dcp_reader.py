"""Load any checkpoint of a run through torch.distributed.checkpoint (DCP), resharding as torch's planners say.

A planner asks for boxes; which chunks hold them is a question to the chunk table (`plan/load.py`). So torch is
told of one chunk a tensor, the whole: its planner then has one item to plan for each box of a rank, however
finely the tensor is stored, and only the chunks that are touched are read, each verified.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as pl
from torch.distributed.checkpoint import storage
from torch.futures import Future

from ckptstore.catalog import Catalog, read_part, read_parts
from ckptstore.chunktable import ChunkTable
from ckptstore.errors import CorruptError, InvalidInputError, LayoutMismatchError, NotFoundError
from ckptstore.interop.dcp_names import Entry, dcp_layout, entries, step_of
from ckptstore.interop.torch_tensor import torch_dtype
from ckptstore.manifest import AttemptId, Index
from ckptstore.reader import read_leaves
from ckptstore.skeleton import union
from ckptstore.state import TensorLeaf, decode
from ckptstore.store.base import Store, open_store
from ckptstore.tensor import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One checkpoint, as a load sees it."""

    id: AttemptId
    table: ChunkTable
    specs: Mapping[str, TensorSpec]  # by stored name
    entries: Mapping[str, Entry]  # by dotted name


class StorageReader(storage.StorageReader):
    """`torch.distributed.checkpoint.load(state, storage_reader=StorageReader(url))`: the newest checkpoint of the run.

    Another one by `step`, or by a `checkpoint_id` that ends in its step (`step-100`); without `url` the run is
    the folder of `checkpoint_id`. Checkpoints of `Checkpointer.save` load as well. Nothing is written, and no
    stored byte is unpickled. CorruptError names tensor and segment of damage that was read twice.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        role: str = "trainer",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.url = None if url is None else os.fspath(url)
        self.step = step
        self.role = role
        self.storage_options = storage_options
        self._id: str | None = None
        self._opened: Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._opened = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None

    @property
    def checkpoint_id(self) -> str | None:
        return self._id

    def read_metadata(self, *args: Any, **options: Any) -> md.Metadata:
        """The items of the checkpoint; their paths as `planner_data`, its id as `storage_data` of each."""
        opened = self._opened = self._open(self._catalog().find(self._wanted_step()))
        items: dict[str, md.STORAGE_TYPES] = {}
        where: dict[md.MetadataIndex, str] = {}
        for fqn, entry in opened.entries.items():
            if not entry.is_tensor:
                items[fqn] = md.BytesStorageMetadata()
                where[md.MetadataIndex(fqn)] = str(opened.id)
                continue
            size = torch.Size(self._spec(opened, entry).shape)
            zeros = torch.Size([0] * len(size))
            items[fqn] = md.TensorStorageMetadata(
                properties=md.TensorProperties(dtype=torch_dtype(self._spec(opened, entry).dtype)),
                size=size,
                chunks=[md.ChunkStorageMetadata(offsets=zeros, sizes=size)],
            )
            where[md.MetadataIndex(fqn, zeros)] = str(opened.id)
        return md.Metadata(
            state_dict_metadata=items,
            planner_data={fqn: entry.path for fqn, entry in opened.entries.items()},
            storage_data=where,
            storage_meta=md.StorageMeta(checkpoint_id=self._id, load_id=str(opened.id)),
        )

    def set_up_storage_reader(
        self, metadata: md.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: pl.LoadPlan) -> pl.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[pl.LoadPlan]) -> list[pl.LoadPlan]:
        """All ranks read the coordinator's checkpoint: a new one may have been committed while they opened the run."""
        if self._opened is None:
            return plans
        return [dataclasses.replace(plan, storage_data=str(self._opened.id)) for plan in plans]

    def read_data(self, plan: pl.LoadPlan, planner: pl.LoadPlanner) -> Future[None]:
        opened = self._opened
        chosen = AttemptId.parse(plan.storage_data) if isinstance(plan.storage_data, str) else None
        if opened is None or (chosen is not None and chosen != opened.id):
            opened = self._open(chosen or self._catalog().find(self._wanted_step()))
        store = self._store()
        load = _Load(opened=opened, planner=planner, role=self.role, store=store)
        load.run(plan.items)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- inside

    def _store(self) -> Store:
        url = self.url
        if url is None:
            url = os.path.dirname((self._id or "").rstrip("/"))
        if not url:
            raise InvalidInputError(
                "there is no run to load from: give StorageReader a url, or a checkpoint_id such as folder/step-100"
            )
        return open_store(url, self.storage_options)

    def _catalog(self) -> Catalog:
        return Catalog(self._store()).open()

    def _wanted_step(self) -> int | None:
        if self.step is not None or self._id is None:
            return self.step
        step = step_of(self._id)
        if step is None:
            raise InvalidInputError(
                f"checkpoint_id {self._id!r} names no step: end it in the step's number, such as step-100, or pass "
                f"step= to StorageReader",
                checkpoint_id=self._id,
            )
        return step

    def _open(self, id: AttemptId) -> Opened:
        catalog = self._catalog()
        index = catalog.index(id)
        skeleton, planned_by_torch = self._skeleton(catalog.store, index)
        return Opened(
            id=id,
            table=index.table,
            specs={spec.name: spec for spec in index.table.tensors},
            entries=entries(skeleton, whole_objects=planned_by_torch),
        )

    def _skeleton(self, store: Store, index: Index) -> tuple[Any, bool]:
        refs = sorted(index.part_of(self.role), key=lambda ref: ref.member.rank)
        if not refs:
            roles = sorted({ref.member.role for ref in index.parts})
            raise NotFoundError(
                f"checkpoint {index.id} has no role {self.role!r}, only {', '.join(roles)}", role=self.role
            )
        first = read_part(store, refs[0])
        by_torch = first.layout == dcp_layout(self.role, index.id)
        if by_torch and first.state != {"d": []}:
            return first.state, True  # one part holds the state of all ranks, and nearly always the first
        parts = [first, *read_parts(store, refs[1:])]
        return union([part.state for part in parts], by_rank=True), by_torch

    def _spec(self, opened: Opened, entry: Entry) -> TensorSpec:
        name = f"{self.role}/{entry.node['T']}"
        if name not in opened.specs:
            raise CorruptError(
                f"the state of {opened.id} names {name}, of which the index has no chunk", tensor=name
            )
        return opened.specs[name]


class _Load:
    """One `read_data`: targets from the planner, one read of all chunks, then the planner is told."""

    def __init__(self, *, opened: Opened, planner: pl.LoadPlanner, role: str, store: Store) -> None:
        self.opened = opened
        self.planner = planner
        self.role = role
        self.store = store
        self.leaves: list[TensorLeaf] = []
        self.tensors: list[
            tuple[pl.ReadItem, torch.Tensor, torch.Tensor]
        ] = []  # item, target, what is read into
        self.values: list[tuple[pl.ReadItem, Any]] = []

    def run(self, items: Sequence[pl.ReadItem]) -> None:
        for item in items:
            entry = self.opened.entries.get(item.storage_index.fqn)
            if entry is None:
                raise NotFoundError(
                    f"checkpoint {self.opened.id} has no {item.storage_index.fqn}: it is not the one that the load was "
                    f"planned for; name a step",
                    name=item.storage_index.fqn,
                )
            if item.type == pl.LoadItemType.BYTE_IO:
                self.values.append((item, decode(entry.node, self._whole)))
            else:
                self._target(item, entry)
        read_leaves(self.store, self.opened.table, self.leaves)
        for item, target, read in self.tensors:
            if read is not target:
                target.copy_(read)
            self.planner.commit_tensor(item, target)
        for item, value in self.values:
            packed = io.BytesIO()
            torch.save(value, packed)  # of our own making: planners take a value only in this wrapping
            packed.seek(0)
            self.planner.load_bytes(item, packed)

    def _target(self, item: pl.ReadItem, entry: Entry) -> None:
        fqn = item.storage_index.fqn
        spec = self.opened.specs.get(f"{self.role}/{entry.node['T']}") if entry.is_tensor else None
        if spec is None:
            raise LayoutMismatchError(f"{fqn} was saved as a value, not as a tensor", name=fqn)
        target = self.planner.resolve_tensor(item).detach()
        shape = tuple(item.lengths)
        if tuple(target.shape) != shape:
            raise LayoutMismatchError(
                f"{fqn}: the planner asks for shape {shape} and gives a target of {tuple(target.shape)}",
                name=fqn,
            )
        origin = item.storage_index.offset or [0] * len(shape)
        box = Box(offset=tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True)), shape=shape)
        stored = torch_dtype(spec.dtype)
        read = target if target.dtype == stored else torch.empty(shape, dtype=stored)
        self.tensors.append((item, target, read))
        if box.numel:
            self.leaves.append(TensorLeaf(spec=spec, box=box, data=read, replicas=None, frozen=False))

    def _whole(self, name: str, numpy: bool) -> Any:
        """A tensor or array within a value."""
        spec = self.opened.specs[f"{self.role}/{name}"]
        data: Any
        if numpy:
            data = np.empty(spec.shape, np.dtype(spec.dtype))
        else:
            data = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        self.leaves.append(
            TensorLeaf(spec=spec, box=Box.whole(spec.shape), data=data, replicas=None, frozen=False)
        )
        return data
