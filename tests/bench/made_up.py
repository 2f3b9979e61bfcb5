"""Results of benches, made up: what tables, JSON and pictures must cope with."""

from __future__ import annotations

from ckptstore.bench.figures import LOCAL, NO_SAVE, BenchResult, Entrant, Limit, Series

GIB = 1 << 30


def make_result(
    figures: dict[tuple[str, str], tuple[float, ...]] | None = None,
    *,
    nbytes: int = GIB,
    rounds: int = 5,
    peers: int = 2,
) -> BenchResult:
    """Ours is at 1.05 of every limit, peer n at n + 2 times of it, unless `figures` says otherwise."""
    names = ("dcp", "dcp-async", "torchsnapshot", "orbax", "safetensors")[:peers]
    entrants = [
        Entrant(id="ckptstore", words="ckptstore", version="0.1.0", durable="yes", checksums="XXH3-128"),
        *(Entrant(id=n, words=n.upper(), version="9", durable="no", checksums="none") for n in names),
        Entrant(id="gone", words="gone", problem="not installed", help="pip install gone"),
    ]
    limits = {
        name: Limit(
            id=name,
            variants={
                "1 thread": Series(values=(0.4, 0.5, 0.45)),
                "2 threads": Series(values=(0.19, 0.2, 0.3)),
            },
        )
        for name in ("copy", "write", "read", "cached")
    }
    found: dict[tuple[str, str], Series] = {}
    for what in LOCAL:
        over = 0.2 if what.limit is not None else 1.0
        for n, name in enumerate(["ckptstore", *names]):
            middle = (1.05 if n == 0 else n + 2) * over
            found[(what.id, name)] = Series(values=(middle * 0.9, middle, middle * 1.2))
        if what.id.startswith(("lost", "worst")):
            found[(what.id, NO_SAVE)] = Series(values=(-0.001, 0.001, 0.002))
    found |= {key: Series(values=values) for key, values in (figures or {}).items()}
    return BenchResult(
        machine={"cores": 2, "torch": "2.13.0", "kernel": "6.1", "python": "3.11", "cpu": "x86_64"},
        place="/data",
        state="moe",
        nbytes=nbytes,
        tensors=1764,
        seed=0,
        rounds=rounds,
        seconds=61.0,
        entrants=entrants,
        limits=limits,
        figures=found,
        whats=LOCAL,
    )
