"""The processes of the loop, as Ray actors: trainer ranks, rollout engines, the coordinator.

Each is created before it knows its rank or run, and told both when it enters a life: (run, fence). Calls
of an older life are refused, so what a dead coordinator left in a queue does nothing. Heavy imports
are in the constructors: the coordinator's process must never pay for torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptstore.demo.chaos import ChaosClient
from ckptstore.demo.config import DemoConfig
from ckptstore.demo.kills import GENERATE, SAVE, UPDATE
from ckptstore.demo.loop import Loop, LoopSpec
from ckptstore.demo.records import Group, StepReport
from ckptstore.errors import CkptStoreError, FencedError, InvalidInputError
from ckptstore.manifest import PublicationId
from ckptstore.recovery.coordinator import Coordinator, Ended
from ckptstore.recovery.detector import peers_blamed
from ckptstore.recovery.ray import RayLauncher, control

if TYPE_CHECKING:
    from ckptstore.demo.trainer import Trainer

COMMIT_S = 60.0  # for the parts of other members; a dead one is found long before
GROUP_S = 60.0  # a collective with a frozen peer; a dead one ends it within milliseconds
RENDEZVOUS_S = 20.0
HOST = "127.0.0.1"

Life = tuple[int, int]
"""Number of the run within the command, fence of the run: calls of a lower one are refused."""


class DemoMember:
    """What all members have: a name, a life, and answers while they work."""

    def __init__(self, name: str, chaos: Any) -> None:
        self.who = name.replace("/", ":")
        self.life: Life = (0, 0)
        self.outside = ChaosClient(chaos, self.who)
        self.outside.enlist()

    @control
    def ping(self) -> int:
        """This process's id; answered beside whatever else it does."""
        return os.getpid()

    @control
    def enter(self, life: Life) -> None:
        """Belong to `life` from now on; answered at once, so that older calls in the queue are refused."""
        self._check(life)
        self.life = life

    def _check(self, life: Life) -> None:
        if life < self.life:
            raise FencedError(
                f"{self.who} belongs to run {self.life[0]}, fence {self.life[1]}, and was called under fence {life[1]} "
                f"of run {life[0]}; exit without retrying",
                held=life[1],
                current=self.life[1],
            )


class TrainerMember(DemoMember):
    """One trainer rank."""

    def __init__(self, name: str, chaos: Any) -> None:
        import torch

        import ckptstore.demo.trainer

        torch.set_num_threads(1)  # equal bits need equal splits of each sum
        self.trainer: Trainer | None = None
        self.checkpointer: ckptstore.Checkpointer | None = None
        self.publisher: ckptstore.Publisher | None = None
        self.handle: ckptstore.SaveHandle | None = None
        self.rendezvous: Any = None
        super().__init__(name, chaos)

    def leave(self, life: Life) -> None:
        """Drop the group: whoever still waits in it is freed. A save that is under way is void."""
        import torch.distributed as dist

        self._check(life)
        if self.checkpointer is not None:
            with contextlib.suppress(CkptStoreError, TimeoutError):  # of a save that is void by now
                self.checkpointer.close(timeout_s=0)
        self.checkpointer = self.publisher = self.handle = self.rendezvous = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def serve(self, life: Life) -> int:
        """Open the store at which the ranks of this life meet; gives its port, free without a race."""
        self._check(life)
        self.rendezvous = _rendezvous(0, serve=True)
        port: int = self.rendezvous.port
        return port

    def meet(self, life: Life, token: str, rank: int, size: int, port: int) -> None:
        """Be rank `rank` of `size` in this life. Collective."""
        import ckptstore

        self._check(life)
        self.rank, self.size = rank, size
        if size > 1:
            with peers_blamed("the meeting of the ranks"):
                self._join(life, port)
        self.checkpointer = ckptstore.Checkpointer(
            token,
            role="trainer",
            rank=rank,
            commit_timeout_s=COMMIT_S,
            on_phase=self._in_save,
        )
        self.publisher = ckptstore.Publisher(token, role="trainer", rank=rank, timeout_s=COMMIT_S)

    def _join(self, life: Life, port: int) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        store = self.rendezvous if self.rendezvous is not None else _rendezvous(port, serve=False)
        c10d: Any = dist
        dist.init_process_group(
            "gloo",
            store=c10d.PrefixStore(f"run{life[0]}-fence{life[1]}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=GROUP_S),
        )

    def _in_save(self, phase: str, step: int) -> None:
        """Called from the thread that saves: its only marked point is after the segments, before the part."""
        if phase == "segments_written":
            self.outside.at(self.who, step, SAVE)

    def restore(self, life: Life, config: dict[str, Any]) -> tuple[int | None, dict[str, str]]:
        """Go to the origin of this life, or to the start of a run. Collective.

        Gives the step (None for a start) and the digests of this rank's tensors.
        """
        from ckptstore.demo.trainer import Trainer

        self._check(life)
        settings = DemoConfig.from_json(config)
        if self.trainer is None:
            self.trainer = Trainer(settings, self.rank, self.size)
        else:
            self.trainer.reset(settings, self.rank, self.size)
        assert self.checkpointer is not None, "the ranks meet before they restore"
        state = self.trainer.state()
        step = self.checkpointer.restore(state)
        if step is not None:
            self.trainer.adopt(state)
        else:
            with peers_blamed("the warm-up"):
                self.trainer.warm_up()
        return step, self.trainer.digest_state()

    def ledger(self, life: Life) -> dict[str, Any]:
        """The record of what is consumed, as JSON."""
        told: dict[str, Any] = self._at_work(life).ledger.to_json()
        return told

    def step(self, life: Life, number: int, groups: Sequence[Group]) -> StepReport:
        """Apply update `number`. Collective."""
        trainer = self._at_work(life)
        with peers_blamed(f"update {number}"):
            return trainer.step(groups, on_computing=lambda: self.outside.at(self.who, number, UPDATE))

    def publish(self, life: Life, number: int) -> PublicationId:
        """Publish the policy as version `number`; in the journal on return. Every rank calls this."""
        trainer = self._at_work(life)
        assert self.publisher is not None, "the ranks meet before they publish"
        return self.publisher.publish(number, trainer.publication())

    def evaluate(self, life: Life) -> float:
        """Accuracy on the held-out rows, recorded for this step. Collective."""
        with peers_blamed("the evaluation"):
            return self._at_work(life).evaluate()

    def save(self, life: Life, number: int, version: int) -> float:
        """Stage step `number`; the rest goes on in the background. Gives the ms that this took."""
        trainer = self._at_work(life)
        assert self.checkpointer is not None, "the ranks meet before they save"
        began_s = time.perf_counter()
        self.handle = self.checkpointer.save(number, trainer.state(), policy_version=version)
        return (time.perf_counter() - began_s) * 1e3

    def settle(self, life: Life) -> None:
        """Return once the last save is committed, or raise its failure."""
        self._at_work(life)
        if self.handle is not None:
            self.handle.result(COMMIT_S * 2)

    def digests(self, life: Life) -> dict[str, str]:
        """Digests of this rank's master weights and moments by name."""
        return self._at_work(life).digest_state()

    def stored_digests(self, url: str, step: int) -> dict[str, str]:
        """Digests by name of the global tensors of a checkpoint, as `digests` gives them for all ranks."""
        import ckptstore
        from ckptstore.demo.digests import digest_stored

        return digest_stored(ckptstore.open(url), step)

    def _at_work(self, life: Life) -> Trainer:
        self._check(life)
        if self.trainer is None or life != self.life:
            raise InvalidInputError(
                f"{self.who} was called under run {life[0]}, fence {life[1]} before it was restored there; "
                f"regroup and restore first",
                life=life,
            )
        return self.trainer


def _rendezvous(port: int, *, serve: bool) -> Any:
    """The store at which ranks meet: 300 s, its own bound, would hang a recovery."""
    from datetime import timedelta

    import torch.distributed as dist

    c10d: Any = dist
    return c10d.TCPStore(
        HOST, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=RENDEZVOUS_S)
    )


