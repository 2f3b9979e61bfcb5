"""What a bench is asked to do, checked before anything is imported, allocated or written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptstore.bench.states import KINDS
from ckptstore.errors import InvalidInputError

PEER_NAMES = ("dcp", "torchsnapshot", "orbax", "safetensors")
SIZE_MIN = 16 << 20
BASE_NBYTES = 1 << 30  # what Python, torch and the peers' libraries take themselves
STATES_IN_MEMORY = 2  # the state, and memory that limits and loads use in turn
STATES_ON_DISK = 2.6  # two saves, a half, and slack for tables
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """`place` is the folder or URL under which a temporary one is made and removed."""

    place: str
    nbytes: int
    state: str
    peers: tuple[str, ...]
    rounds: int
    seed: int = 0

    @property
    def local(self) -> Path | None:
        """The folder, or None when the place is an object store or memory."""
        if self.place.startswith("file://"):
            return Path(self.place.removeprefix("file://"))
        return None if "://" in self.place else Path(self.place)


def parse(*, url: str, size: str, state: str, peers: str, rounds: int) -> BenchOptions:
    """Raises InvalidInputError for what can never work; looks at nothing outside of its arguments."""
    if state not in KINDS:
        raise InvalidInputError(f"--state {state} is not known; one of {', '.join(KINDS)}", state=state)
    if rounds < 1:
        raise InvalidInputError(f"--rounds {rounds} measures nothing; at least 1, better 5", rounds=rounds)
    return BenchOptions(
        place=url, nbytes=parse_size(size), state=state, peers=parse_peers(peers), rounds=rounds
    )


def parse_size(text: str) -> int:
    """`4GiB`, `512 MiB`: bytes in binary units."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB)\s*", text)
    if match is None:
        raise InvalidInputError(
            f"--size {text} is no size; a number with {', '.join(_UNITS)}, such as 4GiB", size=text
        )
    nbytes = int(float(match[1]) * _UNITS[match[2]])
    if nbytes < SIZE_MIN:
        raise InvalidInputError(
            f"--size {text} is too small to measure: at least {SIZE_MIN >> 20}MiB", size=text
        )
    return nbytes


def parse_peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("none",):
        return ()
    unknown = [name for name in names if name not in PEER_NAMES]
    if unknown:
        raise InvalidInputError(
            f"--peers {','.join(unknown)}: not known here; any of {', '.join(PEER_NAMES)}, or none",
            peers=names,
        )
    return names


def check_place(options: BenchOptions) -> None:
    """A local folder must be there and writable; other places are tried when their limit is measured."""
    folder = options.local
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InvalidInputError(
            f"{folder} is not a folder that can be written to; make it first, or give another",
            url=options.place,
        )


def check_room(
    options: BenchOptions,
    *,
    extra_memory: Sequence[float],
    memory_nbytes: int,
    disk_nbytes: int | None = None,
) -> None:
    """Refuse what does not fit. `extra_memory`: of each contestant, in states; they take turns."""
    wanted = int(options.nbytes * (STATES_IN_MEMORY + max(extra_memory))) + BASE_NBYTES
    fits = int((memory_nbytes - BASE_NBYTES) / (STATES_IN_MEMORY + max(extra_memory)))
    if wanted > memory_nbytes:
        raise InvalidInputError(
            f"a state of {_mib(options.nbytes)} needs {_mib(wanted)} of memory with these peers and "
            f"{_mib(memory_nbytes)} are free; {_smaller(fits)}",
            wanted_nbytes=wanted,
            free_nbytes=memory_nbytes,
        )
    if options.local is None:
        return
    free = shutil.disk_usage(options.local).free if disk_nbytes is None else disk_nbytes
    wanted = int(options.nbytes * STATES_ON_DISK)
    if wanted > free:
        raise InvalidInputError(
            f"a state of {_mib(options.nbytes)} needs {_mib(wanted)} of disk in {options.local} and "
            f"{_mib(free)} are free; {_smaller(int(free / STATES_ON_DISK))}",
            wanted_nbytes=wanted,
            free_nbytes=free,
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _smaller(fits: int) -> str:
    size = fits >> 20
    return f"try --size {size}MiB" if fits >= SIZE_MIN else "free some first"
