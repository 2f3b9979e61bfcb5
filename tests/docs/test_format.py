"""docs/reference/format-v1.md against the code: every table of fields, the worked example, what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ckptstore
from ckptstore import history, indexfile, segment, tablefile, wire
from ckptstore.history import Entry, Fold, Origin
from ckptstore.ledger import Ledger
from ckptstore.manifest import AttemptId, ObjectRef, Roster, journal_key
from ckptstore.plan.load import Read
from ckptstore.reader import fetch_chunks
from ckptstore.state import flatten
from ckptstore.store.memory import MemoryStore
from ckptstore.tensor import DTYPES, Box, TensorSpec
from tests.docs.example import BEGIN, END, PAGE, make_example, render

TEXT = PAGE.read_text(encoding="utf-8")
ID = AttemptId(fence=1, step=3)
REF = ObjectRef(key="index/x", nbytes=1, digest="00", tail=(1, "00"))


def section(heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level, _, _ = heading.partition(" ")
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", TEXT, re.S | re.M)
    assert found, f"{PAGE} has no heading {heading!r}"
    return found[1]


def first_column(heading: str, table: int = 0) -> list[str]:
    """The names, in backticks, of the first column of a section's table."""
    tables = re.findall(r"(?:^\|.*\n)+", section(heading), re.M)
    return [
        name for row in tables[table].splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


BODIES: tuple[tuple[str, history.Body], ...] = (
    (
        "### `fence`",
        history.FenceEntry(
            fence=1,
            replaces=0,
            origin=Origin(kind="start"),
            reason=None,
            roster=Roster.of({"trainer": 1}),
            job="j",
        ),
    ),
    (
        "### `commit`",
        history.CommitEntry(
            fence=1, id=ID, index=REF, witnesses={}, level="home", publication=None, counters={"nbytes": 1}
        ),
    ),
    ("### `abandon`", history.AbandonEntry(fence=1, id=ID, reason="r")),
    ("### `publish`", history.PublishEntry(fence=1, number=0, base=None, index=REF, digest="00")),
    ("### `bad` and `good`", history.MarkEntry(kind="bad", id=ID, segments=(), reason="r")),
    ("### `bad` and `good`", history.MarkEntry(kind="good", id=ID, segments=(), reason="r")),
    ("### `retire`", history.RetireEntry(ids=(ID,), policy="p")),
    ("### `release`", history.ReleaseEntry(fence=1)),
    ("### `summary`", history.SummaryEntry(state=wire.fold_to_json(Fold()))),
)


def entry(body: history.Body, **fields: Any) -> Entry:
    given: dict[str, Any] = {
        "slot": 0,
        "run": "r",
        "write": "w",
        "prev": "",
        "at": "t",
        "by": "b",
        "body": body,
    }
    return Entry(**{**given, **fields})


@pytest.mark.parametrize(("heading", "body"), BODIES, ids=lambda value: getattr(value, "kind", ""))
def test_the_fields_of_every_kind_are_those_on_the_page(heading: str, body: history.Body) -> None:
    told = wire.decode_entry(wire.encode_entry(entry(body)), "an entry")
    assert told.body == body
    stored = json.loads(wire.encode_entry(entry(body)))
    assert sorted(stored) == sorted([*first_column("### Every entry"), *first_column(heading)])


def test_every_kind_that_a_reader_knows_is_on_the_page() -> None:
    headings = re.findall(r"^### (`.*)$", section("## The journal"), re.M)
    known = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert {body.kind for _, body in BODIES} == known
    later = re.search(r"The kinds (.*) belong to this format", section("## The journal"))
    assert later and tuple(re.findall(r"`(\w+)`", later[1])) == wire.LATER_KINDS


def test_a_summary_holds_what_the_page_says() -> None:
    assert first_column("### `summary`", 1) == list(wire.fold_to_json(Fold()))
    assert f"Slots {history.SUMMARY_EVERY}, {2 * history.SUMMARY_EVERY}, …" in section("### `summary`")


@pytest.fixture(scope="module")
def store() -> Iterator[MemoryStore]:
    yield make_example("memory://format-test")


def only(store: MemoryStore, prefix: str) -> str:
    return sorted(info.key for info in store.list(prefix))[0]


IN_PARTS_ONLY = ("dtype", "ndim", "dim<d>")
TABLES = {"part": "### JSON of a part", "index": "### JSON of an index", "tensors": "", "segments": ""}


def table_key(store: MemoryStore, kind: str) -> str:
    if kind == "part":
        return only(store, "parts/")
    end = ".parquet" if kind == "index" else f".{kind}.parquet"
    return min((info.key for info in store.list("index/") if info.key.endswith(end)), key=len)


@pytest.mark.parametrize("kind", TABLES)
def test_parts_and_indexes_hold_what_the_page_says(store: MemoryStore, kind: str) -> None:
    file = pq.ParquetFile(pa.BufferReader(store.read(table_key(store, kind))))
    told = json.loads(file.metadata.metadata[tablefile.META])
    wanted = [*first_column("### JSON of all"), *(first_column(TABLES[kind]) if TABLES[kind] else ())]
    assert sorted(told) == sorted(wanted)
    headings = {"tensors": "### Tensors of an index", "segments": "### Segments of an index"}
    columns = first_column(headings.get(kind, "### Columns"))
    columns = [n for n in columns if kind != "index" or n not in IN_PARTS_ONLY]
    spread = [n.replace("<d>", str(d)) for n in columns for d in range(2 if "<d>" in n else 1)]
    assert file.schema_arrow.names == spread
    rows = re.findall(r"^\| `([\w<>]+)` \| [^|]+ \| ([^|]+) \|", section("### Columns"), re.M)
    encodings = {name: told.split(";")[kind == "index" and ";" in told].split()[0] for name, told in rows}
    for number, name in enumerate(spread):
        column = file.metadata.row_group(0).column(number)
        plain = name in tablefile.PLAIN
        if kind in ("part", "index"):
            encoding = encodings[re.sub(r"^(dim|offset|shape)\d$", r"\1<d>", name)]
            assert {"dictionary": "RLE_DICTIONARY"}.get(encoding, encoding) in column.encodings, name
        assert column.compression == ("UNCOMPRESSED" if plain else "ZSTD")
        assert column.statistics is None


def test_the_other_objects_hold_what_the_page_says(store: MemoryStore) -> None:
    assert sorted(json.loads(store.read("run.json"))) == sorted(first_column("## run.json"))
    told = dict(re.findall(r"^\| `(\w+)/…` \| ([^|]+) \|", section("## Claims and beats"), re.M))
    for prefix in ("members", "alive"):
        assert sorted(json.loads(store.read(only(store, f"{prefix}/")))) == sorted(
            re.findall(r"`(\w+)`", told[prefix])
        )
    prefixes = {key.split("/")[0] for key in first_column("## Keys")}
    assert {info.key.split("/")[0] for info in store.list("")} <= prefixes
    assert sorted(first_column("### Ledgers")) == sorted(Ledger().to_json())


def test_the_dtypes_are_those_on_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `(\w+)`", section("### dtypes"), re.M)
    assert {name: int(size) for name, size, _ in rows} == dict(DTYPES)
    for name, _, code in rows:
        spec = TensorSpec(name="trainer/t", dtype=name, shape=(2, 4))
        template = segment.HeaderTemplate.of([spec], [Box.whole((2, 4))])
        header = template.fill([0], [8 * DTYPES[name]], {})
        told = segment.parse_header(header, "a header")["t"]
        assert told["dtype"] == code
        as_bytes = code == "U8" and name != "uint8"
        assert told["shape"] == ([2, 8] if code == "F4" else [8 * DTYPES[name]] if as_bytes else [2, 4])
        assert len(header) == template.nbytes and len(header) % 4096 == 0


def test_the_tags_are_those_on_the_page() -> None:
    import numpy as np
    import torch

    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    values = {
        "d": {},
        "l": [],
        "t": (),
        "T": torch.zeros(1),
        "N": np.zeros(1),
        "p": ckptstore.PerRank(1),
        "z": ckptstore.Frozen({}),
        "o": Holder(),
        "x": ckptstore.ExpertParallel({}, "layers.*.{expert}", 2, experts=[]),
        "ledger": ckptstore.Ledger(),
        "f": float("inf"),
        "i": 1 << 63,
        "s": "\ud800",
        "c": 1j,
        "b": b"",
        "n": np.float32(1),
    }
    assert first_column("## The state") == list(values)
    ((_, pairs),) = flatten(values, role="trainer", rank=0).skeleton.items()
    assert [next(iter(node)) for _, node in pairs] == list(values)
    plain = {"n": None, "b": True, "t": "a", "f": 1.5, "i": (1 << 63) - 1, "neg": -(1 << 63) + 1}
    ((_, pairs),) = flatten(plain, role="trainer", rank=0).skeleton.items()
    assert dict(pairs) == plain


def test_the_worked_example_is_what_the_code_writes() -> None:
    if version("pyarrow") not in (PAGE.parents[2] / "constraints.txt").read_text():
        pytest.skip("the example shows the Parquet bytes of another pyarrow")
    shown = TEXT.split(BEGIN)[1].split(END)[0].strip()
    assert shown == render().strip(), "after a change of the format: python -m tests.docs.example"


# -- what a reader refuses


def damaged(store: MemoryStore, fields: dict[str, Any]) -> bytes:
    """The commit entry with other fields and a right check."""
    value = {**json.loads(store.read(journal_key(1))), **fields}
    del value["check"]
    return wire.canonical({**value, "check": wire.digest_of(wire.canonical(value))})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"slot": 2}, ckptstore.CorruptError),
        ({"run": "another"}, ckptstore.CorruptError),
        ({"prev": "00"}, ckptstore.CorruptError),
        ({"index": None}, ckptstore.CorruptError),
        ({"kind": "compact"}, ckptstore.UnsupportedFormatError),
        ({"kind": "of a newer format"}, ckptstore.UnsupportedFormatError),
    ],
)
def test_entries_that_readers_refuse(fields: dict[str, Any], kind: type[Exception]) -> None:
    name = "memory://format-refused-" + "-".join(f"{k}{v}" for k, v in fields.items()).replace(" ", "")
    store = make_example(name)
    store.replace(journal_key(1), damaged(store, fields))
    with pytest.raises(kind):
        ckptstore.open(name).checkpoints()


def test_bytes_that_are_not_canonical_are_refused_and_unknown_fields_are_not(store: MemoryStore) -> None:
    data = store.read(journal_key(1))
    with pytest.raises(ckptstore.CorruptError):
        wire.decode_entry(data.replace(b'"slot":1', b'"slot": 1'), "an entry")
    assert wire.decode_entry(damaged(store, {"later": "field"}), "an entry").slot == 1


def test_a_codec_of_a_later_version_is_refused(store: MemoryStore) -> None:
    key = table_key(store, "index")
    table = indexfile.decode_index(store.read(key), key, lambda ref: store.read(ref.key)).table
    read = Read(segment=table.segments[0], start=0, nbytes=1, rows=np.array([0]))
    with pytest.raises(ckptstore.UnsupportedFormatError, match="lz99"):
        fetch_chunks(store, replace(table, codecs=("lz99",)), read, [])


def test_a_newer_format_is_refused() -> None:
    store = make_example("memory://format-newer")
    value = json.loads(store.read("run.json"))
    store.replace("run.json", wire.canonical({**value, "format": 2}))
    with pytest.raises(ckptstore.UnsupportedFormatError):
        ckptstore.open("memory://format-newer")
