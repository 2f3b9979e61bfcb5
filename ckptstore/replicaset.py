"""What a part says of the boxes that its member holds together with other ranks: their digests, compactly.

A committer of a thousand ranks compares one combined digest a set; only where two differ does it open
the digests of single boxes, and their names, which the part of the set's lowest rank carries for all.
The comparison is `replicas.py`; the bytes: docs/reference/format-v1.md.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import CorruptError
from ckptstore.tensor import Box

XXH3 = "x"  # XXH3-128 of the box's bytes, taken by the host
ROWS = "r"  # XXH3-128 of weighted sums of rows, taken on an accelerator: interop/torch_digest.py
KINDS = {XXH3: "on the host", ROWS: "on an accelerator"}
SHORT_NBYTES = 8  # of each box's digest in a part; the combined digest is over all 16

_NAMES_NBYTES_MAX = 1 << 28  # opened; text of more than a million boxes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class HeldBox:
    """One box of one tensor (`role/name`) that every rank of a set holds."""

    tensor: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(offset=self.offset, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSet:
    """The digests of all boxes that one member holds together with exactly the same ranks.

    Boxes are in the order of (name, offset, shape). `ranks` are runs of (first, number, step). `kinds` has one
    letter a box, or one for all. `digests` and `names` stay as they are stored until they are asked for.
    """

    ranks: tuple[tuple[int, int, int], ...]
    count: int
    kinds: str
    combined: str  # XXH3-128 of kinds and whole digests, in hex
    digests: str  # base64 of SHORT_NBYTES a box
    names: str | None  # base64 of zlib of JSON; None in all parts but that of the lowest rank

    def members(self) -> tuple[int, ...]:
        """The ranks, rising."""
        return runs_to_ranks(self.ranks)

    def kind(self, n: int) -> str:
        """How the digest of box `n` was taken."""
        return self.kinds if len(self.kinds) == 1 else self.kinds[n]

    def short_digests(self) -> npt.NDArray[np.uint64]:
        """The beginning of each box's digest. CorruptError if there are not `count` of them."""
        try:
            data = base64.b64decode(self.digests, validate=True)
        except (binascii.Error, ValueError) as error:
            raise CorruptError(
                f"the replica digests of a part are not base64 ({error}): save again"
            ) from error
        if len(data) != self.count * SHORT_NBYTES or len(self.kinds) not in (1, self.count):
            raise CorruptError(
                f"a part has {len(data)} bytes of digests and {len(self.kinds)} kinds for {self.count} boxes: save "
                f"again"
            )
        return np.frombuffer(data, "<u8").astype(np.uint64)

    def boxes(self) -> tuple[HeldBox, ...]:
        """Which boxes they are: empty where this part does not carry the names. CorruptError if they are damaged."""
        if self.names is None:
            return ()
        try:
            opened = zlib.decompressobj()
            text = opened.decompress(base64.b64decode(self.names, validate=True), _NAMES_NBYTES_MAX)
            boxes = tuple(
                HeldBox(tensor=str(name), offset=tuple(map(int, offset)), shape=tuple(map(int, shape)))
                for name, offset, shape in json.loads(text)
            )
        except (zlib.error, binascii.Error, ValueError, TypeError, RecursionError) as error:
            raise CorruptError(
                f"the names of a part's replicas are unreadable ({error}): save again"
            ) from error
        if len(boxes) != self.count:
            raise CorruptError(f"a part names {len(boxes)} replicated boxes and has {self.count}: save again")
        return boxes

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": [list(run) for run in self.ranks],
            "count": self.count,
            "kinds": self.kinds,
            "combined": self.combined,
            "digests": self.digests,
            "names": self.names,
        }

    @classmethod
    def from_json(cls, value: Any) -> ReplicaSet:
        """Raises KeyError, TypeError or ValueError, as other readers of a part's fields do."""
        names = value["names"]
        return cls(
            ranks=tuple((int(first), int(number), int(step)) for first, number, step in value["ranks"]),
            count=int(value["count"]),
            kinds=str(value["kinds"]),
            combined=str(value["combined"]),
            digests=str(value["digests"]),
            names=None if names is None else str(names),
        )


def pack_names(boxes: Sequence[HeldBox]) -> str:
    """The names as the lowest rank's part carries them: a tenth of their text, and opened only for an error."""
    rows = [[box.tensor, list(box.offset), list(box.shape)] for box in boxes]
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=True)
    return base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def pack_digests(digests: Sequence[bytes]) -> str:
    return base64.b64encode(b"".join(digest[:SHORT_NBYTES] for digest in digests)).decode()


def ranks_to_runs(ranks: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Rising ranks as the fewest runs that a scan from the left finds: equal sets have equal runs."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        runs.append((ranks[at], stop - at, step))
        at = stop
    return tuple(runs)


def runs_to_ranks(runs: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(rank for first, number, step in runs for rank in range(first, first + number * step, step))
