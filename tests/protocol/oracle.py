"""What must hold of a run, told apart from the code that is meant to make it hold.

The oracle sees every object as it lands, reads the journal's entries as plain JSON, and keeps its own
account of fences, commits and abandoned attempts. It follows the words of the protocol, not `history.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ckptstore import commit as commit_module
from ckptstore import index as index_module
from ckptstore import journal as journal_module
from ckptstore.errors import (
    CkptStoreError,
    FencedError,
    IncompleteSaveError,
    InconsistentCutError,
    OutcomeUnknownError,
)
from ckptstore.history import Fold, History
from ckptstore.manifest import AttemptId, Index, ObjectRef
from ckptstore.wire import decode_entry, digest_of, fold_from_json

FROZEN = 7.0
UNSURE = (TimeoutError, OutcomeUnknownError)  # of a caller that knows no outcome, and says so


class BrokenPromiseError(AssertionError):
    """A promise of the protocol does not hold."""


class Objects(Protocol):
    def peek(self, key: str) -> bytes | None: ...


def need(condition: object, message: str) -> None:
    if not condition:
        raise BrokenPromiseError(message)


def code_of(attempt: AttemptId) -> float:
    """What every tensor of an attempt is filled with: it tells the attempt from all others."""
    return attempt.fence * 1e6 + attempt.step * 1e2 + attempt.number


@dataclass
class Oracle:
    """Feed it with `observe` and `told_*`, then ask `check`."""

    objects: Objects
    slots: int = 0
    fence: int = 0
    origins: dict[int, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)
    commits: dict[AttemptId, int] = field(default_factory=dict)
    indexes: dict[AttemptId, Index] = field(default_factory=dict)
    abandoned: set[AttemptId] = field(default_factory=set)
    refused: set[AttemptId] = field(default_factory=set)
    given_up: set[AttemptId] = field(default_factory=set)
    bad: set[AttemptId] = field(default_factory=set)
    rotten: set[str] = field(default_factory=set)
    publications: list[tuple[int, int, str, str]] = field(default_factory=list)
    numbers: dict[AttemptId, int | None] = field(default_factory=dict)
    prev: str = ""
    history: History = field(default_factory=History)
    saves: list[tuple[AttemptId, BaseException | None]] = field(default_factory=list)
    begins: list[tuple[str, int | BaseException]] = field(default_factory=list)
    published: list[tuple[AttemptId, BaseException | None]] = field(default_factory=list)

    # -- every object, as it lands

    def observe(self, key: str, data: bytes) -> None:
        if key.startswith("journal/"):
            self._entry(key, data)
        elif key.startswith("parts/"):
            part = commit_module.decode_part(data, key)
            if part.refused is not None:
                self.refused.add(part.id)
            for ref in part.segments:
                found = self.objects.peek(ref.key)
                need(
                    found is not None and len(found) == ref.nbytes,
                    f"{key} names {ref.key}, which is not whole",
                )
        elif key.startswith("index/") and not key.endswith((".tensors.parquet", ".segments.parquet")):
            self._whole(self._decode(data, key))

    def _entry(self, key: str, data: bytes) -> None:
        value = json.loads(data)
        kind, fence = value["kind"], value.get("fence")
        need(key == f"journal/{self.slots:020d}.json", f"{key} landed where slot {self.slots} is due")
        need(value["prev"] == self.prev, f"{key} does not follow the entry before it")
        every = journal_module.SUMMARY_EVERY
        summary = self.slots > 0 and self.slots % every == 0
        need((kind == "summary") == summary, f"{key} is for a summary, or is not, and holds a {kind}")
        need((kind == "fence") or self.slots, "slot 0 is no fence")
        if kind == "fence":
            self._fence(value)
        elif fence is not None:
            need(fence == self.fence, f"{kind} of fence {fence} landed after fence {self.fence}")
        if kind == "commit":
            self._commit(value)
        elif kind == "abandon":
            id = AttemptId.parse(value["id"])
            need(id not in self.commits, f"{id} was abandoned after its commit")
            need(id not in self.abandoned, f"{id} was abandoned twice")
            self.abandoned.add(id)
        elif kind == "publish":
            self._publish(value)
        elif kind == "bad":
            self.bad.add(AttemptId.parse(value["id"]))
            self.rotten.update(value["segments"])
        elif kind == "summary":
            told = fold_from_json(value["state"], key)
            truth = self.history.fold
            for name in Fold.__dataclass_fields__:
                kept = getattr(truth, name)
                if name == "abandoned":
                    kept = {id: reason for id, reason in kept.items() if id.fence == truth.fence}
                need(getattr(told, name) == kept, f"{key} is not the fold of the slots below it: {name}")
        self.history.apply(decode_entry(data, key))
        self.slots, self.prev = self.slots + 1, digest_of(data)

    def past(self) -> dict[int, int]:
        """Fence -> slots: which commits of that fence the newest fence descends from."""
        found, at, until = {}, self.fence, self.slots
        while at:
            found[at] = until
            origin = self.origins[at]
            if origin["kind"] != "checkpoint":
                break
            checkpoint = AttemptId.parse(origin["checkpoint"])
            at, until = checkpoint.fence, self.commits[checkpoint] + 1
        return found

    def good(self) -> list[AttemptId]:
        past = self.past()
        return [
            id for id, slot in self.commits.items() if id not in self.bad and slot < past.get(id.fence, 0)
        ]

    def _fence(self, value: dict[str, Any]) -> None:
        need(value["fence"] == self.fence + 1 and value["replaces"] == self.fence, "a fence was given twice")
        origin, good = value["origin"], self.good() if self.fence else []
        if origin["kind"] == "checkpoint":
            chosen = AttemptId.parse(origin["checkpoint"])
            need(
                chosen in self.commits and chosen not in self.bad, f"fence {value['fence']} restores {chosen}"
            )
            need(
                value["reason"] or chosen == good[-1], f"{chosen} is restored where {good[-1:]} is the newest"
            )
        else:
            need(
                value["reason"] or not self.commits,
                f"fence {value['fence']} starts over {list(self.commits)}",
            )
        need(value["job"] not in self.jobs, f"job {value['job']} got a fence twice")
        self.fence = value["fence"]
        self.origins[self.fence] = origin
        self.jobs[value["job"]] = self.fence

    def _commit(self, value: dict[str, Any]) -> None:
        id = AttemptId.parse(value["id"])
        need(id.fence == self.fence, f"{id} was committed under fence {self.fence}")
        need(id not in self.commits, f"{id} was committed twice")
        need(id not in self.abandoned, f"{id} was committed after it was abandoned")
        newest = max((c for c in self.commits if c.fence == id.fence), default=None)
        need(newest is None or id > newest, f"{id} was committed after {newest}")
        index = self._named(value["index"])
        self._whole(index)
        need(index.id == id, f"the index of {id} is that of {index.id}")
        own = f"data/{id}/"
        good = set(self.good())
        for ref in index.segments:
            if ref.key.startswith(own):
                continue
            need(ref.key not in self.rotten, f"{id} reuses {ref.key}, which is marked bad")
            vouches = any(
                c in good and ref.key in {s.key for s in self.indexes[c].segments} for c in self.commits
            )
            need(vouches, f"{id} reuses {ref.key}, and nothing good lists it")
        self.commits[id], self.indexes[id] = self.slots, index
        self.numbers[id] = None if value["publication"] is None else value["publication"]["number"]

    def _named(self, ref: dict[str, Any]) -> Index:
        data = self.objects.peek(ref["key"])
        need(data is not None, f"the index {ref['key']} is not there")
        need(
            data is not None and digest_of(data) == ref["digest"], f"{ref['key']} is not the index committed"
        )
        return self._decode(data or b"", ref["key"])

    def _decode(self, data: bytes, key: str) -> Index:
        """The index, whose other tables must be there, whole."""

        def read(ref: ObjectRef) -> bytes:
            found = self.objects.peek(ref.key)
            need(found is not None and digest_of(found) == ref.digest, f"{key}: {ref.key} is not whole")
            return found or b""

        return index_module.decode_index(data, key, read)

    def _whole(self, index: Index) -> None:
        for part in index.parts:
            data = self.objects.peek(part.object.key)
            need(
                data is not None and digest_of(data) == part.object.digest,
                f"{index.id}: {part.object.key} is not whole",
            )
        values = self.read(index)
        frozen = {name for name in values if name.endswith(".frozen")}
        codes = {float(v) for name, array in values.items() if name not in frozen for v in array.ravel()}
        if index.id.kind == "s":
            need(codes == {code_of(index.id)}, f"{index.id} holds {sorted(codes)}: a mixture of saves")
            need({name.split("/")[0] for name in values} == {"trainer", "loop"}, f"{index.id} lacks a role")
            need(
                {"trainer/a", "trainer/b", "trainer/c", "loop/seen"} <= set(values),
                f"{index.id} lost a tensor",
            )
        for name in frozen:
            need((values[name] == FROZEN).all(), f"{index.id}: {name} is not what was frozen")

    def read(self, index: Index) -> dict[str, np.ndarray[Any, Any]]:
        """All tensors of an index, with the plainest code there can be; each element exactly once."""
        table = index.table
        values = {s.name: np.full(s.shape, np.nan) for s in table.tensors}
        hits = {s.name: np.zeros(s.shape, int) for s in table.tensors}
        for row in range(len(table)):
            key = table.segments[int(table.segment[row])]
            data = self.objects.peek(key)
            need(data is not None, f"{index.id}: {key} is gone")
            start, box, name = int(table.start[row]), table.box(row), table.spec(row).name
            raw = (data or b"")[start : start + int(table.nbytes[row])]
            values[name][box.slices] = np.frombuffer(raw, np.float64).reshape(box.shape)
            hits[name][box.slices] += 1
        for name, count in hits.items():
            need((count == 1).all(), f"{index.id}: an element of {name} is not delivered once")
        return values

    def _publish(self, value: dict[str, Any]) -> None:
        number, key = value["number"], value["index"]["key"]
        due = self.due()
        need(number == due, f"publication {number} where {due} is due")
        self._whole(self._named(value["index"]))
        for fence, other, digest, _ in self.publications:
            need(
                fence != self.fence or other != number,
                f"publication {number} of fence {fence} has two contents",
            )
            del digest
        self.publications.append((self.fence, number, value["digest"], key))

    def due(self) -> int:
        own = [number for fence, number, _, _ in self.publications if fence == self.fence]
        if own:
            return own[-1] + 1
        origin = self.origins[self.fence]
        if origin["kind"] != "checkpoint":
            return 0
        cut = self.numbers[AttemptId.parse(origin["checkpoint"])]
        need(cut is not None, "this scenario always names a publication")
        return cut if cut is not None else 0

    # -- what callers were told

    def restored(self, fence: int, member: str, step: int | None, values: dict[str, Any]) -> None:
        need(fence in self.origins, f"{member} holds fence {fence}, which is not in the journal")
        origin = self.origins[fence]
        if origin["kind"] != "checkpoint":
            need(step is None, f"{member} of fence {fence} restored step {step}; the fence starts fresh")
            return
        chosen = AttemptId.parse(origin["checkpoint"])
        found = {float(v) for array in values.values() for v in np.ravel(array)}
        need(
            step == chosen.step and found == {code_of(chosen)},
            f"{member} of fence {fence} restored step {step} ({found}); the fence names {chosen}",
        )

    def check(self) -> None:
        """After the end: everything that callers were told agrees with the journal."""
        for id, outcome in self.saves:
            self._check_outcome(id, id in self.commits, outcome)
        for id, outcome in self.published:
            done = any(f == id.fence and k.startswith(f"index/{id}-") for f, _, _, k in self.publications)
            self._check_outcome(id, done, outcome)
        for job, told in self.begins:
            if isinstance(told, int):
                need(
                    self.jobs.get(job) == told,
                    f"{job} was told fence {told}, the journal says {self.jobs.get(job)}",
                )
            elif not isinstance(told, UNSURE):
                need(job not in self.jobs, f"{job} was told {told!r} and has fence {self.jobs.get(job)}")

    def _check_outcome(self, id: AttemptId, done: bool, outcome: BaseException | None) -> None:
        if outcome is None:
            need(done, f"a caller was told that {id} is committed; the journal does not say so")
        elif isinstance(outcome, FencedError):
            need(
                not done and self.fence > id.fence,
                f"a caller was told {outcome!r} of {id}; {done=} {self.fence=}",
            )
        elif isinstance(outcome, (IncompleteSaveError, InconsistentCutError)):
            newer = max((c for c in self.commits if c.fence == id.fence), default=id)
            void = id in self.abandoned or self.fence > id.fence or (id.kind == "s" and newer > id)
            # or a member's part says that it never will contribute, or it gave up before it sent one
            void = void or id in self.refused or id in self.given_up
            need(not done and void, f"a caller was told {outcome!r} of {id}: {done=} {void=}")
        else:
            need(isinstance(outcome, (CkptStoreError, TimeoutError)), f"a caller of {id} got {outcome!r}")
