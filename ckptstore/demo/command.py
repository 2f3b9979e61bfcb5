"""The demo command: starts everything, supervises the coordinator, compares runs, cleans up.

It is the one process that no kill is aimed at: when the coordinator dies it starts another. All runs of a
command share one Ray session, and the members are reset in place between them. What the loop does is
`loop.py`'s; what is found out is read from the store and from notes, never from the loop's own memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptstore.demo.config import DemoConfig
from ckptstore.demo.findings import find_result
from ckptstore.demo.kills import Kill, parse_kills
from ckptstore.demo.notes import Moved, Note, Noticed, Restored
from ckptstore.demo.records import join_digests
from ckptstore.demo.result import DemoOutcome, Progress, Resize, RunResult
from ckptstore.demo.session import RaySession
from ckptstore.errors import InvalidInputError, NoRecoveryPointError, NotFoundError
from ckptstore.manifest import Member
from ckptstore.recovery.coordinator import Ended
from ckptstore.run import open as open_run

POLL_S = 0.2
COORDINATOR_LIVES = 3  # besides the planned ones
DIGEST_S = 120.0
SILENT_S = (
    900.0  # longer than the longest that a coordinator may wait for members, a warm-up on a busy machine
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What a command is to do. `resizes` are (after step, number of trainers), steps ascending."""

    config: DemoConfig
    url: str | None = None
    keep: bool = False
    kills: tuple[Kill, ...] = ()
    resizes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(
        cls,
        *,
        steps: int = 75,
        every: int = 5,
        seed: int = 0,
        trainers: int = 2,
        rollouts: int = 2,
        url: str | None = None,
        keep: bool = False,
        kill: str | None = None,
        resize: str | Sequence[str] = (),
    ) -> DemoOptions:
        """Read the flags of the command line. InvalidInputError for what can never work, before anything starts."""
        config = DemoConfig(steps=steps, every=every, seed=seed, trainers=trainers, rollouts=rollouts)
        resizes = parse_resizes(resize, config)
        saves = tuple(step for step, _ in resizes)
        kills = parse_kills(kill, config, saves=saves) if kill is not None else ()
        if url is not None:
            _check_url(url)
            if kills:
                _check_url(_beside(url))
        return cls(config=config, url=url, keep=keep, kills=kills, resizes=resizes)


def parse_resizes(texts: str | Sequence[str], config: DemoConfig) -> tuple[tuple[int, int], ...]:
    """Read `40:1` (after step 40, one trainer), several separated by commas or as several items."""
    items = [item for text in ([texts] if isinstance(texts, str) else texts) for item in text.split(",")]
    found: list[tuple[int, int]] = []
    for item in items:
        step, colon, trainers = item.strip().partition(":")
        if not (colon and step.isdecimal() and trainers.isdecimal()):
            raise InvalidInputError(
                f"resize {item!r} is not understood; write STEP:TRAINERS, as in 40:1", resize=item
            )
        after = found[-1][0] if found else 0
        if not after < int(step) < config.steps:
            raise InvalidInputError(
                f"resize {item!r} cannot be done: the step must lie between {after + 1} and {config.steps - 1}, "
                f"ascending",
                resize=item,
            )
        replace(config, trainers=int(trainers))  # raises when experts or prompts do not go round
        found.append((int(step), int(trainers)))
    return tuple(found)


def _check_url(url: str) -> None:
    """A folder that several processes see, and where no run is yet."""
    if url.startswith("memory:"):
        raise InvalidInputError(
            f"{url} lives in one process, but the demo runs in several; give a folder", url=url
        )
    try:
        found = open_run(url)
    except NotFoundError:
        return
    raise InvalidInputError(
        f"{url} holds the run {found.id} already; give an empty folder, or remove that one", url=url
    )


def _beside(url: str) -> str:
    """Where the undisturbed run goes that the killed one is compared with."""
    return f"{url.rstrip('/')}-undisturbed"


