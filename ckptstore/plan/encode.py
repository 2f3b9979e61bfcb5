"""Decide how chunks are stored: which codec a chunk may have, and whether encoding it makes a save any faster.

Pure functions of names and measurements, so that a bad choice seen in production replays as a unit test. What is
measured, and when: ckptstore/encoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from ckptstore.chunktable import RAW
from ckptstore.errors import InvalidInputError
from ckptstore.tensor import DTYPES

AUTO: Final = "auto"
DELTA: Final = "delta"
CHOICES: Final = (RAW, AUTO, "zstd", "byteplane+zstd", DELTA)
REBASE_EVERY: Final = 16
SAVED_MIN: Final = 0.1  # of the time that writing raw takes: less is noise
SAVED_PER_CORE_S: Final = 0.4  # seconds of a save that a second of a core must save: cores are the trainer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a codec makes of some chunks: stored over own bytes, and own bytes a second on one core."""

    ratio: float
    nbytes_per_s: float


def save_s_per_byte(measured: Measured | None, *, device_nbytes_per_s: float, cores: int) -> float:
    """Seconds that a save takes for a byte, encoding beside writing; None: raw."""
    if measured is None:
        return 1 / device_nbytes_per_s
    return max(1 / (cores * measured.nbytes_per_s), measured.ratio / device_nbytes_per_s)


def choose_codec(measured: Mapping[str, Measured], *, device_nbytes_per_s: float | None, cores: int) -> str:
    """The codec under which the save ends first, or raw unless that is worth the cores it takes.

    Never one under which the save takes longer than raw. A device whose speed is not known yet is written raw.
    """
    if device_nbytes_per_s is None or cores < 1:
        return RAW
    raw_s = save_s_per_byte(None, device_nbytes_per_s=device_nbytes_per_s, cores=cores)
    best, best_s = RAW, raw_s
    for name in sorted(measured, key=lambda each: (measured[each].ratio, each)):
        each = measured[name]
        taken_s = save_s_per_byte(each, device_nbytes_per_s=device_nbytes_per_s, cores=cores)
        saved_s = raw_s - taken_s
        worth = saved_s >= SAVED_MIN * raw_s and saved_s * each.nbytes_per_s >= SAVED_PER_CORE_S
        if worth and taken_s < best_s:
            best, best_s = name, taken_s
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRules:
    """Which codec the chunks of a tensor are to have: the first rule that fits, else raw.

    A rule is a dtype or a glob pattern of names as they stand in the state, and one of CHOICES. A base has deltas in
    fewer than `rebase_every` checkpoints.
    """

    rules: tuple[tuple[str, str], ...] = ()
    rebase_every: int = REBASE_EVERY

    @classmethod
    def of(cls, codec: str | Mapping[str, str], rebase_every: int = REBASE_EVERY) -> CodecRules:
        """InvalidInputError names what is no choice."""
        if rebase_every < 1:
            raise InvalidInputError(
                f"rebase_every={rebase_every} is no number of checkpoints: pass 1 or more",
                rebase_every=rebase_every,
            )
        rules = (("*", codec),) if isinstance(codec, str) else tuple(codec.items())
        for pattern, choice in rules:
            if choice not in CHOICES or not isinstance(pattern, str):
                raise InvalidInputError(
                    f"codec {choice!r} for {pattern!r} is none: use {', '.join(CHOICES)}, or a mapping of dtypes and "
                    f"patterns of names to these",
                    codec=choice,
                )
        return cls(rules=rules, rebase_every=rebase_every)

    def find(self, name: str, dtype: str) -> str:
        """The choice for a tensor, `name` without its role."""
        for pattern, choice in self.rules:
            if pattern == dtype if pattern in DTYPES else fnmatchcase(name, pattern):
                return choice
        return RAW

    @property
    def is_raw(self) -> bool:
        """Is nothing ever encoded?"""
        return all(choice == RAW for _, choice in self.rules)

    @property
    def may_need_bases(self) -> bool:
        """Can deltas come of it?"""
        return any(choice in (AUTO, DELTA) for _, choice in self.rules)


NOTHING_ENCODED: Final = CodecRules()
