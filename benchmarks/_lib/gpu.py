"""The command of the GPU's benchmarks: why nothing can be measured here, or the results file."""

import datetime as dt
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from _lib.environment import collect_environment, save
from rl_bridge.cuda.devices import cuda_cause
from rl_bridge.cuda.digest import kernel_cause

__all__ = ["GpuSize", "gpu_command"]

_QUICK_NBYTES = 1_000_000_000
_NBYTES = 16_000_000_000


class GpuSize(NamedTuple):
    """How large a run is, and where it is made."""

    nbytes: int
    rounds: int
    dry_run: bool


def _blocked(needed_nbytes: int) -> str | None:
    """Why nothing can be measured here, or None.

    Args:
        needed_nbytes: GPU memory that the run takes.

    """
    cause = cuda_cause() or kernel_cause("cuda")
    if cause is not None:
        return cause
    free, _ = torch.cuda.mem_get_info()
    if free < needed_nbytes:
        return (
            f"{free} bytes of GPU memory are free, {needed_nbytes} are needed: --quick, or fewer "
            "--gigabytes"
        )
    return None


def _environment() -> dict[str, Any]:
    """Return what the figures depend on: machine, device, driver, versions, commit."""
    found = collect_environment()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        driver = Path("/proc/driver/nvidia/version")
        found["device"] = {
            "name": device.name,
            "memory_nbytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
            "driver": driver.read_text("utf-8").splitlines()[0] if driver.exists() else "unknown",
            "cuda": torch.version.cuda,
            "triton": importlib.import_module("triton").__version__,
        }
    return found


def gpu_command(
    out: Path,
    aims: dict[str, float],
    measure: Callable[[GpuSize, Console], dict[str, Any]],
    *,
    copies: int,
    spare_nbytes: int,
    dry_nbytes: int,
) -> Callable[..., None]:
    """The command of a benchmark, for `typer`.

    Args:
        out: where its samples go if nothing else is said.
        aims: of its ratios.
        measure: what it measures: ``layouts``, each with its ``ratios``, and what else it notes.
        copies: how many times the weights lie on the GPU at once.
        spare_nbytes: GPU memory that it takes besides.
        dry_nbytes: weights of a run on the CPU.

    """

    def main(
        *,
        quick: Annotated[
            bool, typer.Option("--quick", help="1 GB and fewer rounds, to see that it works.")
        ] = False,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="All of it on the CPU, tiny; writes no file.")
        ] = False,
        gigabytes: Annotated[
            float, typer.Option(min=1, help="Weights, where the GPU has no room for as many.")
        ] = _NBYTES / 1e9,
        rounds: Annotated[int, typer.Option(min=1, help="How often each lane runs.")] = 15,
        out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = out,
    ) -> None:
        """Measure, or say precisely why this machine cannot."""
        console = Console(stderr=True)
        nbytes = dry_nbytes if dry_run else _QUICK_NBYTES if quick else int(1e9 * gigabytes)
        row: dict[str, Any] = {
            "format": 1,
            "timestamp": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": quick,
        }
        if not dry_run and (cause := _blocked(copies * nbytes + spare_nbytes)):
            print(json.dumps(row | {"status": "blocked", "notes": cause}, sort_keys=True))
            return
        row["status"] = "dry-run" if dry_run else "pass"
        document = row | {"environment": _environment(), "aims": aims}
        size = GpuSize(nbytes, min(rounds, 3) if quick or dry_run else rounds, dry_run)
        document |= measure(size, console)
        if not dry_run:
            save(document, out)
            console.print(f"all samples are in {out}")
        row["ratios"] = [{"tensors": o["tensors"], **o["ratios"]} for o in document["layouts"]]
        if "exchange_by_handles" in document:
            row["exchange_ms_by_handles"] = {
                count: one["median"] for count, one in document["exchange_by_handles"].items()
            }
        print(json.dumps(row, sort_keys=True))

    return main