def run_demo(options: DemoOptions, progress: Progress | None = None) -> DemoOutcome:
    """Do all runs of the command and compare them.

    Nothing is left behind on return or on any exception (Ctrl-C and SIGTERM included), except the stores at
    `url`, or in the temporary folder when `keep` is set. NoRecoveryPointError: the loop halted, the message
    tells why. While this runs, stdout belongs to nobody and SIGTERM raises SystemExit.
    """
    began_s = time.monotonic()
    with RaySession() as session, _store(options, session) as url:
        outcome = _Command(options, url, session, progress or (lambda step, steps, words: None)).run()
    return replace(outcome, wall_s=time.monotonic() - began_s)


@contextlib.contextmanager
def _store(options: DemoOptions, session: RaySession) -> Iterator[str]:
    """The run's URL; a temporary folder is removed with the session, unless it is to be kept."""
    if options.url is not None:
        yield options.url
        return
    folder = os.path.join(tempfile.gettempdir(), f"ckptstore-demo-{secrets.token_hex(4)}")
    if not options.keep:
        session.own_folder(folder)
    os.mkdir(folder, mode=0o700)
    yield os.path.join(folder, "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run with one number of trainers, up to step `until`."""

    trainers: int
    until: int
    resume: str | int


class _Command:
    """All runs of one command, within its session."""

    def __init__(self, options: DemoOptions, url: str, session: RaySession, progress: Progress) -> None:
        import ray

        from ckptstore.demo.chaos import Chaos
        from ckptstore.demo.members import member_classes
        from ckptstore.recovery.ray import RayLauncher

        self._options = options
        self._url = url
        self._session = session
        self._progress = progress
        actor: Any = ray.remote(Chaos)
        self._chaos = actor.options(num_cpus=0, max_restarts=0).remote()
        self._launcher = RayLauncher(
            namespace=session.namespace, classes=member_classes(), arguments=(self._chaos,)
        )
        self._job = secrets.token_hex(4)
        self._order = 0

    def run(self) -> DemoOutcome:
        options, config = self._options, self._options.config
        whole = [Stretch(trainers=config.trainers, until=config.steps, resume="auto")]
        if not options.kills:
            parts = [*self._stretches()] if options.resizes else whole
            label = "resized" if options.resizes else "undisturbed"
            return DemoOutcome(run=self._run(label, self._url, parts))
        other = _beside(self._url)
        undisturbed = self._run("undisturbed", other, whole)
        killed = self._run("killed", self._url, whole, options.kills)
        resized = None
        if options.resizes:
            after = self._stretches()[1:]
            parts = [replace(after[0], resume=options.resizes[0][0]), *after[1:]]
            resized = self._run("resized", other, parts)
        return DemoOutcome(run=killed, undisturbed=undisturbed, resized=resized)

    def _stretches(self) -> list[Stretch]:
        config, resizes = self._options.config, self._options.resizes
        untils = [*(step for step, _ in resizes), config.steps]
        sizes = [config.trainers, *(trainers for _, trainers in resizes)]
        return [
            Stretch(trainers=size, until=until, resume="must" if n else "auto")
            for n, (size, until) in enumerate(zip(sizes, untils, strict=True))
        ]

    # -- one run

    def _run(self, label: str, url: str, parts: Sequence[Stretch], kills: Sequence[Kill] = ()) -> RunResult:
        import ray

        began_s = time.monotonic()
        ray.get(self._chaos.plan.remote(tuple(kills)), timeout=30)
        seen: list[Note] = []
        resizes: list[Resize] = []
        for place, part in enumerate(parts):
            resized = place > 0 or isinstance(part.resume, int)
            if resized:
                # Really stopped, so that nothing but the store can bring their state back.
                self._launcher.stop([Member(role="trainer", rank=n) for n in range(self._widest())])
            since = len(seen)
            self._supervise(label, url, part, kills, seen)
            if resized:
                step = part.resume if isinstance(part.resume, int) else parts[place - 1].until
                resizes.append(self._resize(url, step, part.trainers, seen[since:], began_s))
        return self._result(label, url, parts, kills, seen, tuple(resizes), began_s)

    def _widest(self) -> int:
        return max([self._options.config.trainers, *(trainers for _, trainers in self._options.resizes)])

    def _supervise(
        self, label: str, url: str, part: Stretch, kills: Sequence[Kill], seen: list[Note]
    ) -> None:
        """Run coordinators until one has brought the loop to the stretch's end."""
        import ray

        from ckptstore.demo.loop import LoopSpec
        from ckptstore.demo.members import CoordinatorMember

        self._order += 1
        spec = LoopSpec(
            order=self._order,
            job=f"{self._job}-{self._order}",
            url=url,
            config=replace(self._options.config, trainers=part.trainers),
            until=part.until,
            saves=tuple(step for step, _ in self._options.resizes),
            resume=part.resume,
            deaths=len(kills),
        )
        reason = "the loop begins" if part.resume == "auto" else f"resized to {part.trainers} trainers"
        for _ in range(COORDINATOR_LIVES + len(kills)):
            actor: Any = ray.remote(CoordinatorMember)
            coordinator = actor.options(num_cpus=0, max_restarts=0).remote(self._chaos)
            ended = self._wait(coordinator.run.remote(spec, self._session.namespace, reason), label, seen)
            ray.kill(coordinator, no_restart=True)
            if ended is None:
                self._note(Noticed(who=("coordinator",)))
                reason = "the coordinator died"
                if self._has_begun(seen):
                    spec = replace(spec, resume="auto")
                continue
            if not ended.finished:
                raise NoRecoveryPointError(f"the loop halted: {ended.why}", why=ended.why)
            self._listen(label, seen)
            return
        raise NoRecoveryPointError(
            f"the coordinator died {COORDINATOR_LIVES + len(kills)} times; look at the machine's memory and load"
        )

    def _has_begun(self, seen: Sequence[Note]) -> bool:
        from ckptstore.demo.notes import Fenced

        return any(isinstance(note, Fenced) for note in seen)

    def _wait(self, reference: Any, label: str, seen: list[Note]) -> Ended | None:
        """How a coordinator's work ended; None if it died, or told nothing for much too long."""
        import ray

        from ckptstore.recovery.detector import is_death

        told_s, count = time.monotonic(), len(seen)
        while True:
            done, _ = ray.wait([reference], timeout=POLL_S)
            self._listen(label, seen)
            if len(seen) > count:
                told_s, count = time.monotonic(), len(seen)
            elif time.monotonic() - told_s > SILENT_S:
                return None
            self._session.survey()
            if done:
                try:
                    ended: Ended = ray.get(reference)
                    return ended
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, BaseException) else error from None
                except ray.exceptions.RayError as error:
                    if not is_death(error):
                        raise
                    return None

    def _listen(self, label: str, seen: list[Note]) -> None:
        """Fetch new notes and show where the loop is."""
        import ray

        new = ray.get(self._chaos.told.remote(len(seen)), timeout=30)
        seen.extend(new)
        moved = [note for note in new if isinstance(note, Moved)]
        if moved:
            self._progress(moved[-1].step, self._options.config.steps, f"{label}: {moved[-1].words}")

    def _note(self, note: Note) -> None:
        self._chaos.note.remote(note)

    # -- what was found out

    def _resize(self, url: str, step: int, trainers: int, notes: Sequence[Note], began_s: float) -> Resize:
        restored = next(note for note in notes if isinstance(note, Restored))
        return Resize(
            at_s=restored.at_s - began_s,
            step=step,
            trainers=trainers,
            saved=self._stored_digest(url, step),
            restored=restored.digest,
        )

    def _stored_digest(self, url: str, step: int) -> str:
        """Digest of a checkpoint's global tensors, read from the store by a process that has torch."""
        reader = Member(role="trainer", rank=0)
        self._launcher.ensure([reader], deadline_s=DIGEST_S)  # its process may be another than the last time
        call = self._launcher.call(reader, "stored_digests", url, step)
        (digests,) = self._launcher.gather([call], deadline_s=DIGEST_S)
        return join_digests([digests])

    def _result(
        self,
        label: str,
        url: str,
        parts: Sequence[Stretch],
        kills: Sequence[Kill],
        seen: Sequence[Note],
        resizes: tuple[Resize, ...],
        began_s: float,
    ) -> RunResult:
        wall_s = time.monotonic() - began_s
        config = self._options.config
        return find_result(
            label=label,
            url=url,
            config=replace(config, trainers=parts[0].trainers),
            kills=kills,
            notes=seen,
            resizes=resizes,
            digest=self._stored_digest(url, config.steps),
            began_s=began_s,
            wall_s=wall_s,
        )
