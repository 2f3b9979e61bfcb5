"""How an attempt ended, as errors and as the journal's words.

Every member raises the same kind of error for one attempt, whether it judged the parts itself or reads
the verdict from the journal (protocol R14).
"""

from __future__ import annotations

from ckptstore.errors import (
    CkptStoreError,
    CorruptError,
    FencedError,
    IncompleteSaveError,
    InconsistentCutError,
)
from ckptstore.manifest import AttemptId, Member


def abandon_reason(error: CkptStoreError, who: str = "") -> str:
    """What the journal keeps of a failure: its kind, so that every member raises the same, and its text."""
    kind = "InconsistentCut" if isinstance(error, (InconsistentCutError, CorruptError)) else "IncompleteSave"
    return f"{kind}: {who}{error}"


def abandoned(attempt: AttemptId, reason: str) -> IncompleteSaveError | InconsistentCutError:
    """The error of an attempt that the journal gave up, as `abandon_reason` told it."""
    kind = InconsistentCutError if reason.startswith("InconsistentCut:") else IncompleteSaveError
    return kind(
        f"the attempt {attempt} was abandoned: {reason.split(': ', 1)[-1]}",
        step=attempt.step,
        missing=(),
        reason=reason,
    )


def fenced(attempt: AttemptId, held: int, current: int) -> FencedError:
    return FencedError(
        f"cannot commit step {attempt.step}: this process holds fence {held} but the run is at fence {current}; "
        f"exit without retrying, the job that raised it will resume",
        step=attempt.step,
        held=held,
        current=current,
    )


def refused(attempt: AttemptId, member: Member, reason: str) -> IncompleteSaveError:
    """The error of an attempt to which a member wrote a part that refuses (protocol R12)."""
    return IncompleteSaveError(
        f"save of step {attempt.step} failed on {member}: {reason}; the attempt {attempt} is given up and the "
        f"checkpoint before it stands",
        step=attempt.step,
        missing=(str(member),),
        reason=reason,
    )
