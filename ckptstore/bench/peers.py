"""Other libraries at work on the same state, each as its own documentation calls it.

None of them is needed: what is not installed is told, with how to install it. They run on local paths only.
"""

from __future__ import annotations

import importlib.util
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore.bench import disk
from ckptstore.bench.contestants import WAIT_S, Contestant, Facts
from ckptstore.bench.loops import Pending
from ckptstore.bench.states import State, memory_of


class Over:
    """A save that was over when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left to wait for."""


class _Folders:
    """What all peers have in common: a folder for each save."""

    def __init__(self) -> None:
        self._place = Path()
        self._newest = 0

    def open(self, place: str) -> None:
        self._place = Path(place)

    def folder(self, number: int) -> Path:
        self._newest = number
        return self._place / str(number)

    @property
    def newest(self) -> Path:
        return self._place / str(self._newest)

    def nbytes_written(self, number: int) -> int:
        return disk.nbytes_in(self._place / str(number))

    def keep_only(self, number: int) -> None:
        for path in self._place.iterdir():
            if path.name != str(number):
                shutil.rmtree(path)

    def reload(self) -> None:
        """Loads begin from nothing."""

    def close(self) -> None:
        """Nothing is held."""


def _dcp() -> Any:
    """torch.distributed.checkpoint, whose own types do not name all that its documentation does."""
    import torch.distributed.checkpoint as dcp

    return dcp


class Dcp(_Folders):
    """torch.distributed.checkpoint.save."""

    @property
    def facts(self) -> Facts:
        return _facts("dcp", "DCP", "torch", durable="files", background=False, extra_memory=0.2)

    def save(self, number: int, state: State) -> Pending:
        dcp = _dcp()
        writer = dcp.FileSystemWriter(self.folder(number), thread_count=2)
        dcp.save(state.nested(), storage_writer=writer, no_dist=True)
        return Over()

    def load(self, into: State) -> None:
        dcp = _dcp()
        dcp.load(into.nested(), storage_reader=dcp.FileSystemReader(self.newest), no_dist=True)


class _Future:
    """A save behind a concurrent.futures.Future."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        self._future.result(WAIT_S)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save with one stager for all saves, so that its memory is used again."""

    def __init__(self) -> None:
        super().__init__()
        self._stager: Any = None

    @property
    def facts(self) -> Facts:
        return _facts("dcp-async", "DCP async", "torch", durable="files", background=True, extra_memory=1.1)

    def save(self, number: int, state: State) -> Pending:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        dcp = _dcp()

        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        writer = dcp.FileSystemWriter(self.folder(number), thread_count=2)
        return _Future(
            dcp.async_save(state.nested(), storage_writer=writer, async_stager=self._stager, no_dist=True)
        )

    def reload(self) -> None:
        self.close()

    def close(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()


class TorchSnapshot(_Folders):
    """torchsnapshot.Snapshot.async_take."""

    @property
    def facts(self) -> Facts:
        return _facts(
            "torchsnapshot", "torchsnapshot", "torchsnapshot", durable="no", background=True, extra_memory=1.2
        )

    def save(self, number: int, state: State) -> Pending:
        import torchsnapshot

        taken = torchsnapshot.Snapshot.async_take(
            str(self.folder(number)), {"state": torchsnapshot.StateDict(**state.nested())}
        )
        found: Pending = taken  # it has done() and wait()
        return found

    def load(self, into: State) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot(str(self.newest)).restore({"state": torchsnapshot.StateDict(**into.nested())})


class _Waiting:
    """A save that can only be waited for: a thread does, so that it can be asked."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:
            self._failure = error  # raised by wait()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(WAIT_S)
        if self._failure is not None:
            raise self._failure


class Orbax(_Folders):
    """orbax.checkpoint.AsyncCheckpointer on NumPy arrays; what it restores is copied into the targets."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpointer: Any = None

    @property
    def facts(self) -> Facts:
        return _facts("orbax", "Orbax", "orbax-checkpoint", durable="yes", background=True, extra_memory=2.1)

    def save(self, number: int, state: State) -> Pending:
        import orbax.checkpoint as ocp

        self._checkpointer.save(
            self.folder(number), args=ocp.args.PyTreeSave({**_arrays(state), **state.values})
        )
        return _Waiting(self._checkpointer.wait_until_finished)

    def open(self, place: str) -> None:
        import orbax.checkpoint as ocp

        super().open(place)
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def load(self, into: State) -> None:
        import orbax.checkpoint as ocp

        arrays = _arrays(into)
        wanted = {**arrays, **into.values}
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in arrays}
        how |= {
            name: [ocp.RestoreArgs()] * len(value) if isinstance(value, list) else ocp.RestoreArgs()
            for name, value in into.values.items()
        }
        found = self._checkpointer.restore(
            self.newest, args=ocp.args.PyTreeRestore(item=wanted, restore_args=how)
        )
        for name, array in arrays.items():
            np.copyto(array, found[name])

    def close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()


class Safetensors(_Folders):
    """safetensors.torch.save_file and fsync, since training waits anyway; loads copy each mapped tensor."""

    @property
    def facts(self) -> Facts:
        return _facts(
            "safetensors", "safetensors", "safetensors", durable="no", background=False, extra_memory=1.05
        )

    def save(self, number: int, state: State) -> Pending:
        from safetensors.torch import save_file

        self.folder(number).mkdir()
        values = {name: str(value) for name, value in state.values.items()}
        save_file(dict(state.tensors), self.newest / "state.safetensors", values)
        disk.make_durable(self.newest)
        return Over()

    def load(self, into: State) -> None:
        from safetensors import safe_open

        with safe_open(self.newest / "state.safetensors", framework="pt") as file:
            for name, tensor in into.tensors.items():
                np.copyto(memory_of(tensor), memory_of(file.get_tensor(name)))


def _arrays(state: State) -> dict[str, Any]:
    """The state's memory as NumPy arrays; BF16 as the type of ml_dtypes, which NumPy lacks."""
    import ml_dtypes
    import torch

    return {
        name: (
            tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            if tensor.dtype == torch.bfloat16
            else tensor.numpy()
        )
        for name, tensor in state.tensors.items()
    }


def _facts(
    id: str, words: str, package: str, *, durable: str, background: bool, extra_memory: float
) -> Facts:
    return Facts(
        id=id,
        words=words,
        version=metadata.version(package),
        durable=durable,
        checksums="none",
        background=background,
        extra_memory=extra_memory,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that `--peers` may name, in one or several ways of using it."""

    id: str
    modules: tuple[str, ...]  # all must be there
    package: str
    ways: tuple[Callable[[], Contestant], ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.modules if not _is_there(name))


PEERS: Mapping[str, Peer] = {
    peer.id: peer
    for peer in (
        Peer(id="dcp", modules=("torch",), package="torch", ways=(Dcp, DcpAsync)),
        Peer(
            id="torchsnapshot",
            modules=("torchsnapshot",),
            package="torchsnapshot",
            ways=(TorchSnapshot,),
        ),
        Peer(
            id="orbax",
            modules=("orbax.checkpoint", "ml_dtypes"),
            package="orbax-checkpoint",
            ways=(Orbax,),
        ),
        Peer(id="safetensors", modules=("safetensors",), package="safetensors", ways=(Safetensors,)),
    )
}


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def quiet() -> None:
    """What peers warn of (torch without a process group, typed storages) is known here."""
    warnings.filterwarnings("ignore", module=r"torch\.|torchsnapshot|orbax|jax")
