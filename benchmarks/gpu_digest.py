"""Digest and pack in a GPU's memory: `python benchmarks/gpu_digest.py [--quick] [--out FILE]`.

Every round runs each lane once, so that a device that slows down slows all of them. Rates count the
bytes that are read, for the copy as for the digest. `kernel_s` is the device's own clock (events on
the stream) around what is put on the stream; `call_s` is the caller's, until the digests are here.

Prints one JSON row; without a usable GPU its status is `blocked`, with the cause, and the exit code
0. `--dry-run` goes through everything on the CPU, in torch, to see that it works: no figures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from _lib.gpu import GpuSize, gpu_command
from _lib.stats import summarise
from rich.console import Console
from rich.progress import track

from rl_bridge.cuda.digest import DevicePass, EngineName
from rl_bridge.manifest.table import ALIGNMENT
from rl_bridge.memory.passes import BytePlan

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "gpu_digest.json"
_TENSORS = (300, 20_000)
_DRY_NBYTES = 3_000_000
_CHECKED_NBYTES = 1 << 30
# Sources, arena, and the copy's target; the torch lane works on chunks beside them.
_ARENAS, _SPARE_NBYTES = 3, 2 << 30
# What torch does in its own operations is a peer, and takes long: it runs in few rounds.
_TORCH_ROUNDS = 3
_AIMS = {"digest_tb_per_s": 3.0, "digest_vs_copy": 0.7, "pack_vs_copy": 0.7}

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Lane:
    """One way: what is put on the stream, and the call that a user makes, if there is one."""

    nbytes: int
    """Bytes that are read."""
    kernel: Work
    call: Work | None = None
    rounds: int | None = None


class _Bench:
    """Tensors of one layout, 256-byte aligned and with room to lie 2 bytes further, and lanes."""

    def __init__(self, num_tensors: int, nbytes: int, device: torch.device) -> None:
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self.engine: EngineName = "triton" if self._cuda else "torch"
        # Whole rows of bf16, and no multiple of a leaf: every tensor has a tail.
        each = max(ALIGNMENT, nbytes // num_tensors // ALIGNMENT * ALIGNMENT - 2)
        self.sizes = np.full(num_tensors, each, np.uint64)
        room = -(-each // ALIGNMENT) * ALIGNMENT
        self.offsets = np.arange(num_tensors, dtype=np.uint64) * np.uint64(room)
        self.nbytes, self.total = each * num_tensors, room * num_tensors
        self.source = _memory(self.total + ALIGNMENT, device)
        self.source.view(torch.int64).random_()
        self.arena = _memory(self.total, device)
        self._other = _memory(self.total, device)
        self.plan = DevicePass(self.sizes, device, engine=self.engine)
        # A plan keeps the rows of the addresses that came last: one plan for each lane.
        self._odd = DevicePass(self.sizes, device, engine=self.engine)
        self._torch = DevicePass(self.sizes, device, engine="torch")

    def lanes(self) -> dict[str, _Lane]:
        """Every way, by name."""
        arena, other = self.arena.data_ptr(), self.arena
        sources = self.offsets + np.uint64(self.source.data_ptr())
        targets = self.offsets + np.uint64(arena)
        words = self.arena.view(torch.int64)

        def digest(plan: DevicePass) -> Work:
            places = targets.astype(np.int64)
            return lambda: plan._engine.digest(places, plan._out)  # noqa: SLF001 - without the wait

        def pack(plan: DevicePass, shift: int) -> Work:
            places = (sources + np.uint64(shift)).astype(np.int64)
            return lambda: plan._engine.pack(places, arena, plan._out)  # noqa: SLF001 - same

        return {
            "copy": _Lane(self.total, lambda: self._other.copy_(other)),
            "sum": _Lane(self.total, words.sum),
            "pack": _Lane(
                self.nbytes, pack(self.plan, 0), lambda: self.plan.copy_digest(sources, targets)
            ),
            "pack_2_bytes_off": _Lane(self.nbytes, pack(self._odd, 2)),
            "digest": _Lane(self.nbytes, digest(self.plan), lambda: self.plan.digest(targets)),
            "digest_in_torch": _Lane(self.nbytes, digest(self._torch), rounds=_TORCH_ROUNDS),
        }

    def check(self) -> int:
        """Pack, and compare: both engines with each other, the first tensors with the CPU's pass.

        Returns:
            How many tensors were compared with the CPU's.

        Raises:
            SystemExit: a digest differs.

        """
        sources = self.offsets + np.uint64(self.source.data_ptr())
        targets = self.offsets + np.uint64(self.arena.data_ptr())
        packed = self.plan.copy_digest(sources, targets)
        count = max(1, min(len(self.sizes), _CHECKED_NBYTES // int(self.sizes[0])))
        host = self.source[: int(self.offsets[count - 1] + self.sizes[count - 1])].cpu()
        places = self.offsets[:count] + np.uint64(host.data_ptr())
        expected = BytePlan(self.sizes[:count]).digest(places)
        if not packed == self.plan.digest(targets) == self._torch.digest(targets):
            raise SystemExit("the digests of the pack, of the arena and of torch differ")
        if packed[: len(expected)] != expected:
            raise SystemExit(f"the digests of the first {count} tensors differ from the CPU's")
        return count

    def sample(self, lane: _Lane) -> dict[str, float]:
        """Run a lane once: seconds on the device's clock, and on the caller's."""
        self._synchronize()
        found = {}
        if self._cuda:
            begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            lane.kernel()
            end.record()
            end.synchronize()
            found["kernel_s"] = begin.elapsed_time(end) / 1e3
        else:
            found["kernel_s"] = _seconds(lane.kernel)
        if lane.call:
            found["call_s"] = _seconds(lane.call)
        return found

    def _synchronize(self) -> None:
        if self._cuda:
            self._cuda.synchronize()


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes that begin at a multiple of 256."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skipped = -memory.data_ptr() % ALIGNMENT
    return memory[skipped : skipped + nbytes]


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _measure(
    num_tensors: int, nbytes: int, device: torch.device, rounds: int, console: Console
) -> dict[str, Any]:
    bench = _Bench(num_tensors, nbytes, device)
    checked = bench.check()
    lanes = bench.lanes()
    for lane in lanes.values():
        bench.sample(lane)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in lanes}
    for turn in track(range(rounds), f"{num_tensors} tensors", console=console):
        for name, lane in lanes.items():
            if lane.rounds is None or turn < lane.rounds:
                samples[name].append(bench.sample(lane))
    rows: dict[str, dict[str, Any]] = {}
    for name, lane in lanes.items():
        clocks = {clock: [one[clock] for one in samples[name]] for clock in samples[name][0]}
        rows[name] = {
            "read_nbytes": lane.nbytes,
            "samples": samples[name],
            **{clock: summarise(values) for clock, values in clocks.items()},
            "tb_per_s": lane.nbytes / summarise(clocks["kernel_s"])["median"] / 1e12,
        }
    return {
        "tensors": num_tensors,
        "nbytes": bench.nbytes,
        "engine": bench.engine,
        "tensors_compared_with_the_cpu": checked,
        "ratios": _ratios({name: row["tb_per_s"] for name, row in rows.items()}, rows),
        "lanes": rows,
    }


def _ratios(rates: dict[str, float], rows: dict[str, Any]) -> dict[str, Any]:
    """Rates against that of the copy; and what a caller waits for beyond the kernel."""
    ratios: dict[str, Any] = {
        f"{name}_vs_copy": rate / rates["copy"] for name, rate in rates.items() if name != "copy"
    }
    ratios["digest_vs_digest_in_torch"] = rates["digest"] / rates["digest_in_torch"]
    ratios["digest_tb_per_s"] = rates["digest"]
    for name in ("digest", "pack"):
        row = rows[name]
        beyond = row["call_s"]["median"] - row["kernel_s"]["median"]
        ratios[f"{name}_ms_beyond_the_kernel"] = 1e3 * beyond
    ratios["aims_met"] = {name: ratios[name] >= aim for name, aim in _AIMS.items()}
    return ratios


def _all(size: GpuSize, console: Console) -> dict[str, Any]:
    device = torch.device("cpu" if size.dry_run else f"cuda:{torch.cuda.current_device()}")
    return {"layouts": [_measure(n, size.nbytes, device, size.rounds, console) for n in _TENSORS]}


main = gpu_command(
    _OUT, _AIMS, _all, copies=_ARENAS, spare_nbytes=_SPARE_NBYTES, dry_nbytes=_DRY_NBYTES
)

if __name__ == "__main__":
    typer.run(main)
