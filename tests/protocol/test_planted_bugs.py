"""Each rule is left out once, in the real code, and the histories of the other tests must tell.

A bug that no seed of the default number catches would show that the invariants, or the scenario, are
too weak to prove anything about that rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptstore import (
    agreement,
    checkpointer,
    chunkwriter,
    commit,
    incarnation,
    index,
    journal,
    stream,
    writer,
)
from ckptstore.chunktable import ChunkTable, TableFrame
from ckptstore.errors import AlreadyExistsError, InconsistentCutError
from ckptstore.history import Fold, History
from ckptstore.manifest import SegmentRef
from ckptstore.testing.simulated import NO_CHANCES, SimulatedStore
from ckptstore.wire import digest_of
from tests.aliasing import alias_instead_of_copying
from tests.protocol.ledger_loop import train_each_once
from tests.protocol.loop import BrokenPromiseError, Loop, play, quick
from tests.protocol.planting import plant
from tests.protocol.test_interleavings import SEEDS

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quick_tables() -> Iterator[None]:
    with quick():
        yield


def caught_by_seeds() -> str:
    """What is said of the first seed whose history breaks a promise."""
    for seed in range(SEEDS):
        try:
            play(seed)
        except BrokenPromiseError as error:
            return str(error)
    pytest.fail(f"{SEEDS} seeds did not notice the planted bug")


# -- the journal


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    plant(patch, journal.Journal, "append", ("if write in history.writes:", "if False:"))
    plant(patch, journal.Journal, "_try", ("if self.store.read(key) != data:", "if True:"))


def unknown_taken_for_landed(patch: pytest.MonkeyPatch) -> None:
    old = "except (AlreadyExistsError, OutcomeUnknownError):"
    new = "except OutcomeUnknownError:\n        pass\n    except AlreadyExistsError:"
    plant(patch, journal.Journal, "_try", (old, new))


def exists_taken_for_another(patch: pytest.MonkeyPatch) -> None:
    """A refusal is believed to be another's, without reading (R3)."""
    plant(patch, journal.Journal, "append", ("if write in history.writes:", "if False:"))
    plant(patch, journal.Journal, "_try", ("if self.store.read(key) != data:", "if self.store.read(key):"))


def own_fence_unknown(patch: pytest.MonkeyPatch) -> None:
    """The token's slot is not held against a stale read (R6)."""
    plant(patch, journal.Journal, "catch_up", ("least = max(least, self._known)", "pass"))


def check_then_create(patch: pytest.MonkeyPatch) -> None:
    real = SimulatedStore.create

    def create(self: SimulatedStore, key: str, data: Any) -> None:
        if self.peek(key) is not None:
            raise AlreadyExistsError(f"{key} is taken", key=key)
        self._simulation.step()  # between the check and the write, anything happens
        self._objects.pop(key, None)
        real(self, key, data)

    patch.setattr(SimulatedStore, "create", create)


# -- fences and attempts


def no_fence_rule(patch: pytest.MonkeyPatch) -> None:
    plant(patch, commit.Committer, "_append", ("if history.fence != self.fence:", "if False:"))
    plant(patch, History, "is_open", ("attempt.fence != self.fence or ", ""))


def fence_counted_up(patch: pytest.MonkeyPatch) -> None:
    """Who loses the race of fences goes on with the number it wanted."""
    plant(patch, incarnation, "_raise_fence", ("if prefix.fence != replaces:", "if False:"))


def abandoned_is_not_final(patch: pytest.MonkeyPatch) -> None:
    plant(patch, History, "is_open", ("or attempt in self.fold.abandoned ", ""))


def second_committer_says_fenced(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch,
        commit.Committer,
        "_append",
        (
            "if history.is_committed(attempt):",
            "if history.fence == self.fence and history.is_committed(attempt):",
        ),
    )


def timeout_without_looking(patch: pytest.MonkeyPatch) -> None:
    """The deadline alone says that the save failed, though another committer had it committed (R14)."""
    plant(
        patch, commit.Committer, "run", ("if self._is_committed(attempt, self.journal.history):", "if False:")
    )


def origin_chosen_per_rank(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch,
        checkpointer.Checkpointer,
        "_check_restore",
        (
            "origin = self._token.origin.checkpoint",
            "origin = (self._journal.catch_up().good() or (None,))[-1]",
        ),
    )


# -- order of writes, keys


def part_before_segments(patch: pytest.MonkeyPatch) -> None:
    later: list[tuple[Any, bytes]] = []
    real, close = writer.PartWriter._create_part, stream.SegmentStream.close

    def early(self: Any, *args: Any) -> None:
        mine, later[:] = list(later), []
        real(self, *args)
        for segment, header in mine:
            segment.finish(header)
            close(segment)

    def unfinished(segment: Any, header: bytes) -> SegmentRef:
        later.append((segment, header))
        return SegmentRef(key=segment.key, nbytes=segment.nbytes, header=digest_of(header))

    patch.setattr(chunkwriter, "_finish", unfinished)
    patch.setattr(stream.SegmentStream, "close", lambda self: None)
    patch.setattr(writer.PartWriter, "_create_part", early)


def entry_before_index(patch: pytest.MonkeyPatch) -> None:
    _reorder(patch, index, commit.Committer, "_append")


