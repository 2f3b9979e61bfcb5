"""Restore one member's state from a checkpoint, whatever number of ranks saved it.

What is asked for is fitted onto what was saved before anything is touched; then chunks are read,
verified and put in place. What replaces what: docs/explanation/restore.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ckptstore.binding import Binding
from ckptstore.catalog import read_part
from ckptstore.chunktable import ChunkTable
from ckptstore.clock import Clock
from ckptstore.errors import CkptStoreError, CorruptError, NotFoundError
from ckptstore.history import History, MarkEntry
from ckptstore.index import OpenIndex, open_index
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, ObjectRef, PartRef
from ckptstore.mapping import TensorMap
from ckptstore.reader import ReadReport, read_leaves
from ckptstore.skeleton import union
from ckptstore.state import TensorLeaf
from ckptstore.store.base import Store
from ckptstore.stored_leaves import find_unequal_scalars, stored_leaves
from ckptstore.tensor import TensorSpec
from ckptstore.tied import join_tied
from ckptstore.translation import Translation

T = TypeVar("T")

SECOND_READ_S = 0.5
PART_READERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did. `unasked`: saved names that the target did not ask for; `skipped`: asked for, not saved.

    With a mapping, names are those that it gives, and `untaken` are saved tensors that no rule took: they kept
    their names.
    """

    step: int
    checkpoint: str
    duration_s: float
    nbytes: int
    nbytes_read: int
    unasked: tuple[str, ...]
    skipped: tuple[str, ...]
    per_rank_not_given_back: tuple[str, ...]
    untaken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """What was read of the index: `table` has all rows of the tensors that the member wanted."""

    index: OpenIndex
    table: ChunkTable


class Sharing(Protocol):
    """The ranks that restore together: `interop.torch_share.Together`. Both calls are collective."""

    def agree(self, error: BaseException | None) -> None: ...

    def read(
        self,
        store: Store,
        table: ChunkTable,
        leaves: Sequence[TensorLeaf],
        *,
        memory_budget: int | None = None,
    ) -> ReadReport: ...


def agreed(together: Sharing | None, step: Callable[[], T]) -> T:
    """What `step` gives, once it has succeeded on all ranks that restore together; if it fails on one, all raise."""
    if together is None:
        return step()
    found: list[T] = []
    error: BaseException | None = None
    try:
        found.append(step())
    except Exception as failure:  # whatever it was, the others must hear of it
        error = failure
    together.agree(error)
    return found[0]


