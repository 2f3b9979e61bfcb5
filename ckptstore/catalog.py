"""What checkpoints a run has, as the journal tells it; read-only.

Nothing here writes, not even a probe, so anyone who can read the store may look. `latest` is the newest
good commit of the lineage, not the highest step (docs/explanation/cuts.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptstore.clock import Clock
from ckptstore.errors import CorruptError, NoCheckpointError, NotFoundError
from ckptstore.history import History
from ckptstore.index import OpenIndex, open_index, read_index
from ckptstore.journal import Journal
from ckptstore.manifest import AttemptId, CheckpointInfo, Index, Part, PartRef, whole_number
from ckptstore.skeleton import check_node, tag_of
from ckptstore.store.base import Store
from ckptstore.tablefile import decode_part
from ckptstore.wire import decode_run, digest_of

RUN_KEY = "run.json"


class Catalog:
    """The checkpoints of one run. Every question reads the journal to its end first."""

    def __init__(self, store: Store, *, clock: Clock | None = None) -> None:
        self.store = store
        self.journal = Journal(store, clock=clock, by="reader")

    def open(self) -> Catalog:
        """Check that there is a run of a format that this version reads. NotFoundError, UnsupportedFormatError."""
        try:
            value = decode_run(self.store.read(RUN_KEY), RUN_KEY)
        except NotFoundError as error:
            raise NotFoundError(
                f"{self.store.url} holds no run: {RUN_KEY} is not there; check the URL, or begin one",
                url=self.store.url,
            ) from error
        self.journal.run = value["run"]
        self.journal.catch_up()
        return self

    @property
    def history(self) -> History:
        return self.journal.catch_up()

    def infos(self) -> list[CheckpointInfo]:
        """All live checkpoints, in journal order."""
        history = self.history
        return [checkpoint_info(history, id) for id in history.live()]

    def find(self, step: int | None) -> AttemptId:
        """The newest good checkpoint, of `step` when given (then an abandoned or bad one if there is no good one)."""
        step = None if step is None else whole_number(step, "step")
        history = self.history
        good = [id for id in history.good() if step in (None, id.step)]
        others = [id for id in history.live() if step is not None and id.step == step]
        if good or others:
            return (good or others)[-1]
        known = ", ".join(str(id.step) for id in history.live()[-8:]) or "none"
        raise NoCheckpointError(
            f"{self.store.url} has no checkpoint{'' if step is None else f' of step {step}'} (newest steps: {known})",
            url=self.store.url,
            step=step,
        )

    def index(self, id: AttemptId) -> Index:
        """All rows of a checkpoint, digest checked. CorruptError."""
        return read_index(self.store, self.history.fold.commits[id].index)

    def open_index(self, id: AttemptId) -> OpenIndex:
        """What a checkpoint has, and its rows as they are asked for. CorruptError."""
        return open_index(self.store, self.history.fold.commits[id].index)


def checkpoint_info(history: History, id: AttemptId) -> CheckpointInfo:
    commit = history.fold.commits[id]
    counters = commit.counters
    return CheckpointInfo(
        id=id,
        step=id.step,
        fence=id.fence,
        slot=history.fold.commit_slot[id],
        committed_at=history.fold.committed_at[id],
        nbytes=int(counters.get("nbytes", 0)),
        nbytes_written=int(counters.get("nbytes_written", 0)),
        nbytes_reused=int(counters.get("nbytes_reused", 0)),
        nbytes_saved=counters.get("nbytes_saved"),
        roles=dict(counters.get("roles", {})),
        publication=commit.publication,
        status=history.status(id),
    )


def read_part(store: Store, ref: PartRef) -> Part:
    """A part that an index names, digest checked. CorruptError when it is damaged or gone."""
    key = ref.object.key
    try:
        data = store.read(key)
    except NotFoundError as error:
        raise CorruptError(f"{key} is named by an index but is not on {store.url}", key=key) from error
    if len(data) != ref.object.nbytes or digest_of(data) != ref.object.digest:
        raise CorruptError(
            f"{key} has {len(data)} bytes with digest {digest_of(data)} where the index names {ref.object.nbytes} and "
            f"{ref.object.digest}: it is damaged, use an older checkpoint",
            key=key,
        )
    part = decode_part(data, key)
    try:
        if tag_of(part.state) != "d":
            raise ValueError("no names")
        check_node(part.state)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"the state in {key} has {error}: it is no part of ckptstore's", key=key
        ) from error
    return part


def read_parts(store: Store, refs: Sequence[PartRef]) -> list[Part]:
    return [read_part(store, ref) for ref in refs]
