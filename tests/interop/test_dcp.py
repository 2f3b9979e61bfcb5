"""torch.distributed.checkpoint over ckptstore, in one process: torch's own writer and reader are the oracle."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptstore
from ckptstore.interop import dcp_items
from ckptstore.interop.dcp import StorageReader, StorageWriter, import_checkpoint
from ckptstore.interop.dcp_names import entries, nest, step_of
from tests.save import runs
from tests.save.runs import bits, new_url

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_cached_plans() -> Iterator[None]:
    """torch keeps cached plans in the class, for the life of the process."""
    yield
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{name}").clear()


def save(state: dict[str, Any], writer: Any, planner: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state, storage_writer=writer, planner=planner, no_dist=True, **options)


def load(state: dict[str, Any], reader: Any, planner: Any = None, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True, **options)
    return state


def everything(reader: Any, keys: Any = None) -> dict[str, Any]:
    """The whole checkpoint without a target, as `dcp_to_torch_save` loads it."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True
    )
    return state


def cause(raised: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return raised.value.failures[rank][0]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.tuples(st.integers(), st.text(max_size=3)),
    st.lists(st.integers(), max_size=3),
)
tensors = st.sampled_from(
    [
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).t(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.arange(4).to(torch.float8_e4m3fn),
    ]
)
names = st.text(alphabet="ab@#%é", min_size=1, max_size=3)
states = st.dictionaries(
    names,
    st.recursive(
        values | tensors,
        lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@pytest.mark.parametrize("flat", [True, False])
@settings(max_examples=40)
@given(state=states)
def test_a_state_comes_back_as_torchs_own_writer_gives_it_back(
    tmp_path_factory: pytest.TempPathFactory, flat: bool, state: dict[str, Any]
) -> None:
    """Under both ways to plan; and to `ckptstore.open`, which keeps the nesting."""
    folder, url = tmp_path_factory.mktemp("torch"), new_url()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flat)
    save(state, dcp.FileSystemWriter(folder, sync_files=False), planner)
    save(state, StorageWriter(url), dcp.DefaultSavePlanner(flatten_state_dict=flat))
    try:
        theirs = everything(dcp.FileSystemReader(folder))
    except CheckpointException:
        assume(False)  # torch cannot load some lists that it saved: of empty dicts, say
    assert bits(everything(StorageReader(url))) == bits(theirs)
    assert bits(ckptstore.open(url).read()) == bits(theirs)


NESTED = {
    "model": {"layers.0.w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}], "m": [torch.ones(3)]},
    "rng": ("mt", np.arange(4, dtype=np.uint32), torch.arange(2)),
    "step": 7,
    "name": "é@#%",
}


def blank() -> dict[str, Any]:
    return {
        "model": {"layers.0.w": torch.zeros(4, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "optim": {"param_groups": [{"lr": 0.0, "betas": (0, 0), "params": []}], "m": [torch.zeros(3)]},
        "rng": None,
        "step": 0,
        "name": "",
    }


def test_what_dcp_saves_a_checkpointer_restores_and_verify_reads() -> None:
    url = new_url()
    save(NESTED, StorageWriter(url))
    state = {**blank(), "rng": ("", np.zeros(4, np.uint32), torch.zeros(2, dtype=torch.int64))}
    runs.restore(url, state)
    assert bits(state) == bits(NESTED)
    assert ckptstore.open(url).verify(full=True).ok


def test_what_a_checkpointer_saves_dcp_loads() -> None:
    url = new_url()
    module = torch.nn.Linear(3, 2)
    runs.save(
        url,
        {
            **NESTED,
            "module": module,
            "own": ckptstore.PerRank(1),
            "frozen": ckptstore.Frozen({"t": torch.ones(2)}),
        },
    )
    state = {
        **blank(),
        "module": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)},
        "frozen": {"t": torch.zeros(2)},
    }
    load(state, StorageReader(url))
    assert bits(state) == bits(
        {**NESTED, "module": dict(module.state_dict()), "frozen": {"t": torch.ones(2)}}
    )


def test_shards_of_several_ranks_load_whole_or_in_part() -> None:
    """Saved by three ranks of ckptstore in uneven rows; the values differ in where they stand."""
    url, rows = new_url(), torch.arange(35.0).reshape(7, 5)
    shares = [(0, 3), (3, 4), (4, 7)]
    runs.save(
        url,
        *(
            {"w": ckptstore.Sharded.dim0(rows[a:b].clone(), start=a, size=7), f"loader_{rank}": rank}
            for rank, (a, b) in enumerate(shares)
        ),
    )
    state = load({"w": torch.zeros(7, 5), "loader_0": -1, "loader_2": -1}, StorageReader(url))
    assert bits(state) == bits({"w": rows, "loader_0": 0, "loader_2": 2})


def test_a_target_of_another_dtype_or_stride_is_filled_as_torch_fills_it() -> None:
    url = new_url()
    save({"w": torch.arange(6.0).reshape(2, 3)}, StorageWriter(url))
    state = {"w": torch.zeros(3, 2, dtype=torch.bfloat16).t()}
    kept = state["w"]
    load(state, StorageReader(url))
    assert state["w"] is kept and kept.tolist() == [[0, 1, 2], [3, 4, 5]] and not kept.is_contiguous()


def test_a_value_that_the_planner_did_not_flatten_is_given_back_as_one() -> None:
    url = new_url()
    save(NESTED, StorageWriter(url), dcp.DefaultSavePlanner(flatten_state_dict=False))
    # with flatten_sharded_tensors torch's planner puts values into a copy of the state
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert bits(load(dict.fromkeys(NESTED), StorageReader(url), planner)) == bits(NESTED)
    assert bits(ckptstore.open(url).read()) == bits(NESTED)


def test_ranks_that_open_the_run_at_two_moments_read_one_checkpoint() -> None:
    url = new_url()
    save({"w": torch.ones(2), "n": 1}, StorageWriter(url))
    coordinator, other = StorageReader(url), StorageReader(url)
    coordinator.read_metadata()
    save({"w": torch.full((2,), 2.0), "n": 2}, StorageWriter(url))
    state = {"w": torch.zeros(2), "n": 0}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, other.read_metadata(), False)
    plan = planner.create_local_plan()
    _, plan = coordinator.prepare_global_plan([plan, plan])
    other.read_data(plan, planner).wait()
    assert state["w"].tolist() == [1, 1] and state["n"] == 1


def test_tied_weights_go_both_ways() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    url, saved = new_url(), Tied()
    runs.save(url, {"model": saved})
    state = {"model": {name: torch.zeros(4, 3) for name in ("embed.weight", "head.weight")}}
    load(state, StorageReader(url))
    assert all(torch.equal(each, saved.embed.weight) for each in state["model"].values())
    save({"model": saved.state_dict()}, StorageWriter(url))
    fresh = Tied()
    runs.restore(url, {"model": fresh})
    assert torch.equal(fresh.head.weight, saved.head.weight) and fresh.head.weight is fresh.embed.weight


def test_large_tensors_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_items, "CHUNK_NBYTES", 64)
    url, tensor = new_url(), torch.arange(100.0).reshape(25, 4)
    save({"w": tensor, "t": tensor.t()}, StorageWriter(url))
    run = ckptstore.open(url)
    assert len(run.catalog.index(run.latest().id).table) > 12  # type: ignore[union-attr]  # it was just saved
    assert bits(load({"w": torch.zeros(25, 4), "t": torch.zeros(4, 25)}, StorageReader(url))) == bits(
        {"w": tensor, "t": tensor.t()}
    )


