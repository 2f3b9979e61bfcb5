"""The commands and their arguments. What each does lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptstore.cli.output import reporting

app = typer.Typer(
    name="ckptstore",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: quick to start, and examples keep their lines
    help=(
        "Checkpoints of RL post-training runs: list them, look into them, compare and verify them.\n\n"
        "\b\n"
        "  ckptstore ls runs/7                 which checkpoints there are\n"
        "  ckptstore show runs/7               what the newest one holds\n"
        "  ckptstore verify runs/7             read everything and compare digests\n"
        "  ckptstore diff runs/7               what the newest checkpoint changed\n"
        "  ckptstore demo --report out.html    an RL loop that is killed and comes back\n"
        "  ckptstore bench .                   how fast this disk saves, beside other libraries\n\n"
        "Data goes to stdout, progress to stderr; --json gives the same fields to programs. Exit codes: 0 fine, "
        "1 a problem was found, 2 usage, 3 the store is unavailable."
    ),
)

Url = Annotated[str, typer.Argument(metavar="URL", help="The run: a path or file:///path.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        import ckptstore

        typer.echo(f"ckptstore {ckptstore.__version__}")
        raise typer.Exit(0)


@app.command("ls", short_help="Which checkpoints a run has.")
@reporting
def _ls(url: Url, as_json: Json = False) -> int:
    """List the checkpoints of a run, in the order in which they were committed.

    STATE is ok, abandoned (left behind by a rollback: nothing restores it) or bad (marked after a damaged
    read). PUB is the number of the weights' publication in force. REUSED bytes were referenced from earlier
    checkpoints instead of written, SAVED bytes were spared by encoding: with WRITTEN they are the bytes of all
    tensors. Exit code 1: there are checkpoints, and none can be restored.

    \b
    Examples:
      ckptstore ls runs/7
      ckptstore ls runs/7 --json | jq '.checkpoints[] | select(.status == "ok") | .step'
    """
    from ckptstore.cli.ls import list_checkpoints

    return list_checkpoints(url, as_json=as_json)


@app.command("show", short_help="What one checkpoint holds.")
@reporting
def _show(
    url: Url,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint; the newest good one by default.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="Only this role, such as trainer.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    names: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="List names like this, without the role; may be repeated."),
    ] = None,
    io: Annotated[bool, typer.Option("--io", help="Also tell how each member wrote, and how fast.")] = False,
    as_json: Json = False,
) -> int:
    """Show what one checkpoint holds: roles, parts, tensors, values, publication, and how it came to be.

    Tensors are summarised by prefix: a `*` in a name stands for all numbers there, and rows are the largest
    prefixes. --tensors and --names list them one by one, with the segments (numbered in their own table)
    that hold their bytes; --names alone leaves out fences and parts. Names are those of `run.read(names=...)`.
    --io tells of the segments that each member wrote whether that was direct I/O, or why it was not.

    \b
    Examples:
      ckptstore show runs/7
      ckptstore show runs/7 --step 1200 --role trainer --tensors
      ckptstore show runs/7 --names 'model.layers.0.*' --names 'step'
      ckptstore show runs/7 --io
      ckptstore show runs/7 --tensors --json | jq '.tensors[] | select(.dtype == "bfloat16") | .name'
    """
    from ckptstore.cli.show import show_checkpoint

    return show_checkpoint(
        url, step=step, role=role, tensors=tensors, names=names or [], io=io, as_json=as_json
    )


@app.command("diff", short_help="What differs between two checkpoints.")
@reporting
def _diff(
    url: Url,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second run; the same run by default.")
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(metavar="INT", help="Which checkpoint; give it twice for both, in order."),
    ] = None,
    role: Annotated[str | None, typer.Option(help="Only this role, such as trainer.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only names like this, without the role; may be repeated."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="Group by prefix, tensor, layer (layers.3), expert (experts.3), or a pattern such as 'blocks.{}'.",
        ),
    ] = "prefix",
    stacked: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Tensors whose rows of dimension 0 are experts; for --by expert."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints of one run, or of two: tensors, elements, and values that are no tensors.

    One run: by default the newest good checkpoint and the one before it; with one --step, that one and the
    newest. Two runs: the newest of each, or the same --step of both. The first is BEFORE, the second AFTER.

    Whole chunks with equal checksums are settled without reading their data; the rest is read, verified and
    compared in bounded memory, also where the two were saved in different layouts. An element is changed when
    its bits are. LARGEST is the largest distance of two values; elements that are NaN on a side are changed
    (if their bits are), counted under NAN, and have no distance. SHARE is the share of elements changed.

    \b
    Examples:
      ckptstore diff runs/7
      ckptstore diff runs/7 --step 1100 --step 1200 --by layer
      ckptstore diff runs/7 runs/8 --step 1200 --names 'model.*' --by tensor
      ckptstore diff runs/7 --by expert --stacked '*.experts.w*'
      ckptstore diff runs/7 --json | jq '.groups[] | select(.nan > 0) | .name'

    Exit code 0: they are equal; 1: they differ, or one cannot be read (then stdout is empty).
    """
    from ckptstore.cli.diff import diff_checkpoints

    return diff_checkpoints(
        [url] if other is None else [url, other],
        steps=step or (),
        role=role,
        names=names or (),
        by=by,
        stacked=stacked or (),
        as_json=as_json,
    )


