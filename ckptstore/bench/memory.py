"""Memory and CPU time of this process and its children, as the kernel counts them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ckptstore.bench.states import Bytes
from ckptstore.store.direct import aligned

PAGE = 2 << 20
_TICKS = os.sysconf("SC_CLK_TCK")


def take(nbytes: int) -> Bytes:
    """Memory that is touched, aligned for direct I/O, and in huge pages where the kernel grants them."""
    memory = aligned(max(-(-nbytes // PAGE) * PAGE, PAGE))
    memory[::4096] = 1
    return memory


def _field(path: str, name: str) -> int:
    """A line `name  12 kB` of a file in /proc, in bytes."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")


class Peak:
    """`nbytes`: how far resident memory rose above what it was. None where the kernel does not tell."""

    nbytes: int | None = None


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the most memory that the block takes on top. Memory that was freed before is given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    peak = Peak()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        yield peak
        return
    before = _field("/proc/self/status", "VmRSS:")
    yield peak
    peak.nbytes = max(_field("/proc/self/status", "VmHWM:") - before, 0)


def cpu_s() -> float:
    """CPU seconds of this process so far, all threads, and of its living and ended descendants."""
    spent = time.process_time() + sum(os.times()[2:4])
    return spent + sum(_cpu_of(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _cpu_of(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0
