"""`rl-bridge`: its commands, its version, and what it does about errors.

Exit codes: 0 it went well, 1 a check failed or the library refused, 2 the command was misused.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from rl_bridge.cli import files
from rl_bridge.cli.bench import bench
from rl_bridge.cli.certs import certs
from rl_bridge.cli.doctor import doctor
from rl_bridge.cli.inspect import inspect
from rl_bridge.cli.screen import plain, say_error, say_json, screen, size, version
from rl_bridge.cli.sidecar import sidecar
from rl_bridge.cli.status import status
from rl_bridge.cli.verify import verify
from rl_bridge.demo.rollout import Engine
from rl_bridge.demo.run import DEFAULT_STEPS, run_demo
from rl_bridge.demo.trainer import MIN_STEPS
from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.canonical import problem_words
from rl_bridge.memory.segment import sweep


def demo(
    *,
    transport: Annotated[
        str | None,
        typer.Option(
            help="How the weights travel: shared-memory, local-clone, or files; an adapter: nixl, "
            "or shared-memory.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="What the rollout samples with: module, vllm, sglang, or vllm-http."),
    ] = Engine.MODULE,
    lora: Annotated[
        bool,
        typer.Option("--lora", help="Train a LoRA adapter on two ranks; it needs --engine vllm."),
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Over files: the store, a directory or such as s3://bucket/run. Without it, a "
            "directory in OUT.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=MIN_STEPS, help="Training steps, one update of the weights each.")
    ] = DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same rewards.")] = 0,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Where demo.json and demo.png go.")
    ] = Path("demo-out"),
    plain: Annotated[
        bool, typer.Option("--plain", help="Print a line for each step, and no progress bar.")
    ] = False,
) -> None:
    """Train a small policy over the bridge, while faults are planted.

    A trainer and a rollout process learn to sort digits by reinforcement, in about a minute. Each
    step checks that the rollout samples with exactly the version that it reports. In the middle one
    update is corrupted, one is stale and one install fails half-way: each is refused or undone, and
    training goes on. The same run without the bridge shows what they do there.

    Over files, trainer and engines share nothing but the url of a store. The trainer is killed in
    the middle of a publication, a second engine joins while no trainer lives, and a new trainer
    goes on from the newest version.
    """
    run_demo(
        transport=transport,
        engine=engine.value,
        lora=lora,
        url=url,
        steps=steps,
        seed=seed,
        out=out,
        plain=plain,
        console=screen(),
    )


def gc(
    directory: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            readable=True,
            metavar="DIRECTORY",
            show_default=False,
            help="What was given to the bridges as directory=.",
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Remove what dead publishers left in a directory.

    A publisher's start does the same by itself. Segments whose publisher lives are never touched,
    and neither is any other file. Without directory= there is nothing to remove: the kernel frees
    such segments with the last process that uses them.
    """
    swept = sweep(directory, dry_run=dry_run)
    total = sum(nbytes for _, nbytes in swept)
    if as_json:
        say_json(
            {
                "directory": str(directory),
                "dry_run": dry_run,
                "segments": [{"name": name, "nbytes": nbytes} for name, nbytes in swept],
                "total_nbytes": total,
            }
        )
        return
    out = screen()
    where = plain(str(directory))
    if not swept:
        found = "no dead publisher's segment" if any(directory.glob("rlb-*")) else "no segment"
        out.print(f"Nothing to remove: {found} in {where}.", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("segment", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for name, nbytes in swept:
        table.add_row(Text(name), size(nbytes))
    out.print(table)
    done = "Would remove" if dry_run else "Removed"
    noun = "segment" if len(swept) == 1 else "segments"
    out.print(f"{done} {len(swept)} {noun}, {size(total)}, from {where}.", markup=False)


class _Command(TyperCommand):
    """Says of a value that does not fit what was expected, and what was given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = f"{problem_words(error.__cause__.errors()[0])}."
            raise


app = typer.Typer(
    name="rl-bridge",
    no_args_is_help=True,
    # Plain help: each paragraph is wrapped as a whole, and switches are shown without a value.
    rich_markup_mode=None,
    # A failure of ours is one line (see `main`); of a bug, Python's own traceback says the most.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rl-bridge {version()}")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Weight updates from RL trainers to rollout engines, as transactions."""


for _command in (
    *(demo, bench, doctor, status, inspect, verify, gc, sidecar, certs),
    *(files.export, files.publish),
):
    app.command(cls=_Command)(_command)

_files = typer.Typer(
    help="Versions in files: list, show, verify and remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _of_files in (files.ls, files.show, files.verify, files.gc):
    _files.command(cls=_Command)(_of_files)
app.add_typer(_files, name="files")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: without the program's name; None takes the process's own.

    Raises:
        SystemExit: always, with the exit code.

    """
    try:
        app(args=arguments, prog_name="rl-bridge")
    except (WeightBridgeError, OSError) as error:
        say_error(error)
        sys.exit(1)