@app.command("verify", short_help="Read everything, compare every digest.")
@reporting
def _verify(
    url: Url,
    step: Annotated[int | None, typer.Option(help="Only this checkpoint; all of them by default.")] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also compare parts with indexes, and every byte of segment headers."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Read the journal and everything that the checkpoints need, and compare every digest.

    Damage is named by object and tensor, and the checkpoints that it reaches are listed; the others can be
    restored. Nothing is written. Exit code 1: damage was found.

    \b
    Examples:
      ckptstore verify runs/7
      ckptstore verify runs/7 --step 1200 --full
      ckptstore verify runs/7 --json | jq -r '.damage[].key'
    """
    from ckptstore.cli.verify import verify_run

    return verify_run(url, step=step, full=full, as_json=as_json)


@app.command("demo", short_help="An RL loop that is killed and comes back.")
@reporting
def _demo(
    steps: Annotated[int, typer.Option(help="Optimizer updates of each run.")] = 75,
    every: Annotated[int, typer.Option(help="Steps between checkpoints, and between evaluations.")] = 5,
    trainers: Annotated[int, typer.Option(help="Trainer ranks; experts are spread over them.")] = 2,
    rollouts: Annotated[int, typer.Option(help="Rollout engines, with FP8 copies of the policy.")] = 2,
    seed: Annotated[int, typer.Option(help="Equal seeds and layouts give equal bits.")] = 0,
    kill: Annotated[str | None, typer.Option(metavar="LIST", help="Who is killed at which step.")] = None,
    resize: Annotated[
        list[str] | None, typer.Option(metavar="LIST", help="Go on with other numbers of trainers.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Where the run is stored; a temporary folder by default.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the temporary folder.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page with figures.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Train a small mixture-of-experts model by GRPO in several processes, kill some, and compare.

    With --kill there are two runs: one undisturbed, one killed; their tensors, consumed samples and
    evaluations must be bitwise equal, and no sample may be lost or trained twice. Needs Ray and transformers
    (pip install 'ckptstore[demo]'); a run takes about a minute on two cores.

    \b
    Kills, separated by commas, each fires once:
      trainer:1@17       while update 17 is computed
      trainer:0@20+save  in the save of step 20, after its segments and before its part
      rollout:0@23       while it generates for step 23
      coordinator@31     in the middle of step 31
      random:5           five of them, from the seed
    Resizes: 40:1 stops the trainers after step 40 and restores the run on one rank.

    \b
    Examples:
      ckptstore demo
      ckptstore demo --kill trainer:1@17,rollout:0@23,coordinator@31 --report out.html
      ckptstore demo --steps 60 --resize 40:1,50:3
      ckptstore demo --steps 30 --kill random:3 --json | jq .bitwise_equal

    Exit code 1: a kill did not fire, runs differ, samples were lost, or the loop did not learn.
    """
    from ckptstore.cli.demo import demo

    return demo(
        steps=steps,
        every=every,
        trainers=trainers,
        rollouts=rollouts,
        seed=seed,
        kill=kill,
        resize=resize or (),
        url=url,
        keep=keep,
        report=report,
        as_json=as_json,
    )


@app.command("bench", short_help="How fast this machine saves and loads.")
@reporting
def _bench(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="A folder on the disk to measure, or another store.")
    ] = ".",
    size: Annotated[str, typer.Option(help="Bytes of the state, such as 512MiB or 4GiB.")] = "1GiB",
    state: Annotated[
        str, typer.Option(metavar="KIND", help="moe, large (32 tensors) or small (20,000 tensors).")
    ] = "moe",
    peers: Annotated[
        str, typer.Option(metavar="LIST", help="Libraries to compare with, or none.")
    ] = "dcp,torchsnapshot,orbax,safetensors",
    rounds: Annotated[int, typer.Option(help="How often each figure is taken; medians are told.")] = 5,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures as an SVG picture.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure saves and loads as multiples of what this machine can do, beside other libraries.

    In every round the limits are measured (copying the state in memory, writing and reading files past the
    page cache, copying from it), then each library in turn: a first save, a warm one, saves beside three
    training loops, a cold load and one from the page cache. 1.00 is the limit; less is better. Where another
    library is ahead, the output says so.

    LOST is what one save costs training: the time that the call blocks, and what the steps take longer until
    the save is done; NO SAVE is the same without a save: the noise. DURABLE says whether a library calls fsync
    before it is done, CHECKSUMS whether it would notice a flipped bit. moe is a mixture of experts with BF16
    weights, FP32 master weights and two FP32 moments: 1,764 tensors at 1 GiB.

    Peers that are not installed are named and left out. It needs memory for about four states and disk for
    three, in a temporary folder that is removed at the end, also after Ctrl-C. At 1 GiB with all peers it takes
    some minutes; let nothing else run meanwhile.

    \b
    Examples:
      ckptstore bench /data
      ckptstore bench /data --size 64MiB --rounds 2 --peers none    a first look, in seconds
      ckptstore bench /data --state small --picture bench.svg
      ckptstore bench /data --json | jq '.figures[] | select(.best != "ckptstore") | .what'
    """
    from ckptstore.cli.bench import bench

    return bench(url, size=size, state=state, peers=peers, rounds=rounds, picture=picture, as_json=as_json)
