"""`rl-bridge`: its commands, its version, and what it does about errors.

Exit codes: 0 it went well, 1 a check failed or the library refused, 2 the command was misused.

A command's module is imported when the command is called, or asked for its options: a list of
commands, the version and the completion of a name need neither torch nor anything else that takes
seconds to import.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand
from typer.main import get_command

from rl_bridge.cli.screen import say_error, version
from rl_bridge.errors import WeightBridgeError

# Command -> its module in this package, and the first line of its help.
COMMANDS = {
    "demo": ("demo", "Train a small policy over the bridge, while faults are planted."),
    "bench": ("bench", "Measure an update between two processes over shared memory."),
    "doctor": ("doctor", "Tell what works on this machine, and why the rest does not."),
    "status": ("status", "Show where live publishers, or a side-car's engine, stand."),
    "inspect": ("inspect", "Show what a manifest says: its source, layout and tensors."),
    "verify": ("verify", "Verify every byte of a published update."),
    "gc": ("status", "Remove what dead publishers left in a directory."),
    "sidecar": ("sidecar", "Stand beside an engine and take its updates over HTTP."),
    "certs": ("certs", "Make an authority and certificates for the TLS of a run."),
    "export": ("files", "Write a version as a checkpoint in Hugging Face's layout."),
    "publish": ("files", "Publish a checkpoint over files, for engines to install."),
}
OF_FILES = {
    "ls": ("files", "List the versions of a store, in the order of their publication."),
    "show": ("files", "Show one version of a store: what it is, and its files."),
    "verify": ("files", "Verify every byte of a version in a store."),
    "gc": ("files", "Remove older versions from a store, and what was not finished."),
}


class _Command(TyperCommand):
    """Says of a value that does not fit what was expected, and what was given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from rl_bridge.manifest.canonical import problem_words

            if isinstance(error.__cause__, ValidationError):
                error.message = f"{problem_words(error.__cause__.errors()[0])}."
            raise


def _later(module: str) -> type[TyperCommand]:
    class Later(TyperCommand):
        """A name and one line of help, until the command itself is called."""

        def loaded(self) -> TyperCommand:
            """Import the command's function, and make a command of it."""
            function = getattr(import_module(f"rl_bridge.cli.{module}"), str(self.name))
            made = typer.Typer(add_completion=False, rich_markup_mode=None)
            made.command(cls=_Command)(function)
            return cast("TyperCommand", get_command(made))

        def make_context(self, *args: Any, **options: Any) -> Any:
            return self.loaded().make_context(*args, **options)

    return Later


def _never_called() -> None:
    """Stand for the function of a command that is not imported yet."""


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


_files = typer.Typer(
    help="Versions in files: list, show, verify and remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _group, _commands in ((app, COMMANDS), (_files, OF_FILES)):
    for _name, (_module, _help) in _commands.items():
        _group.command(_name, cls=_later(_module), help=_help)(_never_called)
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
