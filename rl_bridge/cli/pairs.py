"""What `rl-bridge doctor` says of a pair: the facts of this side, and the transport of the two."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rl_bridge.bridge.pairing import SideFacts, choose_transport, look_around
from rl_bridge.cli.screen import facts, plain, say_error, say_json, screen
from rl_bridge.errors import WeightBridgeError

__all__ = ["AddressOption", "DirectoryOption", "FactsOption", "PairOption", "say_facts", "say_pair"]

FactsOption = Annotated[
    bool,
    typer.Option("--facts", help="Write what this side is, as JSON, for --pair on the other side."),
]
PairOption = Annotated[
    Path | None,
    typer.Option(
        "--pair",
        metavar="FILE",
        help="Say which transport is used from the trainer that wrote FILE (--facts) to here.",
    ),
]
AddressOption = Annotated[
    str, typer.Option("--address", help="With --facts: where others reach this machine.")
]
DirectoryOption = Annotated[
    list[Path] | None,
    typer.Option("--directory", help="With --facts or --pair: a directory that both may share."),
]


def say_facts(address: str, directories: list[Path]) -> None:
    """Write the facts of this side as JSON."""
    typer.echo(look_around(address=address, directories=directories).to_json().decode())


def say_pair(trainer: Path, directories: list[Path], *, as_json: bool) -> None:
    """Say which transport weights take from the trainer's side to this one, and why."""
    try:
        theirs = SideFacts.from_json(trainer.read_bytes())
        mine = look_around(directories=directories)
        chosen = choose_transport(theirs, mine)
    except (WeightBridgeError, OSError) as error:
        say_error(error)
        raise typer.Exit(1) from error
    if as_json:
        say_json(chosen.model_dump())
        return
    rows: dict[str, str | Text] = {
        "transport": Text(plain(chosen.transport), style="bold green"),
        "why": plain(chosen.reason),
    }
    for side, options in (
        ("trainer passes", chosen.publisher_options),
        ("engine passes", chosen.consumer_options),
    ):
        if options:
            rows[side] = plain(", ".join(f"{name}={value!r}" for name, value in options.items()))
    rows |= {f"not {name}": plain(why) for name, why in chosen.not_taken.items()}
    screen().print(facts(rows, title=f"from {plain(_where(theirs))} to here"))


def _where(side: SideFacts) -> str:
    return f"the trainer at {side.address}" if side.address else "the trainer"
