"""Kills and stops every process of a control plane: `python benchmarks/plane_deaths.py nixl`.

Somebody is struck at a random moment of most updates, see `tests/machines/plane.py`. An engine that
is left with a mixture, or with a version that it did not report, ends the run with an error, and
nothing is written. The result has what was done to whom, which updates were refused and why, the
longest time that one update took, and by how much the engine's process grew.
"""

import datetime as dt
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from _lib.environment import collect_environment, save
from rich.console import Console
from rich.progress import track

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from tests.machines.plane import Plane  # noqa: E402 - after the path

__all__ = ["main"]


def main(
    transport: Annotated[str, typer.Argument(help="nixl or broadcast")],
    updates: Annotated[int, typer.Option(help="How many.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of whom is struck, how and when.")] = 0,
) -> None:
    """Strike, count, and write ``results/plane-deaths-TRANSPORT.json``."""
    console = Console()
    started = time.monotonic()
    environment = collect_environment()
    with Plane(transport, seed=seed) as plane:
        found = plane.run(track(range(1, updates + 1), "updates", console=console))
    document = {
        "format": 1,
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment,
        "seed": seed,
        **found,
    }
    out = _ROOT / "benchmarks" / "results" / f"plane-deaths-{transport}.json"
    save(document, out)
    console.print_json(data=found)
    console.print(f"{document['seconds']} s; written to {out}")


if __name__ == "__main__":
    typer.run(main)
