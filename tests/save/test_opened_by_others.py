"""Segments, tables and the journal are read here by the packages of their formats alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch

import ckptstore
from ckptstore import Checkpointer, PerRank, Sharded
from ckptstore.tensor import DTYPES
from tests.save.runs import bits, save_all, tensor_bytes

# safetensors' torch side has no packed FP4 and no complex32; complex128 has no code of its own.
AS_THEMSELVES = sorted(
    name
    for name in DTYPES
    if name not in ("float4_e2m1fn_x2", "complex32", "complex128") and hasattr(torch, name)
)
IN_NUMPY = {"bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
            "float64", "complex64"}  # fmt: skip


def tensor_of(dtype: str) -> torch.Tensor:
    raw = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 6 * DTYPES[dtype], np.uint8)
    )
    return raw.bool().reshape(2, 3) if dtype == "bool" else raw.view(getattr(torch, dtype)).reshape(2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with ckptstore.begin(path, {"trainer": 2}) as inc:
        members = [Checkpointer(inc, role="trainer", rank=rank) for rank in range(2)]
        for step in (1, 2):
            save_all(members, step, [state(rank, step) for rank in range(2)])
        for member in members:
            member.close()
    return path


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "dtypes": {
            name: Sharded(tensor_of(name), global_shape=(2, 3), offset=(0, 0)) for name in AS_THEMSELVES
        }
        if rank == 0
        else {},
        "experts": Sharded.dim0(torch.full((2, 3), float(10 * rank + step)), start=2 * rank, size=4),
        "whole": torch.full((3,), float(step)),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "odd": {"a.b@c#d%e": torch.ones(1), "__metadata__": torch.zeros(1)},
        **(
            {"wide": Sharded(torch.ones(2, dtype=torch.complex128), global_shape=(2,), offset=(0,))}
            if rank
            else {}
        ),
        "rank": PerRank(torch.full((2,), rank)),
    }


def segments(folder: Path) -> list[Path]:
    found = sorted(folder.glob("data/f0001/s00000001-000/*.safetensors"))
    assert len(found) == 2
    return found


def test_the_safetensors_package_opens_segments_in_torch(folder: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in segments(folder):
        tensors |= load_torch(path)
    for name in AS_THEMSELVES:
        found = tensors[f"dtypes.{name}"]
        assert (found.dtype, tensor_bytes(found)) == (getattr(torch, name), tensor_bytes(tensor_of(name))), (
            name
        )
    assert (
        tensors["experts@0,0"].tolist() == [[1] * 3] * 2 and tensors["experts@2,0"].tolist() == [[11] * 3] * 2
    )
    assert tensors["whole"].tolist() == [1] * 3 and tensors["scalar"].item() == 5
    assert tensors["empty"].shape == (0, 3)
    assert tensors["odd.a.b%40c%23d%25e"].item() == 1 and tensors["odd.__metadata__"].item() == 0
    assert tensors["rank#0"].tolist() == [0, 0] and tensors["rank#1"].tolist() == [1, 1]
    assert tensors["wide"].dtype == torch.uint8 and tensors["wide"].numel() == 32


def test_the_safetensors_package_opens_segments_in_numpy(folder: Path) -> None:
    for path in segments(folder):
        with safe_open(path, framework="numpy") as opened:
            assert opened.metadata()["format"] == "ckptstore/1"
            assert opened.metadata()["attempt"] == "f0001/s00000001-000"
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                if name.removeprefix("dtypes.") in IN_NUMPY:
                    dtype = name.removeprefix("dtypes.")
                    assert bits(opened.get_tensor(name)) == bits(tensor_of(dtype).numpy()), name


def test_chunks_lie_aligned_for_readers_that_map_the_file(folder: Path) -> None:
    for path in segments(folder):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert (8 + length) % 4096 == 0
        sizes = {"I64": 8, "U64": 8, "F64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}
        end = 0
        for name, field in header.items():
            if name != "__metadata__":
                start, end_of = field["data_offsets"]
                assert start == end and (8 + length + start) % sizes.get(field["dtype"], 1) == 0
                end = end_of
        assert 8 + length + end == len(data)


def test_load_file_of_numpy_where_all_dtypes_are_numpys(tmp_path: Path) -> None:
    with ckptstore.begin(tmp_path, {"trainer": 1}) as inc:
        save_all(
            [Checkpointer(inc, role="trainer", rank=0)],
            1,
            [{"a": np.arange(6.0).reshape(2, 3), "b": np.int8(3)}],
        )
    (path,) = tmp_path.glob("data/*/*/*.safetensors")
    assert bits(load_numpy(path)) == bits({"a": np.arange(6.0).reshape(2, 3)})


DOCUMENTED = {
    "tensor": pa.int32(), "offset0": pa.int64(), "offset1": pa.int64(), "shape0": pa.int64(), "shape1": pa.int64(),
    "segment": pa.int32(), "start": pa.int64(), "nbytes": pa.int64(), "codec": pa.string(), "base": pa.string(),
    "reuses": pa.int32(), "digest": pa.binary(16), "stored_digest": pa.binary(16),
}  # fmt: skip


def joined(index: Path) -> list[dict[str, Any]]:
    """The rows with their tensors and segments, as any reader of Parquet joins them."""
    stem = str(index).removesuffix(".parquet")
    tensors, segments = (pq.read_table(f"{stem}.{name}.parquet") for name in ("tensors", "segments"))
    table = (
        pq.read_table(index)
        .join(tensors, "tensor")
        .join(segments.rename_columns({"nbytes": "segment_nbytes"}), "segment")
    )
    return table.sort_by([("tensor", "ascending"), ("offset0", "ascending")]).to_pylist()


def test_tables_are_parquet_whose_rows_find_every_byte(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/format-v1.md").read_text()
    (index,) = (p for p in folder.glob("index/f0001/s00000002-000-*.parquet") if p.name.count(".") == 1)
    table = pq.read_table(index)
    assert set(table.column_names) == set(DOCUMENTED)
    for name, kind in DOCUMENTED.items():
        assert table.schema.field(name).type == kind, name
        assert f"`{name.rstrip('01')}" in page, name
    rows = joined(index)
    assert len(rows) == len(table)
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    for row in rows:
        if row["name"] == "trainer/experts":
            data = (folder / row["key"]).read_bytes()[row["start"] : row["start"] + row["nbytes"]]
            assert np.frombuffer(data, np.float32).tolist() == [2.0 + 5 * row["offset0"]] * 6
            assert (row["dim0"], row["dim1"], row["shape0"], row["shape1"]) == (4, 3, 2, 3)
    assert {row["reuses"] for row in rows if row["name"] == "trainer/scalar"} == {1}
    parts = [pq.read_table(path) for path in folder.glob("parts/f0001/s00000002-000/*.parquet")]
    assert sum(len(part) for part in parts) == len(rows)
    meta = json.loads(pq.read_metadata(index).metadata[b"ckptstore"])
    assert meta["format"] == 1 and meta["kind"] == "index" and len(meta["parts"]) == 2


def test_the_journal_is_json(folder: Path) -> None:
    entries = [json.loads(path.read_text()) for path in sorted(folder.glob("journal/*.json"))]
    assert [entry["kind"] for entry in entries] == ["fence", "commit", "commit", "release"]
    assert [entry["slot"] for entry in entries] == [0, 1, 2, 3]
    assert [entry["step"] for entry in entries[1:3]] == [1, 2]
    assert json.loads((folder / "run.json").read_text())["run"] == entries[0]["run"]
    assert (folder / entries[1]["index"]["key"]).stat().st_size == entries[1]["index"]["nbytes"]