class EngineMember(DemoMember):
    """One rollout engine."""

    def __init__(self, name: str, chaos: Any) -> None:
        import torch

        import ckptstore.demo.engine

        torch.set_num_threads(1)
        self.engine: ckptstore.demo.engine.Engine | None = None
        self.config: dict[str, Any] = {}
        self.held: PublicationId | None = None
        super().__init__(name, chaos)

    def load(self, life: Life, config: dict[str, Any], url: str, id: PublicationId) -> tuple[str, bool]:
        """Serve publication `id`: the digest of the weights that are now served, and whether it served none before.

        What it holds already, proven by the publication's digest, is not read again.
        """
        import ckptstore
        from ckptstore.demo.digests import digest_served
        from ckptstore.demo.engine import Engine

        self._check(life)
        young = self.engine is None
        fresh = young or self.config != config or life[0] != self.life[0]
        self.life = life
        if self.engine is None:
            self.engine = Engine(DemoConfig.from_json(config))
        elif fresh:
            self.engine.reset(DemoConfig.from_json(config))
        if fresh or self.held is None or self.held.digest != id.digest:
            self.held, self.config = None, config
            ckptstore.Subscriber(url).load(id, self.engine.target())
        self.engine.install(version=id.number)
        self.held = id
        return digest_served(self.engine.target()), young

    def generate(self, life: Life, step: int, ordinals: Sequence[int]) -> list[Group]:
        """The groups of one lease."""
        self._check(life)
        if self.engine is None or self.held is None:
            raise InvalidInputError(f"{self.who} serves no publication; call load first", who=self.who)
        groups = self.engine.generate(ordinals)
        self.outside.at(self.who, step, GENERATE)
        return groups


class CoordinatorMember:
    """The coordinator: member `loop/0` of the roster. Light, because it is replaced within a moment."""

    def __init__(self, chaos: Any) -> None:
        self.chaos = chaos
        self.outside = ChaosClient(chaos, "coordinator")
        self.outside.enlist()

    def run(self, spec: LoopSpec, namespace: str, reason: str) -> Ended:
        """Bring the loop to the step where `spec` ends. Raises what no recovery mends."""
        launcher = RayLauncher(namespace=namespace, classes=member_classes(), arguments=(self.chaos,))
        loop = Loop(spec, launcher=launcher, outside=self.outside)
        coordinator = Coordinator(spec.mission(), launcher=launcher, job=loop, watch=loop)
        return coordinator.run(reason)

    def modules(self) -> list[str]:
        """Names of what this process has imported."""
        import sys

        return sorted(sys.modules)


def member_classes() -> dict[str, type]:
    """The actor class of each role."""
    return {"trainer": TrainerMember, "rollout": EngineMember}
