"""The shards of every rank that trains DeepSeek-V4-Flash or -Pro, without a byte of tensor data.

Shapes, dtypes and what tensor parallelism cuts are read from deepseek-v4-shapes.json beside this file, which
names its public sources row by row. Benches plan and commit these layouts; tests hold their balance.

The state is a trainer's: BF16 weights (some kept FP32), FP32 masters of the BF16 ones, `exp_avg` and `exp_avg_sq`
of what is trained; each tensor has one name in the whole job, and each expert is a module of its own.

Ranks lie as in Megatron: pipeline stages one after the other, and within a stage tensor-parallel ranks side by
side. So of a stage with `n` ranks, rank `r` has tensor index `r % tp` and expert index `r % ep`:

| tensor | box of a rank | held by |
| --- | --- | --- |
| cut by column or row | its `tp`-th part along the hinted axis | the ranks of the stage with its tensor index |
| norms, router, compressors | the whole | all ranks of the stage |
| an expert's | the whole, if the expert is one of its `experts / ep` | the ranks of the stage with its expert index |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckptstore.tensor import Box, Shape, Shard, TensorSpec

SHAPES = Path(__file__).with_name("deepseek-v4-shapes.json")
FLASH, PRO = "DeepSeek-V4-Flash", "DeepSeek-V4-Pro"

_DTYPES = {"BF16": "bfloat16", "F32": "float32", "I64": "int64"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Param:
    """One tensor of the model: `layer` is None outside the layers, `axis` is what tensor parallelism cuts."""

    name: str
    shape: Shape
    dtype: str
    trained: bool
    layer: int | None
    expert: int | None
    axis: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # hashed by identity: `model` makes one a name
class Model:
    name: str
    layers: int
    experts: int
    params: tuple[Param, ...]
    state_nbytes: int  # of the trainer's whole state, as the table of shapes has it: without integer tables,
    # and with two bytes where `gate.bias` has four


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How `ranks` ranks share a model: `stages` are the layers of each pipeline stage."""

    ranks: int
    tp: int
    stages: tuple[int, ...]
    ep: int

    def __post_init__(self) -> None:
        per_stage, left = divmod(self.ranks, len(self.stages))
        if left or per_stage % self.tp or per_stage % self.ep:
            raise ValueError(f"{self}: stages, tp and ep do not divide the ranks")

    @property
    def per_stage(self) -> int:
        """Ranks of one stage."""
        return self.ranks // len(self.stages)

    def __str__(self) -> str:
        return f"TP{self.tp}·PP{len(self.stages)}·EP{self.ep} on {self.ranks:,}"


def even_stages(layers: int, count: int) -> tuple[int, ...]:
    """Layers of each of `count` stages; where they do not divide, the first and the last have fewer.

    Those hold the embedding and the head besides.
    """
    least, more = divmod(layers, count)
    order = sorted(range(count), key=lambda n: -min(n, count - 1 - n))
    longer = set(order[:more])
    return tuple(least + (n in longer) for n in range(count))


@cache
def model(name: str) -> Model:
    """FLASH or PRO without the block that predicts further tokens, which post-training does not train."""
    table = json.loads(SHAPES.read_text(encoding="utf-8"))["models"][name]
    config = table["config"]
    params = tuple(
        param for row in table["tensors"] if row["group"] != "mtp" for param in _params(row, config)
    )
    return Model(
        name=name,
        layers=config["num_hidden_layers"],
        experts=config["n_routed_experts"],
        params=params,
        state_nbytes=table["totals"]["training_state_backbone"]["total_bytes"],
    )


def _params(row: dict[str, Any], config: dict[str, Any]) -> Iterator[Param]:
    """The tensors of one row: `layers.{i}`, of some layers `{i<3}`, `{i>=3}` or `{i:ratio=4}`, and `experts.{e}`."""
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    hint = row["shard_axis_hint"] or ""
    found = re.search(r"\{i([^}]*)\}", row["name"])
    layers: list[int | None] = [None]
    if found:
        kind, number = re.fullmatch(r"(<|>=|:ratio=|)(\d*)", found[1]).groups()  # type: ignore[union-attr]  # the pattern matches every text
        layers = [
            n
            for n, ratio in enumerate(ratios)
            if not kind
            or (kind == "<" and n < int(number))
            or (kind == ">=" and n >= int(number))
            or (kind == ":ratio=" and ratio == int(number))
        ]
    experts: list[int | None] = [*range(config["n_routed_experts"])] if hint == "ep" else [None]
    for layer in layers:
        name = row["name"].replace(found[0], str(layer)) if found else row["name"]
        for expert in experts:
            yield Param(
                name=name.replace("{e}", str(expert)),
                shape=tuple(row["shape"]),
                dtype=_DTYPES[row["train_dtype"]],
                trained=row["trainable"],
                layer=layer,
                expert=expert,
                axis=int(hint.removeprefix("tp:")) if hint.startswith("tp:") else None,
            )


