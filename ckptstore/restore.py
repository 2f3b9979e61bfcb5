"""Restore one member's state from a checkpoint, whatever number of ranks saved it.

What is asked for is fitted onto what was saved before anything is touched; then chunks are read,
verified and put in place. What replaces what: docs/explanation/restore.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptstore.binding import Binding
from ckptstore.catalog import read_part
from ckptstore.clock import Clock
from ckptstore.commit import read_index
from ckptstore.errors import CkptStoreError, CorruptError, NotFoundError
from ckptstore.history import History, MarkEntry
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Index, Member, ObjectRef
from ckptstore.reader import read_leaves
from ckptstore.skeleton import union
from ckptstore.store.base import Store
from ckptstore.tied import join_tied

T = TypeVar("T")

SECOND_READ_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did. `unasked`: saved names that the target did not ask for; `skipped`: asked for, not saved."""

    step: int
    checkpoint: str
    duration_s: float
    nbytes: int
    nbytes_read: int
    unasked: tuple[str, ...]
    skipped: tuple[str, ...]
    per_rank_not_given_back: tuple[str, ...]


def restore_member(
    store: Store,
    ref: ObjectRef,
    member: Member,
    *,
    size: int,
    state: dict[str, Any],
    strict: bool,
    clock: Clock,
) -> tuple[Index, RestoreReport]:
    """Fill `state` in place for `member`, one of `size` ranks of its role, from the checkpoint of index `ref`.

    Raises what `Checkpointer.restore` documents; marks nothing.
    """
    started = clock.monotonic()
    index = _twice(clock, lambda: read_index(store, ref))
    stored = {spec.name: spec for spec in index.table.tensors}
    binding = _twice(clock, lambda: _fit(store, index, member, size, state))
    binding.check_specs(stored)
    binding.refuse(strict=strict)
    leaves, unequal = join_tied(store, index.table, binding.present(stored))
    binding.mismatched += unequal
    binding.refuse(strict=strict)
    read = read_leaves(store, index.table, leaves)
    binding.apply()
    return index, RestoreReport(
        step=index.id.step,
        checkpoint=str(index.id),
        duration_s=clock.monotonic() - started,
        nbytes=read.nbytes_wanted,
        nbytes_read=read.nbytes_read,
        unasked=tuple(sorted(binding.unasked)),
        skipped=tuple(binding.missing),
        per_rank_not_given_back=tuple(binding.not_given_back),
    )


def _twice(clock: Clock, read: Callable[[], T]) -> T:
    """What looks damaged or gone is read again before anybody believes it (chunks: `reader.py` does so)."""
    try:
        return read()
    except CorruptError:
        clock.sleep(SECOND_READ_S)
        return read()


def _fit(store: Store, index: Index, member: Member, size: int, state: dict[str, Any]) -> Binding:
    refs = {ref.member.rank: ref for ref in index.part_of(member.role)}
    if not refs:
        raise NotFoundError(
            f"checkpoint {index.id} has no role {member.role!r}, only {sorted({r.member.role for r in index.parts})}",
            role=member.role,
        )
    same = len(refs) == size
    mine = member.rank if same else min(refs)
    parts = [read_part(store, refs[mine]).state]
    binding = Binding(role=member.role, rank=member.rank, per_rank=same)
    binding.bind(state, parts[0])
    if (
        binding.missing and len(refs) > 1
    ):  # another rank may hold what this one's part lacks (pipeline stages)
        parts += [read_part(store, ref).state for n, ref in sorted(refs.items()) if n != mine]
        binding = Binding(role=member.role, rank=member.rank, per_rank=same)
        binding.bind(state, union(parts))
    return binding


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
