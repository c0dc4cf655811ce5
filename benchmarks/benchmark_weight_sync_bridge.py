"""Smoke test and probe: `python benchmarks/benchmark_weight_sync_bridge.py --smoke --mode MODE`.

Prints one JSON row with sorted keys as the last line of stdout. Exit code 0 for `pass` and for
`blocked` (the notes say what is missing), 1 where an update failed, 2 for a wrong option.
"""

import csv
import datetime as dt
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from _lib.environment import collect_environment
from _lib.smoke import Mode, Outcome, SmokeConfig, run_mode
from _lib.smoke_model import load_checkpoint, synthetic_weights
from _lib.wire import BenchmarkError

from rl_bridge.errors import WeightBridgeError

__all__ = ["main"]

_SMOKE_SIZE = (64, 2)
_FULL_SIZE = (1024, 8)
_FULL_WARMUP = 3
_FULL_UPDATES = 5
_TIMES = ("publish_ms", "import_ms", "ack_ms", "release_ms")


def _row(mode: Mode, outcome: Outcome) -> dict[str, Any]:
    """Return the row with the fields of every mode."""
    return {
        "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "mode": mode.value,
        "status": outcome.status,
        "environment": collect_environment(),
        "tensor_count": outcome.tensor_count,
        "total_nbytes": outcome.total_nbytes,
        "active_weight_version": outcome.active_weight_version,
        "notes": "; ".join(outcome.notes),
        **{phase: outcome.times_ms.get(phase) for phase in _TIMES},
    }


def _append_csv(path: Path, row: dict[str, Any]) -> None:
    """Append a row, under a header where the file is new; nested values stay JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=sorted(row))
        if is_new:
            writer.writeheader()
        writer.writerow(
            {
                name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
                for name, value in row.items()
            }
        )


def _config(
    *,
    smoke: bool,
    model: Path | None,
    hidden_dim: int | None,
    layers: int | None,
    weight_version: int,
) -> SmokeConfig:
    """Return what to move."""
    default_dim, default_layers = _SMOKE_SIZE if smoke else _FULL_SIZE
    if model is None:
        weights = synthetic_weights(hidden_dim or default_dim, layers or default_layers)
    else:
        try:
            weights = load_checkpoint(model)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
    return SmokeConfig(
        weights=weights,
        first_version=weight_version,
        warmup=0 if smoke else _FULL_WARMUP,
        updates=1 if smoke else _FULL_UPDATES,
    )


def main(
    *,
    mode: Annotated[Mode, typer.Option(help="What to run or to probe.")],
    smoke: Annotated[
        bool, typer.Option("--smoke", help="One update of a tiny model, to see that it works.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="A .safetensors file or a folder of them, instead of made-up weights."),
    ] = None,
    hidden_dim: Annotated[int | None, typer.Option(min=1, help="Width of made-up weights.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of made-up weights.")] = None,
    weight_version: Annotated[int, typer.Option(min=0, help="The first version.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="CSV file to which the row is appended.")
    ] = None,
) -> None:
    """Move weights once through the bridge, or say precisely why this machine cannot."""
    config = _config(
        smoke=smoke,
        model=model,
        hidden_dim=hidden_dim,
        layers=layers,
        weight_version=weight_version,
    )
    try:
        outcome = run_mode(mode, config)
    except (WeightBridgeError, BenchmarkError) as error:
        traceback.print_exc(file=sys.stderr)
        outcome = Outcome(status="failed", notes=[f"{type(error).__name__}: {error}"])
    row = _row(mode, outcome)
    print(json.dumps(row, sort_keys=True))
    if output is not None:
        try:
            _append_csv(output, row)
        except OSError as error:
            # The row is on the screen; a measurement must not be lost for a path.
            print(f"--output {output}: {error}. Give a file in a folder of yours.", file=sys.stderr)
            raise typer.Exit(1) from error
    if outcome.status == "failed":
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
