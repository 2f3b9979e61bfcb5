"""The read side: open a run, list its checkpoints, read states, verify every byte.

Needs no incarnation and writes nothing. `read` gives full tensors to one process, whatever number of
ranks saved them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptstore.audit import audit_index, audit_segments
from ckptstore.catalog import RUN_KEY, Catalog, checkpoint_info, read_part
from ckptstore.chunktable import ChunkTable
from ckptstore.clock import Clock
from ckptstore.damage import Damage, find_damage
from ckptstore.errors import (
    BudgetExceededError,
    CorruptError,
    MissingTensorError,
    NotFoundError,
    UnsupportedFormatError,
)
from ckptstore.history import FenceEntry, History, PublishEntry, SummaryEntry
from ckptstore.index import read_index
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, CheckpointInfo, ObjectRef, Part, SegmentRef, journal_key
from ckptstore.mapping import TensorMap
from ckptstore.skeleton import prune, tensor_names, union
from ckptstore.state import TensorLeaf, decode
from ckptstore.store.base import Store, open_store
from ckptstore.stored_leaves import read_translated
from ckptstore.tensor import Box, TensorSpec
from ckptstore.translation import Translation
from ckptstore.wire import canonical, decode_entry, decode_run, digest_of, fold_to_json

if TYPE_CHECKING:
    import tensorstore

UNREADABLE = (CorruptError, NotFoundError, UnsupportedFormatError)  # an unavailable store is no damage


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was read and what is wrong. `ok` means that every byte that was checked is what was written."""

    checkpoints: tuple[CheckpointInfo, ...]
    damage: tuple[Damage, ...]
    nbytes: int
    chunks: int

    @property
    def ok(self) -> bool:
        return not self.damage


