"""Members as Ray actors: detached, named, in a namespace of their own, never restarted by Ray.

Detached, because they must outlive the coordinator that started them; found by name, so that its
successor adopts them; `max_restarts=0`, because only a coordinator that holds the fence decides who
lives. Actors need `ping` (answered from a thread of its own: see `CONTROL`). Why each: docs/explanation/recovery.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ckptstore.clock import Clock, SystemClock, tries
from ckptstore.manifest import Member
from ckptstore.recovery.detector import Answered, Died, Failed, Outcome, Silent, is_death, judge
from ckptstore.recovery.launcher import Call, MemberDiedError, PeerLostError

CONTROL = "control"  # concurrency group of calls that must be answered while a member works or waits
CONTROL_THREADS = 2
PING_S = 10.0  # for a member that has answered before; one that starts has the caller's deadline
GRACE_S = 5.0  # for a death to be reported after a survivor blamed a peer
AGAIN_S = 0.05


class RayLauncher:
    """Starts `classes[role]` as one actor a member. `arguments` go to every constructor."""

    def __init__(
        self,
        *,
        namespace: str,
        classes: Mapping[str, type],
        arguments: Sequence[Any] = (),
        clock: Clock | None = None,
    ) -> None:
        self.namespace = namespace
        self._classes = dict(classes)
        self._arguments = tuple(arguments)
        self._clock = clock if clock is not None else SystemClock()
        self._handles: dict[Member, Any] = {}
        self._answered: set[Member] = set()

    # -- life

    def start(self, members: Sequence[Member]) -> None:
        """Begin to start those that are not known to run; an actor that lives under the name is adopted."""
        for member in members:
            if member not in self._handles:
                self._handles[member] = self._create(member)

    def ensure(self, members: Sequence[Member], *, deadline_s: float) -> None:
        """Return once every one of `members` answers; the dead are started anew."""
        missing = list(members)
        for left_s in tries(self._clock, deadline_s=deadline_s, first_s=AGAIN_S):
            self.start(missing)
            wait_s = {m: min(left_s, PING_S) if m in self._answered else left_s for m in missing}
            calls = {m: self._handles[m].ping.remote() for m in missing}
            silent = []
            for member, reference in calls.items():
                outcome = self._await(reference, wait_s[member])
                if isinstance(outcome, Answered):
                    self._answered.add(member)
                    continue
                # A dead actor's name is freed a little later: the next round starts it or meets it again.
                self.stop([member])
                silent.append(member)
            missing = silent
            if not missing:
                return
        raise MemberDiedError(
            f"{', '.join(map(str, missing))} did not answer within {deadline_s:g} s and were stopped; look at the "
            f"machine's load and memory",
            members=tuple(missing),
        )

    def stop(self, members: Sequence[Member]) -> None:
        """Kill these members' actors; unknown ones are looked up by name, so a stranger's members are found too."""
        for member in members:
            self._answered.discard(member)
            handle = self._handles.pop(member, None)
            try:
                ray.kill(handle if handle is not None else self._find(member), no_restart=True)
            except (ValueError, ray.exceptions.RayError):
                continue  # there is none, or it is gone: that is what was asked for

    def _find(self, member: Member) -> Any:
        return ray.get_actor(actor_name(member), namespace=self.namespace)

    def _create(self, member: Member) -> Any:
        declare: Any = ray.remote  # its annotations lack concurrency_groups
        actor = declare(concurrency_groups={CONTROL: CONTROL_THREADS})(self._classes[member.role])
        options = actor.options(
            name=actor_name(member),
            namespace=self.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
        )
        return options.remote(str(member), *self._arguments)

    # -- calls

    def call(self, member: Member, verb: str, *arguments: Any) -> Call:
        """Send a call; a member that is not known to run is looked up, and its absence is met in `result`."""
        handle = self._handles.get(member)
        if handle is None:
            try:
                handle = self._handles[member] = self._find(member)
            except ValueError:
                return Call(member=member, verb=verb, handle=None)
        return Call(member=member, verb=verb, handle=getattr(handle, verb).remote(*arguments))

    def ready(self, calls: Sequence[Call], *, timeout_s: float) -> list[Call]:
        """Those that have ended, waiting at most `timeout_s` for the first."""
        gone = [call for call in calls if call.handle is None]
        if gone or not calls:
            return gone
        done, _ = ray.wait(
            [call.handle for call in calls], num_returns=1, timeout=timeout_s, fetch_local=False
        )
        if done:
            done, _ = ray.wait(
                [call.handle for call in calls], num_returns=len(calls), timeout=0, fetch_local=False
            )
        return [call for call in calls if call.handle in done]

    def result(self, call: Call) -> Any:
        """The value of a call that has ended."""
        return judge({call.member: self._outcome(call)})[call.member]

    def gather(self, calls: Sequence[Call], *, deadline_s: float) -> list[Any]:
        """The values of all calls, in order; failures are judged together. One call a member."""
        outcomes: dict[Member, Outcome] = {}
        waiting = {call.member: call for call in calls}
        end_s = self._clock.monotonic() + deadline_s
        while waiting:
            left_s = max(end_s - self._clock.monotonic(), 0.0)
            for call in self.ready(list(waiting.values()), timeout_s=left_s):
                del waiting[call.member]
                outcome = outcomes[call.member] = self._outcome(call)
                if isinstance(outcome, Failed) and isinstance(outcome.error, PeerLostError):
                    end_s = min(end_s, self._clock.monotonic() + GRACE_S)
                elif not isinstance(outcome, Answered):
                    end_s = self._clock.monotonic()
            if self._clock.monotonic() >= end_s:
                break
        explained = any(_explains(outcome) for outcome in outcomes.values())
        for member in waiting:
            outcomes[member] = Silent(alive=explained or self._answers(member))
        self.stop([m for m, o in outcomes.items() if isinstance(o, Died) or o == Silent(alive=False)])
        values = judge(outcomes)
        return [values[call.member] for call in calls]

    def _answers(self, member: Member) -> bool:
        handle = self._handles.get(member)
        return handle is not None and isinstance(self._await(handle.ping.remote(), PING_S), Answered)

    def _outcome(self, call: Call) -> Outcome:
        return Died(why="it does not run") if call.handle is None else self._await(call.handle, PING_S)

    def _await(self, reference: Any, timeout_s: float) -> Outcome:
        try:
            return Answered(value=ray.get(reference, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError:
            return Silent(alive=False)
        except ray.exceptions.RayTaskError as error:  # the call raised: the member lives
            return Failed(error=error.cause if isinstance(error.cause, BaseException) else error)
        except ray.exceptions.RayError as error:
            return Died(why=type(error).__name__) if is_death(error) else Failed(error=error)


def _explains(outcome: Outcome) -> bool:
    """Does this outcome tell why the other calls have not ended?"""
    return isinstance(outcome, Died) or (
        isinstance(outcome, Failed) and not isinstance(outcome.error, PeerLostError)
    )


def actor_name(member: Member) -> str:
    """The name of a member's actor within its namespace: `trainer/1`."""
    return str(member)


def control(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of an actor class as answered beside whatever else the member does."""
    marked: Callable[..., Any] = ray.method(concurrency_group=CONTROL)(method)
    return marked