# -- partial loads and errors


def test_a_missing_key_is_torchs_own_error_or_passed_over() -> None:
    url = new_url()
    save({"w": torch.ones(2)}, StorageWriter(url))
    with pytest.raises(CheckpointException) as raised:
        load({"w": torch.zeros(2), "x": torch.zeros(1)}, StorageReader(url))
    assert "Missing key in checkpoint state_dict: x." in str(cause(raised))
    state = load(
        {"w": torch.zeros(2), "x": torch.zeros(1)},
        StorageReader(url),
        dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    assert state["w"].tolist() == [1, 1] and state["x"].tolist() == [0]
    with pytest.raises(CheckpointException) as raised:
        load({"w": torch.zeros(3)}, StorageReader(url))
    assert "Size mismatch" in str(cause(raised))


def test_only_what_is_asked_for_is_read_and_damage_is_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(4096), "x": torch.full((4096,), 2.0), "y": torch.ones(5)}
    save(state, StorageWriter(tmp_path / "run"))
    (segment,) = (tmp_path / "run/data").rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    at = data.index(torch.full((4096,), 2.0).numpy().tobytes()) + 100
    data[at] ^= 1
    segment.chmod(0o644)
    segment.write_bytes(data)
    assert everything(StorageReader(tmp_path / "run"), keys={"w"})["w"].tolist() == [1] * 4096
    with pytest.raises(CheckpointException) as raised:
        load({"x": torch.zeros(4096)}, StorageReader(tmp_path / "run"))
    error = cause(raised)
    assert isinstance(error, ckptstore.CorruptError) and error.tensor == "trainer/x"


class Unpicklable:
    def __init__(self) -> None:
        self.a = 1


