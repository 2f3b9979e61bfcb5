"""`ckptstore bench`: measure, then tell, as tables, as JSON and as a picture."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

from ckptstore.bench.options import BenchOptions, check_place, parse
from ckptstore.cli.output import FINE, json_text, progress_bar, say, stdout_on_stderr
from ckptstore.cli.signals import Act, Signals, interrupt
from ckptstore.errors import InvalidInputError


def bench(
    url: str, *, size: str, state: str, peers: str, rounds: int, picture: Path | None, as_json: bool
) -> int:
    """Run it. What can never work is refused before anything heavy is imported."""
    options = parse(url=url, size=size, state=state, peers=peers, rounds=rounds)
    check_place(options)
    if picture is not None:
        _check_picture(picture)

    from ckptstore.bench.run import run_bench

    ends: dict[int, Act] = {signal.SIGTERM: interrupt, signal.SIGHUP: interrupt}
    with Signals(ends), stdout_on_stderr(), progress_bar("bench", amount=str, after_s=0) as bar:
        result = run_bench(options, bar)
    if picture is not None:
        from ckptstore.bench.picture import draw

        try:
            picture.write_text(draw(result), encoding="utf-8")
        except OSError as error:  # minutes of work are told all the same
            say(f"ckptstore: the picture {picture} was not written: {error}")
        else:
            say(f"wrote {picture}")
    following = _following(options, picture)
    if as_json:
        sys.stdout.write(json_text({**result.to_json(), "next": following}) + "\n")
        return FINE
    from rich.console import Console

    from ckptstore.bench.table import print_result

    width = None if sys.stdout.isatty() else 160
    print_result(Console(file=sys.stdout, highlight=False, width=width), result, following=following)
    return FINE


def _check_picture(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInputError(
            f"no picture can be written to {path}; give --picture a file in a folder that exists",
            path=str(path),
        )


def _following(options: BenchOptions, picture: Path | None) -> str:
    if picture is not None:
        return f"open {shlex.quote(str(picture))} in a browser"
    place = shlex.quote(options.place)
    if options.state == "moe":
        return f"ckptstore bench {place} --state small"
    return f"ckptstore bench {place} --picture bench.svg"