def shards(of: Model, parallel: Parallel, rank: int) -> tuple[Shard, ...]:
    """What `rank` holds: all weights, then masters, first and second moments, each layer by layer."""
    stage, local = divmod(rank, parallel.per_stage)
    first = sum(parallel.stages[:stage])
    layers: list[int | None] = [*range(first, first + parallel.stages[stage])]
    if stage in (0, len(parallel.stages) - 1):
        layers.insert(0, None)
    count = of.experts // parallel.ep
    start = local % parallel.ep * count
    experts = (None, *range(start, start + count))
    edges = _Edges(first=stage == 0, last=stage == len(parallel.stages) - 1)
    sets = _Sets(parallel, stage, local)
    return tuple(
        Shard(
            spec=_spec(f"trainer/{kind}.{param.name}", dtype, param.shape),
            box=_box(param, local % parallel.tp, parallel.tp),
            replicas=sets.of(param),
        )
        for kind, groups in _tensors(of)
        for layer in layers
        for expert in experts
        for param, dtype in groups.get((layer, expert), ())
        if layer is not None or edges.have(param)
    )


def all_shards(of: Model, parallel: Parallel) -> list[tuple[Shard, ...]]:
    """What each rank holds; ranks of one stage that hold the very same share one tuple."""
    found: dict[tuple[int, ...], tuple[Shard, ...]] = {}
    ranks = []
    for rank in range(parallel.ranks):
        stage, local = divmod(rank, parallel.per_stage)
        same = (stage, local % parallel.tp, local % parallel.ep)
        if same not in found:
            found[same] = shards(of, parallel, rank)
        ranks.append(found[same])
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """What lies outside the layers: the first stage has the embedding, the last one the rest."""

    first: bool
    last: bool

    def have(self, param: Param) -> bool:
        return self.first if param.name == "embed.weight" else self.last


class _Sets:
    """The three replica sets of one rank, one tuple each for all its shards."""

    def __init__(self, parallel: Parallel, stage: int, local: int) -> None:
        start = stage * parallel.per_stage
        everyone = range(start, start + parallel.per_stage)
        self._stage = _set(everyone)
        self._tensor = _set(everyone[local % parallel.tp :: parallel.tp])
        self._expert = _set(everyone[local % parallel.ep :: parallel.ep])

    def of(self, param: Param) -> tuple[int, ...]:
        if param.expert is not None:
            return self._expert
        return self._tensor if param.axis is not None else self._stage


@cache
def _set(ranks: range) -> tuple[int, ...]:
    return tuple(ranks) if len(ranks) > 1 else ()


_Groups = dict[tuple[int | None, int | None], list[tuple[Param, str]]]


@cache
def _tensors(of: Model) -> tuple[tuple[str, _Groups], ...]:
    """The four kinds of tensors of a state with their dtypes, each by layer and expert."""
    return (
        ("model", _grouped((param, param.dtype) for param in of.params)),
        ("master", _grouped((p, "float32") for p in of.params if p.trained and p.dtype == "bfloat16")),
        ("exp_avg", _grouped((p, "float32") for p in of.params if p.trained)),
        ("exp_avg_sq", _grouped((p, "float32") for p in of.params if p.trained)),
    )


def _grouped(tensors: Iterable[tuple[Param, str]]) -> _Groups:
    groups: _Groups = {}
    for param, dtype in tensors:
        groups.setdefault((param.layer, param.expert), []).append((param, dtype))
    return groups


@cache
def _spec(name: str, dtype: str, shape: Shape) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


@cache
def _box(param: Param, index: int, tp: int) -> Box:
    if param.axis is None:
        return Box.whole(param.shape)
    part, left = divmod(param.shape[param.axis], tp)
    if left:
        raise ValueError(f"{param.name}: {tp} tensor-parallel ranks do not divide {param.shape}")
    offset = tuple(index * part if n == param.axis else 0 for n in range(len(param.shape)))
    return Box(offset=offset, shape=tuple(part if n == param.axis else m for n, m in enumerate(param.shape)))


PRO_256 = Parallel(ranks=256, tp=8, stages=even_stages(61, 8), ep=32)
PRO_512 = Parallel(ranks=512, tp=1, stages=even_stages(61, 8), ep=64)
PRO_768 = Parallel(ranks=768, tp=1, stages=even_stages(61, 8), ep=96)
PRO_1024 = Parallel(ranks=1024, tp=1, stages=even_stages(61, 8), ep=64)
PRO_UNEVEN = Parallel(ranks=1024, tp=8, stages=(5, 7, 8, 9, 9, 9, 8, 6), ep=64)
FLASH_64 = Parallel(ranks=64, tp=8, stages=(5, 5, 6, 6, 6, 5, 5, 5), ep=8)
FLASH_PP4 = Parallel(ranks=64, tp=4, stages=(11, 11, 11, 10), ep=8)

# The layouts that training stacks use, and one with stages as unequal as nobody would choose.
LAYOUTS: tuple[tuple[str, Parallel], ...] = (
    (PRO, PRO_256),
    (PRO, PRO_512),
    (PRO, PRO_1024),
    (PRO, PRO_UNEVEN),
    (FLASH, FLASH_64),
    (FLASH, FLASH_PP4),
)