@pytest.mark.parametrize(
    "value",
    [Unpicklable(), {1, 2}, torch.float32, (1, torch.nn.Linear(1, 1)), (ckptstore.PerRank(3),)],
    ids=["object", "set", "dtype", "module", "wrapper"],
)
def test_what_only_pickle_could_keep_is_refused_by_name_and_nothing_is_visible(value: Any) -> None:
    url = new_url()
    save({"w": torch.ones(1)}, StorageWriter(url))
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.zeros(1), "inner": {"bad": value}}, StorageWriter(url))
    assert isinstance(cause(raised), ckptstore.InvalidInputError) and "inner.bad" in str(cause(raised))
    run = ckptstore.open(url)
    assert [info.step for info in run.checkpoints()] == [1] and run.read()["w"].tolist() == [1]
    assert any("inner.bad" in reason for reason in run.catalog.history.fold.abandoned.values())


def test_a_planner_that_only_gives_pickled_bytes_may_save_tensors_alone() -> None:
    class Opaque(dcp.DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]  # the planner that lacks it is the case

        def resolve_data(self, write_item: Any) -> Any:
            return self.state_dict[write_item.index.fqn]

    url = new_url()
    save({"w": torch.ones(1)}, StorageWriter(url), Opaque())
    with pytest.raises(CheckpointException) as raised:
        save({"w": torch.ones(1), "n": 1}, StorageWriter(url), Opaque())
    assert "n is no tensor" in str(cause(raised)) and "lookup_object" in str(cause(raised))