def _reorder(patch: pytest.MonkeyPatch, module: Any, owner: Any, name: str) -> None:
    """What `create_own` of the module would write comes only after `owner.name`."""
    real, create = getattr(owner, name), module.create_own
    later: list[tuple[Any, ...]] = []

    def early(self: Any, *args: Any) -> None:
        mine, later[:] = list(later), []
        real(self, *args)
        for each in mine:
            create(*each)

    patch.setattr(module, "create_own", lambda *args: later.append(args))
    patch.setattr(owner, name, early)


def index_key_by_attempt(patch: pytest.MonkeyPatch) -> None:
    plant(
        patch,
        commit,
        "write_index",
        ("index_key(index.id, new_id())", "index_key(index.id, '0' * 16)"),
    )


def staged_without_copy(patch: pytest.MonkeyPatch) -> None:
    alias_instead_of_copying(patch)


# -- content


def reuse_without_witness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_check_witnesses", lambda *args: None)


def chunk_dropped(patch: pytest.MonkeyPatch) -> None:
    """Every check that would notice is left out: what is committed lacks elements."""
    half_a_chunk(patch)
    patch.setattr(commit, "check_coverage", lambda table, parts: None)


def half_a_chunk(patch: pytest.MonkeyPatch) -> None:
    real = TableFrame.table

    def lossy(self: TableFrame, **columns: Any) -> ChunkTable:
        table = real(self, **columns)
        if not len(table):
            return table
        last = np.arange(len(table)) == len(table) - 1
        rows = table.shape[:, 0]
        return replace(
            table,
            shape=np.column_stack([np.where(last, rows // 2, rows), table.shape[:, 1:]]),
            nbytes=np.where(last, table.nbytes // np.maximum(rows, 1) * (rows // 2), table.nbytes),
        )

    patch.setattr(TableFrame, "table", lossy)


def whole_chunk(patch: pytest.MonkeyPatch) -> None:
    real = TableFrame.table

    def lossy(self: TableFrame, **columns: Any) -> ChunkTable:
        table = real(self, **columns)
        return table.take(np.arange(max(len(table) - 1, 0)))

    patch.setattr(TableFrame, "table", lossy)


def whole_tensor(patch: pytest.MonkeyPatch) -> None:
    """Lost before it was counted, so that neither the count nor the coverage of what is left tells."""
    whole_chunk(patch)
    plant(
        patch,
        writer.PartWriter,
        "write_chunks",
        ("planned=len(frame.specs)", "planned=len(frame.specs) - 1"),
    )


# Each with what is said of the first history that it breaks: caught, and for the reason it was planted.
BUGS: dict[Plant, str] = {
    no_read_back: "was told FencedError.* and has fence",
    unknown_taken_for_landed: "is committed; the journal does not say so|which is not in the journal|"
    "was told IncompleteSaveError.*done=False void=False",
    exists_taken_for_another: "was told FencedError.* and has fence",
    own_fence_unknown: "was told FencedError",
    check_then_create: "landed where slot",
    no_fence_rule: "commit of fence . landed after fence",
    fence_counted_up: "a fence was given twice",
    abandoned_is_not_final: "abandoned",
    second_committer_says_fenced: "was told FencedError.*done=True",
    timeout_without_looking: "was told IncompleteSaveError.*done=True",
    origin_chosen_per_rank: "the fence (names|starts fresh)",
    part_before_segments: "which is not whole",
    entry_before_index: "is not there",
    index_key_by_attempt: "is not the index committed",
    staged_without_copy: "a mixture of saves",
    reuse_without_witness: "which is marked bad|nothing good lists it",
    chunk_dropped: "is not delivered once",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_seed_catches(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert re.search(BUGS[bug], caught_by_seeds(), re.DOTALL)


@pytest.mark.parametrize("name", ["fences", "commits", "bad", "rotten", "abandoned", "publications"])
def test_a_seed_catches_a_summary_that_drops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = journal.fold_to_json

    def lossy(fold: Fold) -> dict[str, Any]:
        told = real(fold)
        if name == "fences":  # keeps them, but not what they restore
            told[name] = [[slot, {**body, "origin": {"kind": "start"}}] for slot, body in told[name]]
        else:
            told[name] = type(told[name])()
        return told

    monkeypatch.setattr(journal, "fold_to_json", lossy)
    assert "is not the fold of the slots below it" in caught_by_seeds()


@pytest.mark.parametrize("lost", [whole_chunk, half_a_chunk, whole_tensor], ids=lambda lost: lost.__name__)
def test_a_chunk_that_never_came_back_is_refused_and_not_a_smaller_checkpoint(
    lost: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(monkeypatch)
    loop = Loop(0, chances=NO_CHANCES, begins=1)
    loop.two_committers = loop.marker = loop.double_life = loop.publishes = False
    oracle = loop.run()
    assert not oracle.commits
    assert {id for id, _ in oracle.saves} <= oracle.abandoned
    assert all(isinstance(outcome, InconsistentCutError) for _, outcome in oracle.saves), oracle.saves


# -- consumption


def test_consumption_kept_by_the_ledgers_owner_trains_an_ordinal_twice_or_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(10):
        train_each_once(seed)
    plant(
        monkeypatch,
        agreement,
        "join_ledgers",
        ("trainer.consumed if trainer is not None else Intervals()", "others[0].consumed"),
    )
    caught = 0
    for seed in range(10):
        try:
            train_each_once(seed)
        except BrokenPromiseError:
            caught += 1
    assert caught, "nothing was trained twice or lost although the owner's record decides"
