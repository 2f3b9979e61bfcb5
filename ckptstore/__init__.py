"""ckptstore: the checkpoint store for RL post-training, and the coordinator that brings the loop back.

The public names and no logic. They are imported when first used (PEP 562), so a process that needs no
torch (a coordinator, a catalog reader) never pays for it, nor for pyarrow or ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ckptstore.checkpointer import Checkpointer as Checkpointer
    from ckptstore.difference import Difference as Difference
    from ckptstore.difference import diff as diff
    from ckptstore.errors import AlreadyExistsError as AlreadyExistsError
    from ckptstore.errors import BudgetExceededError as BudgetExceededError
    from ckptstore.errors import CkptStoreError as CkptStoreError
    from ckptstore.errors import CorruptError as CorruptError
    from ckptstore.errors import FencedError as FencedError
    from ckptstore.errors import IncompleteSaveError as IncompleteSaveError
    from ckptstore.errors import InconsistentCutError as InconsistentCutError
    from ckptstore.errors import InternalError as InternalError
    from ckptstore.errors import InvalidInputError as InvalidInputError
    from ckptstore.errors import LayoutMismatchError as LayoutMismatchError
    from ckptstore.errors import MissingTensorError as MissingTensorError
    from ckptstore.errors import NoCheckpointError as NoCheckpointError
    from ckptstore.errors import NoRecoveryPointError as NoRecoveryPointError
    from ckptstore.errors import NotFoundError as NotFoundError
    from ckptstore.errors import OutcomeUnknownError as OutcomeUnknownError
    from ckptstore.errors import RunInUseError as RunInUseError
    from ckptstore.errors import StoreUnavailableError as StoreUnavailableError
    from ckptstore.errors import UnsupportedFormatError as UnsupportedFormatError
    from ckptstore.held import ExpertParallel as ExpertParallel
    from ckptstore.held import FlatShard as FlatShard
    from ckptstore.held import Frozen as Frozen
    from ckptstore.held import HeldBy as HeldBy
    from ckptstore.held import PerRank as PerRank
    from ckptstore.held import Sharded as Sharded
    from ckptstore.incarnation import Incarnation as Incarnation
    from ckptstore.incarnation import begin as begin
    from ckptstore.interop.torch_state import torch_state as torch_state
    from ckptstore.ledger import Ledger as Ledger
    from ckptstore.manifest import CheckpointInfo as CheckpointInfo
    from ckptstore.manifest import PublicationId as PublicationId
    from ckptstore.mapping import TensorMap as TensorMap
    from ckptstore.publish import Publisher as Publisher
    from ckptstore.publish import Subscriber as Subscriber
    from ckptstore.run import Run as Run
    from ckptstore.run import open as open
    from ckptstore.savehandle import SaveHandle as SaveHandle

__version__ = "0.1.0"

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "ckptstore.checkpointer": ("Checkpointer",),
    "ckptstore.savehandle": ("SaveHandle",),
    "ckptstore.difference": ("Difference", "diff"),
    "ckptstore.errors": (
        "AlreadyExistsError",
        "BudgetExceededError",
        "CkptStoreError",
        "CorruptError",
        "FencedError",
        "IncompleteSaveError",
        "InconsistentCutError",
        "InternalError",
        "InvalidInputError",
        "LayoutMismatchError",
        "MissingTensorError",
        "NoCheckpointError",
        "NoRecoveryPointError",
        "NotFoundError",
        "OutcomeUnknownError",
        "RunInUseError",
        "StoreUnavailableError",
        "UnsupportedFormatError",
    ),
    "ckptstore.held": ("ExpertParallel", "FlatShard", "Frozen", "HeldBy", "PerRank", "Sharded"),
    "ckptstore.incarnation": ("Incarnation", "begin"),
    "ckptstore.interop.torch_state": ("torch_state",),
    "ckptstore.ledger": ("Ledger",),
    "ckptstore.manifest": ("CheckpointInfo", "PublicationId"),
    "ckptstore.mapping": ("TensorMap",),
    "ckptstore.publish": ("Publisher", "Subscriber"),
    "ckptstore.run": ("Run", "open"),
}
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