def test_a_planner_that_renames_and_converts_decides_what_is_stored() -> None:
    class Half(dcp.DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner(
                {f"ema_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator
            )

        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object.half() if isinstance(object, torch.Tensor) else object

    url = new_url()
    save({"m": {"w": torch.ones(2)}, "n": 3}, StorageWriter(url), Half())
    read = ckptstore.open(url).read()
    assert bits(read) == bits({"ema_m": {"w": torch.ones(2, dtype=torch.float16)}, "ema_n": 3})


# -- steps and incarnations


@pytest.mark.parametrize(
    ("id", "step"),
    [
        ("out/step-100", 100),
        ("out/step-100/", 100),
        ("epoch=3-step=12.ckpt", 12),
        ("7", 7),
        ("final", None),
        ("v1.5", None),
        ("run2/final", None),
    ],
)
def test_a_checkpoint_id_names_the_step_that_it_ends_in(id: str, step: int | None) -> None:
    assert step_of(id) == step == step_of(Path(id))


def test_steps_come_from_the_id_or_follow_and_are_read_back_by_it(tmp_path: Path) -> None:
    writer = StorageWriter()  # as TorchTitan would use it: folder and step both in the id
    for n in (10, 20):
        save({"n": n}, writer, checkpoint_id=str(tmp_path / f"step-{n}"))
    save({"n": 21}, StorageWriter(tmp_path))
    run = ckptstore.open(tmp_path)
    assert [info.step for info in run.checkpoints()] == [10, 20, 21] and writer.checkpoint_id.endswith("20")
    assert load({"n": 0}, StorageReader(), checkpoint_id=tmp_path / "step-10") == {"n": 10}
    assert load({"n": 0}, StorageReader(tmp_path)) == {"n": 21}
    assert load({"n": 0}, StorageReader(tmp_path, step=20)) == {"n": 20}
    for wrong, said in (("final", "names no step"), ("step-5", "has no checkpoint of step 5")):
        with pytest.raises(CheckpointException, match=said):
            load({"n": 0}, StorageReader(tmp_path), checkpoint_id=wrong)
    with pytest.raises(CheckpointException, match="names no step"):
        save({"n": 0}, StorageWriter(tmp_path), checkpoint_id="final")
    with pytest.raises(CheckpointException, match="url"):
        save({"n": 0}, StorageWriter())


def test_a_step_saved_again_is_another_checkpoint_unless_that_is_forbidden() -> None:
    url = new_url()
    writer = StorageWriter(url, step=4)
    save({"n": 1}, writer)
    save({"n": 2}, writer)
    assert ckptstore.open(url).read(step=4) == {"n": 2}
    writer.step = None
    with pytest.raises(CheckpointException, match="never decrease"):
        save({"n": 3}, writer, checkpoint_id="3")
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save({"n": 3}, StorageWriter(url, step=4, overwrite=False))
    assert [info.status for info in ckptstore.open(url).checkpoints()] == ["ok", "ok"]


def test_a_newer_incarnation_fences_the_writer_off_and_a_copy_of_its_own_job_does_not() -> None:
    url = new_url()
    writer = StorageWriter(url)
    save({"n": 1}, writer)
    copy = pickle.loads(pickle.dumps(writer))  # torch's checkpoint process works with such a copy
    save({"n": 2}, copy)
    save({"n": 3}, writer)
    with ckptstore.begin(url, {"trainer": 1}, takeover=True, job="another"):
        with pytest.raises(CheckpointException) as raised:
            save({"n": 4}, writer)
        assert isinstance(cause(raised), ckptstore.FencedError)
    assert ckptstore.open(url).read() == {"n": 3}


def test_a_fence_raised_while_a_rank_writes_stops_the_commit() -> None:
    url = new_url()
    writer = StorageWriter(url)
    save({"n": 1}, writer)

    class Slow(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            ckptstore.begin(url, {"trainer": 1}, takeover=True, job="another").close()
            return super().finish_plan(new_plan)

    class Slower(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            ckptstore.begin(url, {"trainer": 1}, takeover=True, job="another").close()
            return object

    for planner, used in ((Slow(), writer), (Slower(), StorageWriter(url, takeover=True))):
        with pytest.raises(CheckpointException) as raised:
            save({"w": torch.ones(1)}, used, planner)
        assert isinstance(cause(raised), ckptstore.FencedError)
    assert ckptstore.open(url).read() == {"n": 1}


def test_cached_plans_of_earlier_saves_do_not_carry_their_attempt_along() -> None:
    url = new_url()
    writer = StorageWriter(url)
    for n, used in enumerate((writer, writer, StorageWriter(url), StorageWriter(new_url())), 1):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        save({"w": torch.full((2,), float(n)), "n": n}, used, planner)
    run = ckptstore.open(url)
    assert [info.step for info in run.checkpoints()] == [1, 2, 3]
    assert bits(run.read()) == bits({"w": torch.full((2,), 3.0), "n": 3}) and run.verify(full=True).ok


def test_unchanged_chunks_are_referenced_also_by_a_new_writer() -> None:
    url, big = new_url(), torch.ones(10_000)
    writer = StorageWriter(url)
    for n, used in enumerate((writer, writer, StorageWriter(url))):
        save({"frozen": big, "n": torch.tensor(n)}, used)
    infos = ckptstore.open(url).checkpoints()
    assert [info.nbytes_reused for info in infos] == [0, 40_000, 40_000]


def test_a_closed_or_collected_writer_releases_the_run() -> None:
    url = new_url()
    with StorageWriter(url) as writer:
        save({"n": 1}, writer)
    with StorageWriter(url, job="another") as other:  # at once: it need not wait for a sign of life to stop
        save({"n": 2}, other)
    last = StorageWriter(url)
    save({"n": 3}, last)
    del last, writer, other
    assert ckptstore.open(url).catalog.history.fold.released == {1, 2, 3}


# -- async, import


def test_an_async_save_commits_what_was_staged() -> None:
    url, state = new_url(), {"w": torch.ones(1000), "n": 1}
    done = dcp.async_save(state, storage_writer=StorageWriter(url), no_dist=True)
    state["w"].zero_()
    done.result()
    assert bits(ckptstore.open(url).read()) == bits({"w": torch.ones(1000), "n": 1})


def test_torchs_own_checkpoint_imports_equal(tmp_path: Path) -> None:
    save(NESTED, dcp.FileSystemWriter(tmp_path / "step-30"))
    url = new_url()
    assert import_checkpoint(tmp_path / "step-30", url) == 30
    assert bits(ckptstore.open(url).read(step=30)) == bits(NESTED)
    assert bits(everything(StorageReader(url))) == bits(
        everything(dcp.FileSystemReader(tmp_path / "step-30"))
    )
    os.rename(tmp_path / "step-30", tmp_path / "last")
    assert import_checkpoint(tmp_path / "last", url) == 31


# -- names


def test_items_whose_paths_do_not_fit_stand_at_the_top() -> None:
    nodes = {"a.b": 1, "a.c": 2, "d.0": 3, "d.x": 4, "e": 5}
    paths = {"a.b": ("a", "b"), "a.c": ("other", "c"), "d.0": ("d", 0), "d.x": ("d", "x"), "e": "e"}
    skeleton = nest(nodes, paths)
    assert skeleton == {
        "d": [["a", {"d": [["b", 1]]}], ["a.c", 2], ["d", {"l": [3]}], ["d.x", 4], ["e", 5]]
    } and nest({}, {}) == {"d": []}
    with pytest.raises(ckptstore.InvalidInputError, match="a is an item"):
        nest({"a.b": 1, "a": 2}, {"a.b": ("a", "b"), "a": ("a",)})
    with pytest.raises(ckptstore.InvalidInputError, match="two items"):
        entries({"d": [["a", {"d": [["b", 1]]}], ["a.b", 2]]}, whole_objects=False)