class Run:
    """One run, for reading. Every method looks at the journal anew."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    @property
    def url(self) -> str:
        return self.catalog.store.url

    @property
    def id(self) -> str:
        return self.catalog.journal.run or ""

    def checkpoints(self) -> list[CheckpointInfo]:
        """All live checkpoints, in the order in which they were committed."""
        return self.catalog.infos()

    def latest(self) -> CheckpointInfo | None:
        """The newest good checkpoint of the lineage (not the highest step); None when there is none."""
        history = self.catalog.history
        good = history.good()
        return checkpoint_info(history, good[-1]) if good else None

    def read(
        self,
        step: int | None = None,
        role: str = "trainer",
        names: str | Sequence[str] | None = None,
        *,
        mapping: TensorMap | None = None,
    ) -> dict[str, Any]:
        """The nested state of one role with full tensors, verified; of the newest checkpoint when `step` is None.

        `names`: glob patterns of dotted names; only what matches is read and given. PerRank values come
        as PerRank of a list, one item a rank. With a `mapping` the state comes, and `names` are meant, as if it had
        been saved under the names that it gives. NoCheckpointError, NotFoundError (no such role),
        MissingTensorError (no name matches), LayoutMismatchError (the mapping does not fit), CorruptError.
        """
        id = self.catalog.find(step)
        index = self.catalog.open_index(id)
        refs = sorted(index.part_of(role), key=lambda ref: ref.member.rank)
        if not refs:
            roles = sorted({ref.member.role for ref in index.parts})
            raise NotFoundError(f"checkpoint {id} has no role {role!r}, only {', '.join(roles)}", role=role)
        node = union([read_part(self.catalog.store, ref).state for ref in refs], by_rank=True)
        translation = Translation(
            mapping or TensorMap(stages=()), node, index.rows.tensors.by_name, role=role
        )
        node = translation.skeleton
        if names is not None:
            patterns = [names] if isinstance(names, str) else list(names)
            node = prune(node, lambda path: any(fnmatchcase(path, pattern) for pattern in patterns))
            if node is None:
                raise MissingTensorError(
                    f"no name of role {role!r} in checkpoint {id} matches {patterns}: list them with ckptstore show",
                    names=tuple(patterns),
                )
        found = {name: translation.spec(f"{role}/{name}") for name in tensor_names(node)}
        translation.refuse()
        table = index.table(n for name in found for n in translation.equals(f"{role}/{name}"))
        wanted: dict[str, TensorLeaf] = {}
        value = decode(node, lambda name, numpy: _allocate(found[name], numpy, wanted))
        read_translated(self.catalog.store, table, translation, list(wanted.values()))
        return dict(value)

    def tensor(
        self,
        name: str,
        step: int | None = None,
        role: str = "trainer",
        *,
        context: tensorstore.Context | None = None,
    ) -> tensorstore.TensorStore:
        """One tensor as a lazy array: slices of it read the chunks that they touch, verified, and nothing else.

        `name` is dotted, as `ckptstore show --tensors` lists it after the role and `/`. Packed float4 comes as
        uint8, two numbers a byte. A `context` with a cache_pool keeps chunks between reads; without one, a
        chunk of an irregular tiling may be read more than once by one slice. NoCheckpointError, MissingTensorError,
        InvalidInputError (tensorstore is not installed or lacks the dtype); CorruptError also when the array is read.
        """
        from ckptstore.interop.tensorstore import lazy_tensor

        id = self.catalog.find(step)
        index = self.catalog.open_index(id)
        spec = index.rows.tensors.by_name.get(f"{role}/{name}")
        if spec is None:
            prefix = f"{role}/"  # names are given without it, so suggest them without it
            own = [full.removeprefix(prefix) for full in index.rows.tensors.names if full.startswith(prefix)]
            near = get_close_matches(name.removeprefix(prefix), own, n=3)
            raise MissingTensorError(
                f"checkpoint {id} has no tensor {name!r} of role {role!r}"
                + (f" (near: {', '.join(near)})" if near else "")
                + ": list them with ckptstore show --tensors",
                names=(name,),
                role=role,
            )
        return lazy_tensor(self.catalog.store, index.table([spec.name]), spec, context=context)

    def verify(
        self,
        step: int | None = None,
        *,
        full: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> VerifyReport:
        """Read the journal and everything that the live checkpoints (or that of `step`) need, and compare all digests.

        That includes the publications that their cuts name and, without `step`, the one that is served now.

        With `full` also whether the objects fit together: segment headers, indexes against parts, coverage
        (`audit.py`). `progress(done, total)` counts bytes. Damage is reported by object and tensor, not raised;
        StoreUnavailableError is raised, since it says nothing about the bytes.
        """
        damage = _verify_journal(self.catalog)
        history = self.catalog.history
        ids = [self.catalog.find(step)] if step is not None else list(history.live())
        tables, segments = list[ChunkTable](), dict[str, SegmentRef]()
        indexes = {str(id): history.fold.commits[id].index for id in ids}
        indexes |= {str(p.id): p.index for p in _publications(history, ids, served=step is None)}
        for name, ref in indexes.items():
            damage += self._verify_index(name, ref, tables, segments, full=full)
        tables = _distinct(tables)
        total, done = sum(int(table.nbytes.sum()) for table in tables), [0]

        def count(nbytes: int) -> None:
            done[0] += nbytes
            progress(done[0], total)

        for table in tables:  # one by one: a tensor may have another shape in another checkpoint
            own = [segments.pop(key) for key in table.segments if key in segments]
            damage += find_damage(self.catalog.store, table, own, progress=count)
            if full:
                damage += audit_segments(self.catalog.store, own, table)
        return VerifyReport(
            checkpoints=tuple(checkpoint_info(history, id) for id in ids),
            damage=tuple(damage),
            nbytes=total,
            chunks=sum(map(len, tables)),
        )

    def _verify_index(
        self,
        name: str,
        at: ObjectRef,
        tables: list[ChunkTable],
        segments: dict[str, SegmentRef],
        *,
        full: bool,
    ) -> list[Damage]:
        try:
            index = read_index(self.catalog.store, at)
        except UNREADABLE as error:
            key = error.values.get("key") or error.values.get("what") or at.key  # one of its three objects
            return [Damage(key=str(key), tensor=None, problem=f"{name}: {error}")]
        tables.append(index.table)
        segments.update({ref.key: ref for ref in index.segments})
        damage, parts = list[Damage](), list[Part]()
        for ref in index.parts:
            try:
                parts.append(read_part(self.catalog.store, ref))
            except UNREADABLE as error:
                damage.append(Damage(key=ref.object.key, tensor=None, problem=f"{name}: {error}"))
        if full and not damage:
            damage += audit_index(index, parts, at.key)
        return damage


def _publications(history: History, ids: Sequence[AttemptId], *, served: bool) -> list[PublishEntry]:
    """The publications that the cuts of these checkpoints name, and the one that is served."""
    cuts = {history.fold.commits[id].publication for id in ids}
    found = [p for p in history.fold.publications if (p.number, p.digest) in cuts]
    now = history.served()
    return [*found, now] if served and now is not None else found


def _allocate(spec: TensorSpec | None, numpy: bool, wanted: dict[str, TensorLeaf]) -> Any:
    if spec is None:
        raise CorruptError("a state names a tensor that its chunk table lacks: run `ckptstore verify`")
    if spec.name in wanted:
        return wanted[spec.name].data
    data: Any
    try:
        if numpy:
            data = np.empty(spec.shape, np.dtype(spec.dtype))
        else:
            import torch

            from ckptstore.interop.torch_tensor import torch_dtype

            data = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    except (MemoryError, ValueError, RuntimeError) as error:
        raise BudgetExceededError(
            f"{spec.name} has {spec.nbytes} bytes, for which this process gets no memory: read less by names=, or "
            f"slices of it by run.tensor",
            tensor=spec.name,
            wanted_nbytes=spec.nbytes,
        ) from error
    wanted[spec.name] = TensorLeaf(
        spec=spec, box=Box.whole(spec.shape), data=data, replicas=None, frozen=False
    )
    return data


def _distinct(tables: Sequence[ChunkTable]) -> list[ChunkTable]:
    """The same tables with each stored chunk once, in the first that has it, however many share it."""
    seen: dict[str, npt.NDArray[np.int64]] = {}
    found = []
    for table in tables:
        order = np.argsort(table.segment, kind="stable")
        bounds = np.searchsorted(table.segment[order], np.arange(len(table.segments) + 1))
        new = np.ones(len(table), np.bool_)
        for n, key in enumerate(table.segments):
            rows = order[bounds[n] : bounds[n + 1]]
            known = seen.get(key, np.zeros(0, np.int64))
            new[rows] = ~np.isin(table.start[rows], known)
            seen[key] = np.union1d(known, table.start[rows])
        found.append(table.take(np.flatnonzero(new)))
    return found


def _verify_run(store: Store) -> list[Damage]:
    """`run.json` carries no digest, so it is compared with what slot 0 holds of it."""
    try:
        data = store.read(RUN_KEY)
        value = decode_run(data, RUN_KEY)
        key = journal_key(0)
        entry = decode_entry(store.read(key), key)
    except UNREADABLE as error:
        return [Damage(key=RUN_KEY, tensor=None, problem=str(error))]
    founding = entry.body.founding if isinstance(entry.body, FenceEntry) else None
    written = {**(founding or {}), "run": entry.run, "write": value.get("write")}
    if canonical(written) != data:
        return [Damage(key=RUN_KEY, tensor=None, problem=f"is not what {key} holds of it")]
    return []


def _verify_journal(catalog: Catalog) -> list[Damage]:
    """Replay every slot from the first one, and compare each summary with the fold of the slots below it."""
    journal = Journal(catalog.store, clock=catalog.journal.clock, by="verify")
    history, damage, prev = History(), _verify_run(catalog.store), ""
    for slot in range(catalog.history.slots):
        key = journal_key(slot)
        try:
            data = journal.store.read(key)
            entry = decode_entry(data, key)
            if entry.prev != prev:
                damage.append(Damage(key=key, tensor=None, problem="does not follow the entry before it"))
            if isinstance(entry.body, SummaryEntry) and entry.body.state != fold_to_json(history.fold):
                damage.append(Damage(key=key, tensor=None, problem="is not the fold of the slots below it"))
            history.apply(entry)
            prev = digest_of(data)
        except UNREADABLE as error:
            return [*damage, Damage(key=key, tensor=None, problem=str(error))]
    known = max((ref.key for ref in catalog.store.list("journal/")), default="")
    end = journal_key(catalog.history.slots)  # read after the listing: a running job may have appended
    if known > end:
        damage.append(Damage(key=end, tensor=None, problem=f"is missing, although {known} follows it"))
    return damage


def open(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Run:
    """Open a run for reading; writes nothing. NotFoundError (no run), UnsupportedFormatError, CorruptError."""
    return Run(Catalog(open_store(url, storage_options), clock=clock).open())
