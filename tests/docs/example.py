"""The worked example of docs/reference/format-v1.md: one run, the same bytes every time.

Two ranks save one step. Everything random or of this machine (ids, host, process, time) is given fixed
values, so that the page can show real bytes and a test can compare them. After a change of the format,
`python -m tests.docs.example` writes the page's example anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import ckptstore
from ckptstore.clock import SystemClock
from ckptstore.incarnation import begin  # now: an id that it draws when it is imported is not the run's
from ckptstore.store.memory import MemoryStore

PAGE = Path(__file__).parents[2] / "docs/reference/format-v1.md"
BEGIN, END = "<!-- example: begin -->", "<!-- example: end -->"
_ORDER = ("run.json", "journal", "index", "parts", "data", "layouts", "members", "alive")
_runs = itertools.count()


class LabelClock(SystemClock):
    def now(self) -> str:
        return "2026-05-04T10:22:31Z"

    def monotonic(self) -> float:
        return 0.0  # how long writing took is in each part


def state(rank: int) -> dict[str, Any]:
    return {
        "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
        "e": ckptstore.Sharded.dim0(torch.tensor([[0.5, 0.25, rank]]), start=rank, size=2),
        "rng": ckptstore.PerRank(rank),
        "step": 10,
    }


def make_example(url: str) -> MemoryStore:
    """Run the example and return the store that holds its objects."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def token_hex(nbytes: int) -> str:
        """Ids by thread and order: which of two ranks draws first does not matter."""
        with lock:
            name = threading.current_thread().name
            counts[name] += 1
            text = f"{name} {counts[name]}"
        return hashlib.blake2b(text.encode(), digest_size=nbytes).hexdigest()

    main = threading.current_thread()
    before, main.name = main.name, "example"
    try:
        with (
            mock.patch("secrets.token_hex", token_hex),
            mock.patch("socket.gethostname", lambda: "node-1"),
            mock.patch("os.getpid", lambda: 4242),
        ):
            _save(url)
    finally:
        main.name = before
    return MemoryStore.named(url.removeprefix("memory://"))


def _save(url: str) -> None:
    clock = LabelClock()
    with begin(url, {"trainer": 2}, job="example", clock=clock) as inc:
        ranks = [ckptstore.Checkpointer(inc.token, role="trainer", rank=n, clock=clock) for n in range(2)]
        handles = [ckpt.save(10, state(n)) for n, ckpt in enumerate(ranks)]
        for handle in handles:
            handle.result(60)
        for ckpt in ranks:
            ckpt.close()


# -- as text for the page


def wrapped(text: str, width: int = 118) -> list[str]:
    """One line of JSON cut after commas; joining the lines gives the bytes again."""
    lines, line = [], ""
    for piece in text.replace(",", ",\0").split("\0"):
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = ""
        line += piece
    return [*lines, line]


def hex_lines(data: bytes, start: int = 0) -> list[str]:
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{start + at:08x}  {row.hex(' '):47}  {text}")
    return lines


def segment_lines(data: bytes) -> list[str]:
    """The length, the JSON of the header, how much padding follows it, and the chunks."""
    header = 8 + int.from_bytes(data[:8], "little")
    text = data[8:header].decode()
    return [
        *hex_lines(data[:8]),
        *wrapped(text.rstrip(" ")),
        f"({len(text) - len(text.rstrip(' '))} spaces)",
        *hex_lines(data[header:], header),
    ]


def table_lines(data: bytes, *, rows: bool) -> list[str]:
    """The JSON under the key `ckptstore`, then the rows."""
    file = pq.ParquetFile(pa.BufferReader(data))
    lines = wrapped(file.metadata.metadata[b"ckptstore"].decode())
    if not rows:
        return lines
    names = file.schema_arrow.names
    for row in file.read().to_pylist():
        values = (row[n].hex() if isinstance(row[n], bytes) else json.dumps(row[n]) for n in names)
        lines += ["", *(f"{name:14}{value}" for name, value in zip(names, values, strict=True))]
    return lines


def render() -> str:
    """The part of the page between its two markers."""
    store = make_example(f"memory://format-example-{next(_runs)}")
    shown = []
    for info in sorted(
        store.list(""), key=lambda info: (_ORDER.index(info.key.split("/")[0]), len(info.key), info.key)
    ):
        data = store.read(info.key)
        kind = info.key.split("/")[0]
        if kind == "data":
            lines = segment_lines(data)
        elif kind in ("parts", "index"):
            lines = table_lines(data, rows=kind == "index")  # the parts hold the same rows
        else:
            lines = wrapped(data.decode())
        shown += [f"**`{info.key}`**, {info.nbytes} bytes", "", "```text", *lines, "```", ""]
    return "\n".join(shown)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render()}\n{END}{rest.split(END)[1]}", encoding="utf-8")
