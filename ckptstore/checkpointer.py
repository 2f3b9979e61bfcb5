"""Save and restore one member's state.

`save` returns once the state is copied; writing, committing and learning the outcome go on in one
background thread. `restore` fills the caller's tensors in place from the incarnation's recovery point,
whatever number of ranks saved it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckptstore.binding import Binding
from ckptstore.catalog import checkpoint_info, read_part
from ckptstore.clock import Clock, SystemClock
from ckptstore.commit import COMMIT_TIMEOUT_S, Committer, read_index
from ckptstore.contribution import Contributor
from ckptstore.errors import CkptStoreError, CorruptError, InvalidInputError, NotFoundError
from ckptstore.history import History, MarkEntry
from ckptstore.incarnation import Incarnation, Token, begin
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, CheckpointInfo, Index, Member, Part
from ckptstore.reader import read_leaves
from ckptstore.skeleton import union
from ckptstore.store.base import Store, open_store
from ckptstore.writer import Baseline

Phase = Callable[[str, int], None]


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


class SaveHandle:
    """One save under way. Waiting for it raises its failure."""

    def __init__(self, attempt: AttemptId) -> None:
        self.attempt = attempt
        self.step = attempt.step
        self._written = threading.Event()
        self._done: Future[CheckpointInfo] = Future()
        self._told = False

    def written(self, timeout_s: float = 600.0) -> None:
        """Return once this member's part is durable. Raises the save's failure, or TimeoutError."""
        if not self._written.wait(timeout_s):
            raise TimeoutError(f"step {self.step}: this member's part is not durable after {timeout_s:g} s")
        if self._done.done() and self._done.exception() is not None and not self._part_durable:
            self.result(0)

    _part_durable = False

    def result(self, timeout_s: float = 600.0) -> CheckpointInfo:
        """The committed checkpoint. Raises IncompleteSaveError or InconsistentCutError (abandoned), FencedError,
        OutcomeUnknownError, or TimeoutError while the attempt is still open."""
        try:
            info = self._done.result(timeout_s)
        except FutureTimeoutError:
            if self._done.done():
                self._told = True
                raise
            raise TimeoutError(f"step {self.step} is still being saved after {timeout_s:g} s") from None
        except BaseException:
            self._told = True
            raise
        return info

    def done(self) -> bool:
        """Is the outcome known, one way or the other?"""
        return self._done.done()


class Checkpointer:
    """Saves and restores for one member. Not for use by several threads at once.

    `inc` is the Incarnation, or its token in any other process. `commit_timeout_s` bounds how long the
    committer waits for other members' parts. `on_phase(phase, step)` is told, from the background thread,
    of "segments_written", "part_written" and "committed".
    """

    def __init__(
        self,
        inc: Incarnation | str,
        *,
        role: str,
        rank: int,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        on_phase: Phase | None = None,
    ) -> None:
        self._token = Token.parse(inc) if isinstance(inc, str) else inc._token
        self._member = Member(role=role, rank=rank)
        size = self._token.roster.size(role)
        if rank >= size:
            raise InvalidInputError(
                f"{self._member} is not in the roster {dict(self._token.roster.roles)}: begin with one that has it",
                role=role,
                rank=rank,
            )
        self._store: Store = (
            open_store(self._token.url, storage_options) if isinstance(inc, str) else inc.store
        )
        self._clock = clock if clock is not None else SystemClock()
        self._journal = Journal(self._store, clock=self._clock, by=str(self._member))
        self._commit_timeout_s = commit_timeout_s
        self._on_phase = on_phase
        self._owned: Incarnation | None = None
        committer = None
        if self._member == self._token.committer:
            committer = Committer(
                store=self._store,
                journal=self._journal,
                fence=self._token.fence,
                members=self._token.roster.members,
                leader=self._token.roster.roles[0][0],
            )
        self._contributor = Contributor(
            token=self._token,
            member=self._member,
            store=self._store,
            journal=self._journal,
            size=size,
            committer=committer,
        )
        self._stopping = threading.Event()
        self._handle: SaveHandle | None = None
        self._counts: dict[int, int] = {}
        self._last_step: int | None = None
        self._baseline: Baseline | None = None
        self._closed = False
        self.last_restore: RestoreReport | None = None

    @classmethod
    def from_distributed(
        cls, url: str | os.PathLike[str], group: Any = None, *, role: str = "trainer", **options: Any
    ) -> Checkpointer:
        """Begin on rank 0 of a torch.distributed group, hand the token to the others. All ranks call this.

        `resume=`, `takeover=`, `job=` and `storage_options=` go to `begin`, the rest to the Checkpointer.
        """
        import torch.distributed as dist

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        begins = {k: options.pop(k) for k in ("resume", "takeover", "job") if k in options}
        message: list[Any] = [None, None]
        owned = None
        if rank == 0:
            try:
                owned = begin(
                    url,
                    {role: size},
                    storage_options=options.get("storage_options"),
                    clock=options.get("clock"),
                    **begins,
                )
                message = [owned.token, None]
            except CkptStoreError as error:
                message = [None, error]
        source = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(message, src=source, group=group)
        if message[1] is not None:
            raise message[1]
        made = cls(message[0], role=role, rank=rank, **options)
        made._owned = owned
        return made

    @property
    def token(self) -> str:
        return str(self._token)

    @property
    def step(self) -> int | None:
        """The step that `restore` gives; None on a fresh start."""
        id = self._token.origin.checkpoint
        return None if id is None else id.step

    # -- save

    def save(self, step: int, state: dict[str, Any], *, policy_version: int | None = None) -> SaveHandle:
        """Copy the state and return; a handle tells when it is durable (`written`) and committed (`result`).

        One save may be in flight: a second waits for it and raises its failure first. Every member of the
        roster must save the same steps in the same order. InvalidInputError (the state's path is named)
        changes nothing.
        """
        self._check_open()
        if step < 0 or (self._last_step is not None and step < self._last_step):
            raise InvalidInputError(
                f"step {step} after step {self._last_step}: under one fence steps never decrease; begin anew",
                step=step,
            )
        number = self._counts.get(step, 0)
        self._counts[step] = number + 1  # taken on entry, before anything can fail (protocol R1)
        self._settle_previous(self._commit_timeout_s * 2)
        handle = SaveHandle(AttemptId(fence=self._token.fence, step=step, number=number))
        staged = self._contributor.stage(handle.attempt, state, self._baseline)
        self._last_step = step
        self._handle = handle
        # A daemon thread, one at a time: a process that crashes without closing must not wait for other ranks.
        threading.Thread(
            target=self._run,
            args=(handle, staged, policy_version),
            name=f"ckptstore-{self._member.file}",
            daemon=True,
        ).start()
        return handle

    def _run(self, handle: SaveHandle, staged: Any, policy_version: int | None) -> None:
        def written() -> None:
            handle._part_durable = True
            handle._written.set()

        try:
            part = self._contributor.contribute(
                staged,
                policy_version=policy_version,
                timeout_s=self._commit_timeout_s,
                phase=lambda name: self._tell(name, handle.step),
                stop=self._stopping.is_set,
                written=written,
            )
            self._remember(handle.attempt, part)
            info = checkpoint_info(self._journal.catch_up(), handle.attempt)
        except (
            BaseException
        ) as error:  # whatever it was, it reaches the caller at result(), save() or close()
            self._baseline = None
            handle._done.set_exception(error)
        else:
            handle._done.set_result(info)
        finally:
            handle._written.set()

    def _remember(self, attempt: AttemptId, part: Part) -> None:
        self._baseline = Baseline.of(attempt, part.table, part.segments)

    def _tell(self, phase: str, step: int) -> None:
        if self._on_phase is not None:
            self._on_phase(phase, step)

    def _settle_previous(self, timeout_s: float) -> None:
        handle, self._handle = self._handle, None
        if handle is None or handle._told:
            return
        try:
            handle.result(timeout_s)
        except TimeoutError:
            if not handle.done():
                self._handle = handle
            raise

    # -- restore

    def restore(self, state: dict[str, Any], *, strict: bool = True) -> int | None:
        """Fill `state` in place from the incarnation's recovery point and return its step; None on a fresh start.

        Tensors are written in place, other leaves replaced in their containers. What is asked for and
        missing, or saved as another kind, dtype or shape, is raised in one error that lists all of it,
        before any target is changed; `strict=False` skips what is missing and lists it in
        `last_restore`. CorruptError: damaged data, read twice, now marked bad in the journal, so that
        the next incarnation restores an older checkpoint; the targets must not be used.
        """
        self._check_open()
        origin = self._token.origin.checkpoint
        if origin is None:
            return None
        if self._last_step is not None:
            raise InvalidInputError(
                "restore after a save: restore once, before the first save (begin anew to go back)"
            )
        started = self._clock.monotonic()
        history = self._journal.catch_up(self._token.slot + 1)
        try:
            index = read_index(self._store, history.fold.commits[origin].index)
            report = self._fill(index, state, strict)
        except CorruptError as error:
            self._mark_bad(origin, error)
            raise
        binding, read = report
        self._baseline = Baseline.of(origin, index.table, index.segments)
        self.last_restore = RestoreReport(
            step=origin.step,
            checkpoint=str(origin),
            duration_s=self._clock.monotonic() - started,
            nbytes=read.nbytes_wanted,
            nbytes_read=read.nbytes_read,
            unasked=tuple(sorted(binding.unasked)),
            skipped=tuple(binding.missing),
            per_rank_not_given_back=tuple(binding.not_given_back),
        )
        return origin.step

    def _fill(self, index: Index, state: dict[str, Any], strict: bool) -> tuple[Binding, Any]:
        role, rank = self._member.role, self._member.rank
        refs = {ref.member.rank: ref for ref in index.part_of(role)}
        if not refs:
            raise NotFoundError(
                f"checkpoint {index.id} has no role {role!r}, only {sorted({r.member.role for r in index.parts})}",
                role=role,
            )
        same = len(refs) == self._token.roster.size(role)
        mine = rank if same else min(refs)
        parts = [read_part(self._store, refs[mine]).state]
        binding = Binding(role=role, rank=rank, per_rank=same)
        binding.bind(state, parts[0])
        if (
            binding.missing and len(refs) > 1
        ):  # another rank may hold what this one's part lacks (pipeline stages)
            parts += [read_part(self._store, ref).state for n, ref in sorted(refs.items()) if n != mine]
            binding = Binding(role=role, rank=rank, per_rank=same)
            binding.bind(state, union(parts))
        binding.check_specs({spec.name: spec for spec in index.table.tensors})
        if strict or binding.mismatched:
            binding.refuse()
        missing = set(binding.missing)
        read = read_leaves(
            self._store, index.table, [leaf for leaf in binding.leaves if leaf.spec.name not in missing]
        )
        binding.apply()
        return binding, read

    def _mark_bad(self, id: AttemptId, error: CorruptError) -> None:
        """The next incarnation passes over this checkpoint; ranks never choose apart (protocol R22)."""
        segment = error.values.get("segment")

        def decide(history: History) -> MarkEntry | None:
            if id in history.fold.bad or id not in history.live():
                return None
            return MarkEntry(
                kind="bad", id=id, segments=(segment,) if segment else (), reason=str(error)[:2000]
            )

        try:
            self._journal.append(decide)
        except CkptStoreError as second:
            error.add_note(f"and it could not be marked bad in the journal: {second}")

    # -- end

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for the save in flight and raise its failure; end the thread. Safe to call twice."""
        if self._closed:
            return
        try:
            self._settle_previous(timeout_s)
        finally:
            self._shut()
            if self._owned is not None:
                self._owned.close()

    def _shut(self) -> None:
        self._closed = True
        self._stopping.set()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._shut()  # leaving by an exception does not wait

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError(f"the Checkpointer of {self._member} is closed: make a new one")
