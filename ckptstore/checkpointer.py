"""Save and restore one member's state.

`save` returns once the state is copied; writing, committing and learning the outcome go on in one
background thread. `restore` fills the caller's tensors in place from the incarnation's recovery point,
whatever number of ranks saved it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Any

from ckptstore import errors
from ckptstore.baseline import Baseline
from ckptstore.catalog import checkpoint_info
from ckptstore.claim import claim
from ckptstore.clock import Clock, SystemClock
from ckptstore.commit import COMMIT_TIMEOUT_S, Committer
from ckptstore.contribution import Contributor
from ckptstore.errors import (
    CkptStoreError,
    CorruptError,
    InconsistentCutError,
    InvalidInputError,
)
from ckptstore.incarnation import Incarnation, Token, begin
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, Member, whole_number
from ckptstore.mapping import TensorMap
from ckptstore.plan.encode import REBASE_EVERY, CodecRules
from ckptstore.restore import RestoreReport, Sharing, agreed, mark_bad, restore_member
from ckptstore.savehandle import SaveHandle
from ckptstore.store.base import Store, open_store

Phase = Callable[[str, int], None]
IN_FLIGHT = 2


class Checkpointer:
    """Saves and restores for one member. Not for use by several threads at once.

    `inc` is the Incarnation, or its token in any other process. `commit_timeout_s` bounds how long the
    committer waits for other members' parts. `check_replicas=False`, on all ranks of a role, takes no digests
    of replicas: a save does not notice that they differ. `memory_budget`: bytes that snapshots of this member may take
    (default: half of what the machine or the control group allows, and never so much that less than a sixteenth of it
    is left); a save waits for memory while earlier ones are written. `codec`: "raw", "auto" (encode where that makes
    saves faster), "zstd", "byteplane+zstd", "delta" (what changed since a checkpoint at most `rebase_every` before), or
    a mapping of dtypes and patterns of names to these (docs/explanation/codecs.md). `on_phase(phase, step)` is told,
    from the background thread, of "segments_written", "part_written" and "committed".
    """

    def __init__(
        self,
        inc: Incarnation | str,
        *,
        role: str,
        rank: int,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        check_replicas: bool = True,
        memory_budget: int | None = None,
        codec: str | Mapping[str, str] = "raw",
        rebase_every: int = REBASE_EVERY,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        on_phase: Phase | None = None,
    ) -> None:
        rules = CodecRules.of(codec, rebase_every)
        self._token = Token.parse(inc) if isinstance(inc, str) else inc._token
        self._member = Member(role=role, rank=whole_number(rank, "rank"))
        size = self._token.roster.size(role)
        if self._member.rank >= size:
            raise InvalidInputError(
                f"{self._member} is not in the roster {dict(self._token.roster.roles)}: begin with one that has it",
                role=role,
                rank=rank,
            )
        self._store: Store = (
            open_store(self._token.url, storage_options) if isinstance(inc, str) else inc.store
        )
        self._clock = clock if clock is not None else SystemClock()
        self._journal = Journal(
            self._store,
            clock=self._clock,
            by=str(self._member),
            run=self._token.run,
            known=self._token.slot + 1,
        )
        self._commit_timeout_s = commit_timeout_s
        self._on_phase = on_phase
        self._owned: Incarnation | None = None
        self._contributor = Contributor(
            token=self._token,
            member=self._member,
            store=self._store,
            journal=self._journal,
            size=size,
            committer=self._committer(),
            check_replicas=check_replicas,
            memory_budget=memory_budget,
            codec=rules,
        )
        self._stopping = threading.Event()
        self._handles: list[SaveHandle] = []  # in flight, or failed and not yet told
        self._pid = os.getpid()
        self._counts: dict[int, int] = {}
        self._last_step: int | None = None
        self._baseline: Baseline | None = None
        self._closed = False
        self._life: int | None = None
        self.last_restore: RestoreReport | None = None

    def _committer(self) -> Committer | None:
        if self._member != self._token.committer:
            return None
        return Committer(
            store=self._store,
            journal=self._journal,
            fence=self._token.fence,
            members=self._token.roster.members,
            leader=self._token.roster.roles[0][0],
        )

    @classmethod
    def from_distributed(
        cls, url: str | os.PathLike[str], group: Any = None, *, role: str = "trainer", **options: Any
    ) -> Checkpointer:
        """Begin on rank 0 of a torch.distributed group, hand the token to the others. All ranks call this.

        `resume=`, `takeover=`, `job=` and `storage_options=` go to `begin`, the rest to the Checkpointer.
        """
        import torch.distributed as dist

        from ckptstore.interop.torch_tensor import broadcast_json

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        begins = {k: options.pop(k) for k in ("resume", "takeover", "job") if k in options}
        message: dict[str, str] = {}
        owned, failure = None, None
        if rank == 0:
            try:
                owned = begin(
                    url,
                    {role: size},
                    storage_options=options.get("storage_options"),
                    clock=options.get("clock"),
                    **begins,
                )
                message = {"token": owned.token}
            except CkptStoreError as error:
                failure, message = error, {"error": type(error).__name__, "message": str(error)}
        message = broadcast_json(message, group)
        if failure is not None:
            raise failure
        if "error" in message:
            kind = getattr(errors, message["error"], CkptStoreError)
            raise kind(f"begin failed on rank 0: {message['message']}")
        made = cls(message["token"], role=role, rank=rank, **options)
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

    def _claim(self) -> None:
        """Once, before anything is restored or saved: a rank of the leading role has one life a fence."""
        if self._life is None:
            single = self._member.role == self._token.roster.roles[0][0]
            self._life = claim(self._store, self._clock, self._token.fence, self._member, single=single)

    # -- save

    def save(
        self, step: int, state: dict[str, Any], *, policy_version: int | None = None, lazy: bool = False
    ) -> SaveHandle:
        """Copy the state and return; a handle tells when it is durable (`written`) and committed (`result`).

        `lazy=True` returns before tensors are copied (all other values are captured now). They are copied beside
        the next forward and backward; the next step of any torch optimizer of this process waits for the rest, and
        so does `handle.wait_staged()`, to be called before anything else changes them. A tensor that was changed in
        place before it was copied makes the save fail; storages must not be resized meanwhile.

        Two saves may be in flight: a third waits for the first, and each raises the failures of those before it that
        are known by then. Every member of the roster must save the same steps in the same order. InvalidInputError
        (the state's path is named) changes nothing but that this attempt is given up, for the other members too.
        """
        self._check_open()
        step = whole_number(step, "step")
        if step < 0 or (self._last_step is not None and step < self._last_step):
            raise InvalidInputError(
                f"step {step} after step {self._last_step}: under one fence steps never decrease; begin anew",
                step=step,
            )
        number = self._counts.get(step, 0)
        self._counts[step] = number + 1  # taken on entry, before anything can fail (protocol R1)
        self._claim()
        self._settle_previous(self._commit_timeout_s * 2, most=IN_FLIGHT - 1)
        for before in self._handles:
            before.wait_staged(self._commit_timeout_s * 2)
        handle = SaveHandle(AttemptId(fence=self._token.fence, step=step, number=number))
        self._last_step = step
        try:
            if policy_version is not None:
                policy_version = whole_number(policy_version, "policy_version", first=0)
            staged, flat = self._contributor.begin(
                handle.attempt, state, self._baseline, timeout_s=self._commit_timeout_s * 2
            )
        except Exception as error:
            if len(self._token.roster.members) > 1:  # the others would wait for this part
                wait([before._done for before in self._handles], self._commit_timeout_s * 2)
                self._contributor.give_up(handle.attempt, error)
            raise
        # A daemon thread: a process that crashes without closing must not wait for other ranks.
        writer = threading.Thread(
            target=self._run,
            args=(handle, staged, policy_version),
            name=f"ckptstore-{self._member.file}",
            daemon=True,
        )
        handle._after = self._handles[-1] if self._handles else None
        self._handles.append(handle)
        writer.start()  # it takes blocks as they are staged
        try:
            if lazy:
                handle._staging = self._contributor.stage_lazily(staged, flat)
            else:
                self._contributor.stage(staged, flat)
        except BaseException as error:
            handle._told = True  # here and now; the writer gives the attempt up
            staged.snapshot.fail(error)  # also what came before the first block: an interrupt
            raise
        return handle

    def _run(self, handle: SaveHandle, staged: Any, policy_version: int | None) -> None:
        def written() -> None:
            handle._part_durable = True
            handle._written.set()

        try:
            if (
                handle._after is not None
            ):  # attempts are committed in order, and what the last one stored is reused
                wait([handle._after._done])
                handle._after = None
            self._baseline = self._contributor.contribute(
                staged,
                baseline=self._baseline,
                policy_version=policy_version,
                timeout_s=self._commit_timeout_s,
                phase=lambda name: self._tell(name, handle.step),
                stop=self._stopping.is_set,
                written=written,
                reserve=True,
            )
            info = checkpoint_info(self._journal.history, handle.attempt)
        except BaseException as error:
            # Whatever it was, it reaches the caller at result(), save() or close().
            if isinstance(error, InconsistentCutError):
                self._baseline = None  # perhaps nothing vouches for it any more: the next save writes in full
            handle._done.set_exception(error)
        else:
            handle._done.set_result(info)
        finally:
            handle._written.set()

    def _tell(self, phase: str, step: int) -> None:
        if self._on_phase is not None:
            self._on_phase(phase, step)

    def _settle_previous(self, timeout_s: float, *, most: int = 0) -> None:
        """Raise the failures of saves that have ended, and wait until at most `most` are in flight."""
        while self._handles and (len(self._handles) > most or self._handles[0].done()):
            handle = self._handles[0]
            if handle._told:
                wait([handle._done], timeout_s)
            try:
                if not handle._told:
                    handle.result(timeout_s)
            finally:
                if handle.done():
                    del self._handles[0]
            if not handle.done():
                raise TimeoutError(f"step {handle.step} is still being given up after {timeout_s:g} s")

    # -- restore

    def restore(
        self,
        state: dict[str, Any],
        *,
        strict: bool = True,
        mapping: TensorMap | None = None,
        share: Any = None,
        memory_budget: int | None = None,
    ) -> int | None:
        """Fill `state` in place from the incarnation's recovery point and return its step; None on a fresh start.

        Tensors are written in place, other leaves replaced in their containers. What is asked for and
        missing, or saved as another kind, dtype or shape, is raised in one error that lists all of it,
        before any target is changed; `strict=False` skips what is missing and lists it in
        `last_restore`. `mapping` makes the state's tensors of those of a checkpoint that was saved under other
        names or in other arrangements (docs/how-to/mappings.md). CorruptError: damaged data, read twice, now
        marked bad in the journal, so that the next incarnation restores an older checkpoint; the targets must
        not be used.

        `share`: a torch.distributed process group, or True for the default one, all of whose ranks restore now. Then
        each stored byte is read by one of them and handed on; if one fails, all raise. Collective.

        `memory_budget`: bytes that reading may take besides the targets (default: 256 MiB, or what its largest chunk
        needs); BudgetExceededError before anything is changed if one chunk needs more.
        """
        together: Sharing | None = None
        if share is not None and share is not False:
            from ckptstore.interop.torch_share import Together

            together = Together(None if share is True else share)
        origin = agreed(together, self._check_restore)
        if origin is None:
            return None
        try:
            restored, self.last_restore = restore_member(
                self._store,
                self._journal.history.fold.commits[origin].index,
                self._member,
                size=self._token.roster.size(self._member.role),
                state=state,
                strict=strict,
                clock=self._clock,
                mapping=mapping,
                together=together,
                memory_budget=memory_budget,
            )
        except CorruptError as error:
            mark_bad(self._journal, origin, error)
            raise
        self._baseline = Baseline.of(origin, restored.table, restored.index.segments)
        return origin.step

    def _check_restore(self) -> AttemptId | None:
        """The checkpoint to restore, after all that must hold before; None on a fresh start."""
        self._check_open()
        origin = self._token.origin.checkpoint
        if origin is None:
            return None
        if self._last_step is not None:
            raise InvalidInputError(
                "restore after a save: restore once, before the first save (begin anew to go back)"
            )
        self._claim()
        self._journal.catch_up()
        return origin

    # -- end

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for the save in flight and raise its failure; end the thread. Safe to call twice."""
        if self._closed:
            return
        self._contributor.memory.stop_reserving()
        try:
            self._settle_previous(timeout_s)
        finally:
            self._closed = True
            self._stopping.set()
            self._contributor.close()
            if self._owned is not None:
                self._owned.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True  # leaving by an exception does not wait; what is in flight may still land

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInputError(f"the Checkpointer of {self._member} is closed: make a new one")
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"the Checkpointer of {self._member} was made in process {self._pid} and this is its fork "
                f"{os.getpid()}: threads do not survive a fork, make a new one from the token",
                pid=self._pid,
            )
