"""Save a torch.distributed.checkpoint (DCP) state as an ordinary checkpoint of a run.

One save is one attempt of a run with the roster {role: world}. Nothing is exchanged but through DCP's own
gather and scatter: the coordinator chooses the attempt when it sees all plans, every rank writes its chunks,
values travel back with the write results, and the coordinator commits. So whatever torch's planners decide
holds, and whatever ckptstore promises of a commit. What maps to what: docs/how-to/torch-dcp.md.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint import planner as pl
from torch.distributed.checkpoint import storage
from torch.futures import Future

from ckptstore.errors import CkptStoreError, FencedError, InvalidInputError
from ckptstore.history import History
from ckptstore.incarnation import PROCESS_JOB, Incarnation, begin
from ckptstore.interop.dcp_items import Item, resolve
from ckptstore.interop.dcp_member import DcpMember, Ticket, take_ticket
from ckptstore.interop.dcp_names import nest, step_of
from ckptstore.manifest import AttemptId
from ckptstore.skeleton import escape
from ckptstore.store.base import Store, open_store

COMMIT_TIMEOUT_S = (
    60.0  # all ranks have said that their parts are durable: a part not seen by now is elsewhere
)


class StorageWriter(storage.StorageWriter):
    """`torch.distributed.checkpoint.save(state, storage_writer=StorageWriter(url))`: the next checkpoint of the run.

    The step is `step`, else the number in which `checkpoint_id` ends (`step-100`), else one more than the
    newest checkpoint's (1 in a new run). Without `url` the run is the folder of `checkpoint_id`. When the
    call returns, the checkpoint is committed; when it raises, the one before stands.

    A writer is one incarnation of the run, begun at its first save and released by `close`, or when the writer
    is collected or its process ends; keep it for the run. `resume`, `takeover`, `job` and `storage_options` are
    those of `begin`. `overwrite=False` refuses a step that has a good checkpoint; otherwise it gets another
    one, which is the one that is read from then on.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        role: str = "trainer",
        overwrite: bool = True,
        resume: str | int = "auto",
        takeover: bool = False,
        job: str | None = None,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.url = None if url is None else os.fspath(url)
        self.step = step
        self.role = role
        self.overwrite = overwrite
        self.resume = resume
        self.takeover = takeover
        self.job = job if job is not None else PROCESS_JOB  # travels with a copy to another process
        self.commit_timeout_s = commit_timeout_s
        self.storage_options = storage_options
        self._id: str | None = None
        self._save_id = secrets.token_hex(8)
        self._forget()

    def _forget(self) -> None:
        self._rank = 0
        self._incarnation: Incarnation | None = None
        self._release: weakref.finalize[[Incarnation], StorageWriter] | None = None
        self._member: DcpMember | None = None
        self._tries: dict[int, int] = {}
        self._ticket: Ticket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For DCP's process executor: all but the incarnation, which the other process begins anew as the same job."""
        copy = StorageWriter.__new__(StorageWriter)
        copy.__dict__.update(self.__dict__)
        copy._forget()
        return copy.__dict__

    # -- all ranks

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._save_id = secrets.token_hex(8)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None

    @property
    def checkpoint_id(self) -> str | None:
        return self._id

    @property
    def saved_step(self) -> int:
        """The step of the newest save that this writer planned as coordinator."""
        if self._ticket is None:
            raise InvalidInputError("this writer has coordinated no save: ask the coordinator's")
        return self._ticket.attempt.step

    def storage_meta(self) -> md.StorageMeta:
        return md.StorageMeta(checkpoint_id=self._id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank") or 0)
        if not kwargs.get("use_collectives", True):
            raise InvalidInputError(
                "use_collectives=False makes one checkpoint a rank, and a run has one for all ranks: leave it out"
            )

    def prepare_local_plan(self, plan: pl.SavePlan) -> pl.SavePlan:
        return plan

    def write_data(self, plan: pl.SavePlan, planner: pl.SavePlanner) -> Future[list[storage.WriteResult]]:
        ticket = take_ticket(self._run_url(), self.role, self._rank)
        member = self._join(ticket)
        try:
            items = resolve(plan, planner, role=self.role, rank=self._rank)
            member.write_chunks(ticket.attempt, items)
            if not ticket.commits:
                member.write_part(ticket.attempt, {"d": []})
        except (
            Exception
        ) as error:  # whatever it was: torch tells all ranks, and the journal tells everyone else
            member.give_up(ticket.attempt, error)
            raise
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result([_result(item) for item in items])
        return done

    # -- the coordinator

    def prepare_global_plan(self, plans: list[pl.SavePlan]) -> list[pl.SavePlan]:
        incarnation = self._begin(len(plans))
        history = incarnation.journal.catch_up()
        step = self._choose_step(history)
        number = self._tries.get(step, 0)
        self._tries[step] = number + 1
        attempt = AttemptId(fence=incarnation.fence, step=step, number=number)
        tickets = [
            Ticket(
                url=self._run_url(),
                role=self.role,
                rank=rank,
                token=incarnation.token,
                attempt=attempt,
                commits=rank == self._rank,
            )
            for rank in range(len(plans))
        ]
        self._ticket = tickets[self._rank]
        self._ticket.arrive()  # to ourselves nothing is sent when there is no process group
        return [
            dataclasses.replace(plan, storage_data=ticket)
            for plan, ticket in zip(plans, tickets, strict=True)
        ]

    def finish(self, metadata: md.Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Write the coordinator's part, with the state of all ranks, and commit; durable on return."""
        ticket = self._ticket
        if ticket is None:
            raise InvalidInputError("finish was called before prepare_global_plan: call dcp.save")
        member = self._join(ticket)
        try:
            skeleton = _skeleton(metadata, [result for rank in results for result in rank])
            member.write_part(ticket.attempt, skeleton)
        except Exception as error:
            member.give_up(ticket.attempt, error)
            raise
        member.commit(ticket.attempt, self.commit_timeout_s)
        metadata.storage_data = {r.index: str(ticket.attempt) for rank in results for r in rank}
        metadata.storage_meta = self.storage_meta()

    def close(self) -> None:
        """End the incarnation, so that the next job need not wait for its sign of life to stop."""
        held, self._incarnation = self._incarnation, None
        if held is not None:
            held.close()

    def __enter__(self) -> StorageWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _run_url(self) -> str:
        if self.url is not None:
            return self.url
        if self._id is None or not os.path.dirname(self._id.rstrip("/")):
            raise InvalidInputError(
                "there is no run to save to: give StorageWriter a url, or a checkpoint_id such as folder/step-100"
            )
        return os.path.dirname(self._id.rstrip("/"))

    def _store(self) -> Store:
        return open_store(self._run_url(), self.storage_options)

    def _join(self, ticket: Ticket) -> DcpMember:
        member = self._member
        if member is None or member.token != ticket.token:
            store = self._incarnation.store if self._incarnation is not None else self._store()
            member = DcpMember.join(ticket, store)
            self._member = member
        return member

    def _begin(self, world: int) -> Incarnation:
        """The incarnation that saves of this world belong to, begun if there is none.

        One that another process of this very job fenced off (torch's checkpoint process) is taken back; one
        that another job fenced off never.
        """
        held = self._incarnation
        if held is not None and held.url != self._store().url:
            held = None
        if held is not None:
            history = held.journal.catch_up()
            if history.fence == held.fence and held.roster.size(self.role) == world:
                return held
            newest = history.fold.fences[history.fence]
            if newest.job != self.job:
                raise FencedError(
                    f"cannot save to {held.url}: this writer holds fence {held.fence} but the run is at fence "
                    f"{history.fence}; exit without retrying, the job that raised it will resume",
                    step=None,
                    held=held.fence,
                    current=history.fence,
                )
        if self._release is not None:
            self._release()
        incarnation = begin(
            self._run_url(),
            {self.role: world},
            resume=self.resume if held is None else "auto",
            takeover=self.takeover,
            job=self.job,
            committer=(self.role, self._rank),
            storage_options=self.storage_options,
        )
        self._tries = {}
        self._incarnation = incarnation
        self._release = weakref.finalize(self, _close, incarnation)
        return incarnation

    def _choose_step(self, history: History) -> int:
        step = self.step
        if step is None and self._id is not None:
            step = step_of(self._id)
            if step is None:
                raise InvalidInputError(
                    f"checkpoint_id {self._id!r} names no step: end it in the step's number, such as step-100, or "
                    f"pass step= to StorageWriter",
                    checkpoint_id=self._id,
                )
        good = history.good()
        if step is None:
            step = good[-1].step + 1 if good else 1
        newest = history.newest_commit(history.fence)
        if newest is not None and step < newest.step:
            raise InvalidInputError(
                f"step {step} after step {newest.step}: one writer's steps never decrease; make a new StorageWriter "
                f"to go on from an older checkpoint",
                step=step,
            )
        if not self.overwrite and any(id.step == step for id in good):
            raise InvalidInputError(
                f"step {step} has a checkpoint and overwrite=False: save another step, or allow it", step=step
            )
        return step


def _close(incarnation: Incarnation) -> None:
    with suppress(CkptStoreError):  # a fence that is not released only lets the next job wait
        incarnation.close()


def _result(item: Item) -> storage.WriteResult:
    return storage.WriteResult(index=item.index, size_in_bytes=item.nbytes, storage_data=item.value)


def _skeleton(metadata: md.Metadata, results: Sequence[storage.WriteResult]) -> Any:
    """The state of all ranks: tensors by name, values as the ranks encoded them, nested by the planner's paths."""
    paths = metadata.planner_data if metadata.planner_data is not None else {}
    if not isinstance(paths, Mapping):
        raise InvalidInputError(
            f"the planner's planner_data is a {type(paths).__name__}, which cannot be stored: only the paths of "
            f"flattened names are"
        )
    values = {result.index.fqn: result.storage_data for result in results if result.storage_data is not None}
    nodes: dict[str, Any] = {}
    for fqn, kind in metadata.state_dict_metadata.items():
        tensor = isinstance(kind, md.TensorStorageMetadata)
        nodes[fqn] = {"T": escape(fqn)} if tensor else values[fqn]["value"]
    return nest(nodes, paths)
