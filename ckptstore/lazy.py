"""Stage a state while the next forward and backward run: only the next parameter update waits.

Forward and backward change no parameter and no optimizer state, so their copying may be put beside them. What
does not count its changes (numpy arrays, inference tensors) is copied at the call. Every other tensor tells by
its version whether it was changed in place before it was copied; then the save fails, and says of which.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.held import torch_module
from ckptstore.snapshot import Snapshot
from ckptstore.tensor import TensorSpec


@dataclass(slots=True, eq=False)
class LazyStaging:
    """The copying of one save, under way in another thread. Optimizers of this process wait for it."""

    _under_way: Future[None]

    @classmethod
    def start(
        cls,
        snapshot: Snapshot,
        specs: Sequence[TensorSpec],
        data: Sequence[Any],
        places: tuple[int, ...] | None,
        thread: Executor,
    ) -> LazyStaging:
        """Returns at once; what cannot be watched is copied before."""
        held, versions = list(data), _versions(data)
        unseen = [n for n, version in enumerate(versions) if version is None]
        if unseen:
            places = None
            for n in unseen:
                held[n] = _copied(data[n])

        def check() -> None:
            now = _versions(held)
            changed = [specs[n].name for n, version in enumerate(versions) if version not in (None, now[n])]
            if changed:
                more = "" if len(changed) < 4 else f" and {len(changed) - 3} more"
                raise InvalidInputError(
                    f"{', '.join(changed[:3])}{more} changed while it was staged: call handle.wait_staged() before "
                    f"changing what an optimizer does not, or save without lazy=True",
                    names=changed,
                )

        snapshot.follow()  # after the copies above, which the streams of this thread make
        staging = cls(thread.submit(snapshot.stage_unchanged, held, places, check))
        if torch_module() is not None:
            from ckptstore.interop.torch_hook import hold_steps, release_steps

            hold_steps(staging.wait)
            staging._under_way.add_done_callback(lambda _: release_steps(staging.wait))
        return staging

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once all is copied, or copying has failed (which the save's result tells). TimeoutError."""
        if not wait([self._under_way], timeout_s).done:
            raise TimeoutError(f"the state is not staged after {timeout_s:g} s")


def _versions(data: Sequence[Any]) -> list[int | None]:
    if torch_module() is None:
        return [None] * len(data)
    from ckptstore.interop.torch_tensor import versions_of

    return versions_of(data)


def _copied(data: Any) -> Any:
    return data.copy() if isinstance(data, np.ndarray) else data.clone()