def restore_member(
    store: Store,
    ref: ObjectRef,
    member: Member,
    *,
    size: int,
    state: dict[str, Any],
    strict: bool,
    clock: Clock,
    mapping: TensorMap | None = None,
    together: Sharing | None = None,
    memory_budget: int | None = None,
) -> tuple[Restored, RestoreReport]:
    """Fill `state` in place for `member`, one of `size` ranks of its role, from the checkpoint of index `ref`.

    `memory_budget` bounds the bytes that reading takes besides the targets (None: what `read_leaves` takes).
    Raises what `Checkpointer.restore` documents; marks nothing.
    """
    started = clock.monotonic()
    fit = agreed(together, lambda: _prepare(store, ref, member, size, state, strict, clock, mapping))
    reader = read_leaves if together is None else together.read
    read = reader(store, fit.table, fit.leaves, memory_budget=memory_budget)
    fit.binding.apply()
    return Restored(index=fit.index, table=fit.table), RestoreReport(
        step=fit.index.id.step,
        checkpoint=str(fit.index.id),
        duration_s=clock.monotonic() - started,
        nbytes=read.nbytes_wanted,
        nbytes_read=read.nbytes_read,
        unasked=tuple(sorted(fit.binding.unasked)),
        skipped=tuple(fit.binding.missing),
        per_rank_not_given_back=tuple(fit.binding.not_given_back),
        untaken=fit.untaken,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fitted:
    """All that is known before the first target changes: everything fits, and where each chunk goes."""

    index: OpenIndex
    table: ChunkTable
    binding: Binding
    leaves: Sequence[TensorLeaf]
    untaken: tuple[str, ...]


def _prepare(
    store: Store,
    ref: ObjectRef,
    member: Member,
    size: int,
    state: dict[str, Any],
    strict: bool,
    clock: Clock,
    mapping: TensorMap | None,
) -> _Fitted:
    index = _twice(clock, lambda: open_index(store, ref))
    stored: Mapping[str, TensorSpec] = index.rows.tensors.by_name
    translation = None
    if mapping is None:
        binding = _twice(clock, lambda: _fit(store, index, member, size, state))
        binding.check_stored(index.rows.tensors)
    else:
        binding, translation = _twice(
            clock, lambda: _fit_translated(store, index, member, size, state, mapping)
        )
        stored = binding.check_translated(translation)
    binding.refuse(strict=strict)
    if translation is None:
        leaves = binding.leaves if not binding.missing else binding.present(stored)
        names = {leaf.spec.name for leaf in leaves}
    else:
        leaves = binding.present(stored)
        names = {name for leaf in leaves for name in translation.equals(leaf.spec.name)}
    table = _twice(clock, lambda: index.table(names))
    if translation is not None:
        binding.mismatched += find_unequal_scalars(store, table, translation, leaves)
        leaves = stored_leaves(table, translation, leaves)
    leaves, unequal = join_tied(store, table, leaves)
    binding.mismatched += unequal
    binding.refuse(strict=strict)
    untaken = translation.untaken if translation is not None else ()
    return _Fitted(index=index, table=table, binding=binding, leaves=leaves, untaken=untaken)


def _twice(clock: Clock, read: Callable[[], T]) -> T:
    """What looks damaged or gone is read again before anybody believes it (chunks: `reader.py` does so)."""
    try:
        return read()
    except CorruptError:
        clock.sleep(SECOND_READ_S)
        return read()


def _fit(store: Store, index: OpenIndex, member: Member, size: int, state: dict[str, Any]) -> Binding:
    refs, mine = _parts(index, member, size)
    same = len(refs) == size
    parts = [read_part(store, refs[mine]).state]
    binding = Binding(role=member.role, rank=member.rank, per_rank=same)
    binding.bind(state, parts[0])
    if (
        binding.missing and len(refs) > 1
    ):  # another rank may hold what this one's part lacks (pipeline stages)
        parts += _states(store, [ref for n, ref in sorted(refs.items()) if n != mine])
        binding = Binding(role=member.role, rank=member.rank, per_rank=same)
        binding.bind(state, union(parts))
    return binding


def _states(store: Store, refs: Sequence[PartRef]) -> list[Any]:
    """The states of these parts, in order; several at a time, since a far store makes each wait."""
    with ThreadPoolExecutor(max_workers=PART_READERS, thread_name_prefix="ckptstore-parts") as pool:
        return [part.state for part in pool.map(partial(read_part, store), refs)]


def _fit_translated(
    store: Store, index: OpenIndex, member: Member, size: int, state: dict[str, Any], mapping: TensorMap
) -> tuple[Binding, Translation]:
    """As `_fit`, onto the state under the mapping's names. One tensor may be made of what many ranks saved."""
    refs, mine = _parts(index, member, size)
    parts = _states(store, [refs[n] for n in sorted(refs, key=lambda n: (n != mine, n))])
    translation = Translation(mapping, union(parts), index.rows.tensors.by_name, role=member.role)
    binding = Binding(role=member.role, rank=member.rank, per_rank=len(refs) == size)
    binding.bind(state, translation.skeleton)
    return binding, translation


def _parts(index: OpenIndex, member: Member, size: int) -> tuple[dict[int, PartRef], int]:
    """The role's parts by rank, and which of them is this member's, or stands for it when their number changed."""
    refs = {ref.member.rank: ref for ref in index.part_of(member.role)}
    if not refs:
        raise NotFoundError(
            f"checkpoint {index.id} has no role {member.role!r}, only {sorted({r.member.role for r in index.parts})}",
            role=member.role,
        )
    return refs, member.rank if len(refs) == size else min(refs)


def mark_bad(journal: Journal, id: AttemptId, error: CorruptError) -> None:
    """Record that a checkpoint is damaged, so that the next incarnation passes over it (protocol R22).

    Called after a second read; a failure to record it is noted on `error`, which the caller raises.
    """
    segment = error.values.get("segment")

    def decide(history: History) -> MarkEntry | None:
        if id in history.fold.bad or id not in history.live():
            return None
        return MarkEntry(kind="bad", id=id, segments=(segment,) if segment else (), reason=str(error)[:2000])

    try:
        journal.append(decide)
    except CkptStoreError as second:
        error.add_note(f"and it could not be marked bad in the journal: {second}")
