"""Bytes written, reused and saved: whatever was saved, they are together the bytes of its tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore import Checkpointer, CheckpointInfo, Frozen, Sharded
from ckptstore.cli.contents import contents
from ckptstore.cli.ls import lines, listing
from ckptstore.history import CommitEntry
from ckptstore.journal import Journal
from ckptstore.wire import decode_entry, encode_entry
from tests.save.runs import WAIT_S, new_url, save, save_all, store_of

ROWS = 4  # of every sharded tensor
CODECS: tuple[Any, ...] = ("raw", "zstd", "byteplane+zstd", "delta", {"bfloat16": "delta", "*": "zstd"})
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool)
HOW = ("plain", "sharded", "frozen", "tied")
CHANGES = ("nothing", "a little", "all")


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, torch.dtype, int]]:
    """How each tensor is held, its dtype, and its elements a row; many are too small to be encoded."""
    kind = st.tuples(st.sampled_from(HOW), st.sampled_from(DTYPES), st.sampled_from((0, 1, 3000, 5000)))
    return draw(st.lists(kind, min_size=1, max_size=5))


def fresh(columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    found = torch.randn(ROWS, columns, generator=made)
    return found > 0 if dtype == torch.bool else found.to(dtype)


def state_of(
    plan: list[tuple[str, torch.dtype, int]], tensors: list[torch.Tensor], rank: int, ranks: int
) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 1}
    rows = ROWS // ranks
    for n, ((how, _, _), tensor) in enumerate(zip(plan, tensors, strict=True)):
        if how == "sharded":
            own = tensor[rank * rows : (rank + 1) * rows]
            state[f"t{n}"] = Sharded.dim0(own, start=rank * rows, size=ROWS)
        else:
            state[f"t{n}"] = Frozen(tensor) if how == "frozen" else tensor
        if how == "tied":
            state[f"t{n}.again"] = tensor
    return state


def change(tensor: torch.Tensor, how: str, seed: int) -> None:
    if how == "all":
        tensor.copy_(fresh(tensor.shape[1], tensor.dtype, seed))
    elif how == "a little" and tensor.numel():
        tensor.view(-1)[seed % tensor.numel()] = seed % 2


def raw_nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def data_nbytes(url: str, info: CheckpointInfo) -> int:
    """Bytes of the chunks in the segments that were made for this checkpoint."""
    store = store_of(url)
    found = [(each.key, each.nbytes) for each in store.list(f"data/{info.id}/")]
    return sum(nbytes - 8 - int.from_bytes(store.read(key, nbytes=8), "little") for key, nbytes in found)


@settings(max_examples=40, deadline=None)
@given(plan=plans(), codec=st.sampled_from(CODECS), ranks=st.sampled_from((1, 2)), data=st.data())
@example(plan=[("plain", torch.bfloat16, 3000)] * 2, codec="delta", ranks=1, data=None)
def test_written_reused_and_saved_are_the_bytes_of_the_state(
    plan: list[tuple[str, torch.dtype, int]], codec: Any, ranks: int, data: st.DataObject | None
) -> None:
    url, tensors = new_url(), [fresh(columns, dtype, n) for n, (_, dtype, columns) in enumerate(plan)]
    with ckptstore.begin(url, {"trainer": ranks}) as inc:
        members = [
            Checkpointer(inc, role="trainer", rank=rank, codec=codec, rebase_every=2) for rank in range(ranks)
        ]
        for step in range(1, 4):
            states = [state_of(plan, tensors, rank, ranks) for rank in range(ranks)]
            info = save_all(members, step, states)
            assert info.nbytes_written + info.nbytes_reused == info.nbytes
            assert info.nbytes_written == data_nbytes(url, info)
            assert info.nbytes_saved is not None and info.nbytes_saved >= 0
            assert info.nbytes + info.nbytes_saved == raw_nbytes(tensors)
            if codec == "raw":
                assert info.nbytes_saved == 0
            for n, (how, _, _) in enumerate(plan):
                if how != "frozen":
                    drawn = data.draw(st.sampled_from(CHANGES)) if data else CHANGES[n % len(CHANGES)]
                    change(tensors[n], drawn, seed=100 * step + n)
        for member in members:
            member.close(WAIT_S)
    run = ckptstore.open(url)
    for info in run.checkpoints():
        told = contents(run, url, step=info.step, role=None, tensors=False, names=())
        for name in ("nbytes_written", "nbytes_reused", "nbytes_saved"):
            assert told["checkpoint"][name] == getattr(info, name) == sum(p[name] for p in told["parts"])


def test_encoding_saves_and_what_is_reused_saves_again() -> None:
    url, state = new_url(), {"w": torch.zeros(100_000)}
    with (
        ckptstore.begin(url, {"trainer": 1}) as inc,
        Checkpointer(inc, role="trainer", rank=0, codec="zstd") as ckpt,
    ):
        first, second = (ckpt.save(step, state).result(WAIT_S) for step in (1, 2))
    assert first.nbytes_written < 1000 and first.nbytes_saved == 400_000 - first.nbytes_written
    assert second.nbytes_written == 0 and second.nbytes_saved == first.nbytes_saved


def test_a_commit_from_before_it_was_counted_is_listed_and_shown(monkeypatch: Any) -> None:
    url = new_url()
    real = Journal.append

    def append(self: Journal, decide: Any) -> Any:
        def older(history: Any) -> Any:
            body = decide(history)
            if not isinstance(body, CommitEntry):
                return body
            return replace(body, counters={k: v for k, v in body.counters.items() if k != "nbytes_saved"})

        return real(self, older)

    monkeypatch.setattr(Journal, "append", append)
    save(url, {"w": torch.ones(10)})
    run = ckptstore.open(url)
    (info,) = run.checkpoints()
    assert info.nbytes_saved is None and info.nbytes_written == 40
    told = listing(run, url)
    assert json.loads(json.dumps(told))["checkpoints"][0]["nbytes_saved"] is None
    assert any(" - " in line for line in lines(told))
    shown = contents(run, url, step=None, role=None, tensors=False, names=())
    assert shown["checkpoint"]["nbytes_saved"] == 0, "the index has it"
    key = f"journal/{info.slot:020}.json"
    assert encode_entry(decode_entry(store_of(url).read(key), key)) == store_of(url).read(key)
