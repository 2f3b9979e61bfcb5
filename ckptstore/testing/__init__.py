"""For tests of ckptstore and of what others build on it: conformance suites, faults, virtual time.

Needs the `test` extra for the conformance suites only, so the names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ckptstore.testing.clock import FakeClock as FakeClock
    from ckptstore.testing.conformance import StoreConformance as StoreConformance
    from ckptstore.testing.faults import FaultStore as FaultStore
    from ckptstore.testing.faults import SimulatedCrash as SimulatedCrash
    from ckptstore.testing.faults import count_calls as count_calls
    from ckptstore.testing.simulated import Chances as Chances
    from ckptstore.testing.simulation import Simulation as Simulation

_HOME: Final = {
    "Chances": "ckptstore.testing.simulated",
    "FakeClock": "ckptstore.testing.clock",
    "FaultStore": "ckptstore.testing.faults",
    "SimulatedCrash": "ckptstore.testing.faults",
    "Simulation": "ckptstore.testing.simulation",
    "StoreConformance": "ckptstore.testing.conformance",
    "count_calls": "ckptstore.testing.faults",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
