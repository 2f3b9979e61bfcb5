"""The `ckptstore` command: what checkpoints a run holds, what is in them, whether they are whole, and the demo.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 fine, 1 a problem was found, 2 usage,
3 the store is unavailable. Nothing heavy is imported before a command needs it, so `--help` is quick.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `ckptstore` script."""
    from ckptstore.cli.app import app

    app(prog_name="ckptstore")
