"""`rl-bridge`: its commands, its version, and what it does about errors.

Exit codes: 0 it went well, 1 a check failed or the library refused, 2 the command was misused.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rl_bridge.cli.bench import bench
from rl_bridge.cli.demo import demo
from rl_bridge.cli.doctor import doctor
from rl_bridge.cli.environment import version
from rl_bridge.cli.gc import gc
from rl_bridge.cli.inspect import inspect
from rl_bridge.cli.screen import say_error
from rl_bridge.cli.sidecar import sidecar
from rl_bridge.cli.verify import verify
from rl_bridge.errors import WeightBridgeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="rl-bridge",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: each paragraph is wrapped as a whole, and no switch is said to take a value.
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


for _command in (demo, bench, doctor, inspect, verify, gc, sidecar):
    app.command()(_command)


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
