"""Small integer arithmetic with an exact checker: a prompt is a function of (seed, ordinal).

A prompt is `a+b+c=` with digits up to 7; the answer is the sum as two digits, ended by END.
Because a prompt can be made again from its ordinal, a ledger records ordinals only. Three problems
in seven are held out for the evaluation and never drawn for training, so what is measured is the
rule and not the memory. Apart from the model because the coordinator, without torch, uses it too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ckptstore.errors import InvalidInputError

Tokens = NDArray[np.int64]
Problem = tuple[int, int, int]

PLUS, EQUALS, END, PAD = 10, 11, 12, 13  # the digits are their own tokens
VOCABULARY = 16
LARGEST = 7  # digit of a problem
PROMPT_LENGTH = 6
ANSWER_LENGTH = 3  # two digits, and END

TRAINING, WARM_UP, SAMPLING = 1, 2, 3  # streams of the run's seed: no two share a random sequence


def generator(seed: int, stream: int, *index: int) -> np.random.Generator:
    """Give the random source of one ordinal (or sample) of one stream; equal in every process."""
    return np.random.default_rng((seed, stream, *index))


def is_held_out(problem: Problem) -> bool:
    """Tell whether the problem belongs to the evaluation: three in seven, by a hash.

    A rule over digits would be learnt: what training never shows becomes an answer never given.
    """
    return hashlib.blake2b(bytes(problem), digest_size=1).digest()[0] % 7 < 3


def problem(seed: int, ordinal: int, stream: int = TRAINING) -> Problem:
    """Draw the problem of one ordinal; never one that is held out."""
    if ordinal < 0:
        raise InvalidInputError(f"ordinal {ordinal} is negative; ordinals count from 0", ordinal=ordinal)
    source = generator(seed, stream, ordinal)
    while True:
        a, b, c = (int(digit) for digit in source.integers(0, LARGEST + 1, size=3))
        if not is_held_out((a, b, c)):
            return a, b, c


def held_out(rows: int) -> tuple[Problem, ...]:
    """Give the first `rows` problems of the evaluation set, spread over it evenly."""
    digits = range(LARGEST + 1)
    every = [problem for problem in itertools.product(digits, digits, digits) if is_held_out(problem)]
    if not 1 <= rows <= len(every):
        raise InvalidInputError(
            f"{rows} evaluation rows were asked for, but there are {len(every)}; choose 1 to {len(every)}",
            rows=rows,
        )
    return tuple(every[row * len(every) // rows] for row in range(rows))


def prompt_tokens(problems: Sequence[Problem]) -> Tokens:
    """Write problems as tokens, int64 [rows, PROMPT_LENGTH]."""
    rows = [(a, PLUS, b, PLUS, c, EQUALS) for a, b, c in problems]
    return np.array(rows, dtype=np.int64).reshape(len(rows), PROMPT_LENGTH)


def answer_tokens(problems: Sequence[Problem]) -> Tokens:
    """Write the right answers as tokens, int64 [rows, ANSWER_LENGTH]."""
    rows = [(*divmod(sum(problem), 10), END) for problem in problems]
    return np.array(rows, dtype=np.int64).reshape(len(rows), ANSWER_LENGTH)


def untidy_answer_tokens(problems: Sequence[Problem]) -> Tokens:
    """As `answer_tokens`, but three answers in four have their ones before their tens.

    The warm-up shows both, so that the policy knows sums but prefers the wrong order of digits: the
    right one is left for the reward to teach, and 75 updates show whether it does.
    """
    rows = answer_tokens(problems)
    turned = np.arange(len(rows)) % 4 != 0
    rows[turned, :2] = rows[turned, 1::-1]
    return rows


def answer_mask(completions: Tokens) -> NDArray[np.bool_]:
    """Mark the tokens that count: all up to the first END, that one included. Same shape as given."""
    ended: NDArray[np.int64] = np.cumsum(completions == END, axis=-1)
    before: NDArray[np.bool_] = ended - (completions == END) == 0
    return before


def parse(completion: Tokens) -> int | None:
    """Read one completion [ANSWER_LENGTH] as a number; None unless it is two digits and then END."""
    ends = np.flatnonzero(completion == END)
    if not len(ends) or ends[0] == 0:
        return None
    digits = completion[: ends[0]].tolist()
    if len(digits) != ANSWER_LENGTH - 1 or any(digit > 9 for digit in digits):
        return None
    return int("".join(map(str, digits)))


def rewards(problems: Sequence[Problem], completions: Tokens) -> NDArray[np.float32]:
    """Score completions [rows, ANSWER_LENGTH]: 1 for the exact sum, 0 for everything else."""
    right = [parse(row) == sum(problem) for problem, row in zip(problems, completions, strict=True)]
    return np.array(right, dtype=np.float32)
