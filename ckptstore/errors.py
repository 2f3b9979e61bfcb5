"""The error tree: one class for each thing a caller would do differently.

Every error is one sentence (what failed, the values, what to do next) and keeps its values as
attributes, so a program can act on what a person reads. docs/reference/errors.md lists them all.
"""

from __future__ import annotations

from typing import Any


class CkptStoreError(Exception):
    """Base of all errors of this package; `values` are also attributes of the same names."""

    def __init__(self, message: str, **values: Any) -> None:
        super().__init__(message)
        self.message = message
        self.values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"{type(self).__name__} has no value named {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.values))


def _rebuild(kind: type[CkptStoreError], message: str, values: dict[str, Any]) -> CkptStoreError:
    return kind(message, **values)


class StoreUnavailableError(CkptStoreError):
    """The store did not do what was asked, and nothing was changed: free space, mend it, try again."""


class OutcomeUnknownError(CkptStoreError):
    """A create may or may not have landed: read the key back before deciding anything."""


class AlreadyExistsError(CkptStoreError):
    """The key is taken by another writer's object."""


class FencedError(CkptStoreError):
    """A newer incarnation of the job owns the run. Never retry; exit."""


class RunInUseError(CkptStoreError):
    """The run's newest incarnation is alive and belongs to another job."""


class IncompleteSaveError(CkptStoreError):
    """Parts of required members never came; the attempt was abandoned in the journal."""


class InconsistentCutError(CkptStoreError):
    """The parts contradict each other; the attempt was abandoned in the journal."""


class NotFoundError(CkptStoreError):
    """There is no such object, checkpoint or tensor."""


class NoCheckpointError(NotFoundError):
    """The run has no checkpoint that fits the request."""


class MissingTensorError(NotFoundError):
    """The checkpoint lacks tensors or values that were asked for; all are listed."""


class CorruptError(CkptStoreError):
    """Stored bytes are not what was written; read another copy or an older checkpoint."""


class UnsupportedFormatError(CkptStoreError):
    """Written by a newer format, or with a feature that this version lacks: upgrade ckptstore."""


class InvalidInputError(CkptStoreError):
    """The caller's input cannot be right; nothing was changed."""


class LayoutMismatchError(InvalidInputError):
    """Tensors, dtypes, shapes or ranks do not fit together; all that differ are listed."""


class BudgetExceededError(CkptStoreError):
    """One request needs more memory than the whole budget, or did not get it within its time."""


class NoRecoveryPointError(CkptStoreError):
    """There are checkpoints, but none that this incarnation may restore: a person must choose."""


class InternalError(CkptStoreError):
    """An invariant of ckptstore itself was broken: please report it."""
