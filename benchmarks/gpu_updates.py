"""Updates of an engine on its trainer's GPU: `python benchmarks/gpu_updates.py [--quick]`.

Two processes on one GPU: a trainer with bf16 weights, all of which change before every sample, and
an engine. Ours goes over `cuda-vmm`, verified and proven, and is installed by flip and by copy;
each round has an update that is undone as well. In the same run, the ways that others go: a handle
for each tensor, packed buckets of 1 GiB, and host memory. What the driver takes to exchange the
same bytes in one allocation or in many stands beside it.

`handoff_s` is from the trainer's first call until the engine holds the version.

Prints one JSON row; without a usable GPU its status is `blocked`, with the cause, and the exit code
0. `--dry-run` goes through everything on host memory, tiny, to see that it works: no figures.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from _lib.gpu import GpuSize, gpu_command
from _lib.gpu_trainer import (
    DRY_TRANSPORT,
    Remote,
    know_dry_transport,
    now,
    pinned,
    synchronize,
    unpin,
)
from _lib.stats import summarise
from rich.console import Console
from rich.progress import track

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.cuda.devices import driver_at
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import InstallProof

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "gpu_updates.json"
_TENSORS = (300, 20_000)
_DRY_TENSORS = (30, 200)
_DRY_NBYTES = 3_000_000
# The trainer's weights, two slots, the engine's weights, and buckets or a copy's undo.
_COPIES, _SPARE_NBYTES = 5, 4 << 30
_HANDLES = (1, 16, 64, 256)
_WARMUP = 3
_PEER_ROUNDS = 5
_AIMS = {"publish_vs_copy": 0.7, "flip_ms": 10.0}

Sample = dict[str, float]


class _Engine(torch.nn.Module):
    """As many parameters as the trainer has weights, in no order of layers."""

    def __init__(self, num_tensors: int, nbytes: int, device: str) -> None:
        super().__init__()
        numel = max(1, nbytes // num_tensors // 2)
        for i in range(num_tensors):
            weight = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            self.register_parameter(f"w{i}", torch.nn.Parameter(weight, requires_grad=False))

    def require(self, sums: list[int], what: str) -> None:
        """Compare first, middle and last weight with the trainer's."""
        weights = list(self.parameters())
        chosen = (weights[i].view(torch.int16) for i in (0, len(weights) // 2, -1))
        if [int(words.sum(dtype=torch.int64)) for words in chosen] != sums:
            raise SystemExit(f"{what}: the engine does not hold what the trainer sent")


class _Adapter(ModuleInstallAdapter):
    """Has a proof fail on request, behind the install, and times the undo."""

    fails = False
    undo_ms = 0.0

    def prove(self) -> InstallProof:
        proof = super().prove()
        if self.fails:
            raise ProofFailed("as planned. Try again.")
        return proof

    def undo(self) -> None:
        start = time.perf_counter()
        super().undo()
        self.undo_ms = 1e3 * (time.perf_counter() - start)


class _Ours:
    """A bridge in each process, and an engine that is flipped or copied into."""

    def __init__(self, trainer: Remote, engine: _Engine, transport: str, mode: Any) -> None:
        self._trainer, self._engine, self._name = trainer, engine, f"ours by {mode}"
        trainer.call("open", transport)
        self._bridge = make_weight_bridge(transport)
        self._adapter = _Adapter(engine, mode=mode)
        self._executor = RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self._adapter
        )

    def sample(self) -> Sample:
        """One update that stands, then one that is undone."""
        sums = self._trainer.call("step")
        told = self._trainer.call("publish")
        self._executor.update_weights(told["manifest"])
        end = now()
        self._engine.require(sums, self._name)
        ack = self._executor.last_ack
        assert ack is not None
        found = {f"{phase}_ms": ms for phase, ms in ack.timings_ms.items()}
        found |= {"publish_s": told["publish_s"], "handoff_s": end - told["start"]}
        self._trainer.call("step")
        self._adapter.fails = True
        try:
            self._executor.update_weights(self._trainer.call("publish")["manifest"])
            raise SystemExit(f"{self._name}: an update whose proof failed was acknowledged")
        except ProofFailed:
            self._engine.require(sums, f"{self._name}, undone")
        finally:
            self._adapter.fails = False
        return found | {"undo_ms": self._adapter.undo_ms}

    def close(self) -> None:
        """Close both bridges; the engine goes on with its bytes."""
        self._bridge.close()
        self._trainer.call("close")


class _Peer:
    """A way without a bridge: no snapshot, no digest, no undo."""

    def __init__(self, name: str, trainer: Remote, engine: _Engine, device: str) -> None:
        self._name, self._trainer, self._engine, self._device = name, trainer, engine, device
        self._host = pinned(trainer.call("host_buffer"), device) if name == "host" else None

    def close(self) -> None:
        """Let go of host memory, if there is any."""
        if self._host is not None:
            unpin(self._host, self._device)
            self._host = None

    def sample(self) -> Sample:
        """One update."""
        sums = self._trainer.call("step")
        start = self._receive()
        synchronize(self._device)
        end = now()
        self._engine.require(sums, self._name)
        return {"handoff_s": end - start}

    def _receive(self) -> float:
        if self._host is not None:
            start = float(self._trainer.call("to_host"))
            self._copy_in([self._host.view(torch.bfloat16)])
            return start
        start, tensors = self._trainer.call(self._name)
        self._copy_in(tensors)
        synchronize(self._device)  # before the trainer's memory is let go of
        return float(start)

    def _copy_in(self, flats: list[torch.Tensor]) -> None:
        """Cut flat tensors, which hold the engine's weights one behind the other, into these."""
        flat, at, following = flats[0], 0, iter(flats[1:])
        for weight in self._engine.parameters():
            if at == flat.numel():
                flat, at = next(following), 0
            weight.copy_(flat[at : at + weight.numel()], non_blocking=True)
            at += weight.numel()


def _exchange(driver: Any, total: int, num_handles: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to exchange `total` bytes of a driver's memory, in so many allocations."""
    each = -(-total // num_handles)
    with ExitStack() as stack:

        def made() -> Allocation:
            allocation = Allocation.create(driver, each)
            stack.callback(allocation.close)
            return allocation

        sides = [[made() for _ in range(num_handles)] for _ in range(2)]
        ranges = [AddressRange(driver, each) for _ in range(num_handles)]
        for window in ranges:
            stack.callback(window.close)
        samples = []
        for turn in range(rounds + 2):
            start = time.perf_counter()
            for window, allocation in zip(ranges, sides[turn % 2], strict=True):
                window.swap(allocation, writable=False)
            samples.append(1e3 * (time.perf_counter() - start))
    # The first one finds nothing there to be unmapped, the second one is warm-up.
    return {"samples_ms": samples[2:], **summarise(samples[2:])}


@dataclass(frozen=True, slots=True)
class _Run:
    """What all lanes of a run have in common."""

    nbytes: int
    device: str
    transport: str
    rounds: int
    console: Console

    def layout(self, num_tensors: int) -> dict[str, Any]:
        """Every lane, with so many tensors."""
        self.console.print(f"{num_tensors} tensors")
        lanes = {}
        with Remote(self.device, num_tensors, self.nbytes) as trainer:
            copies = [trainer.call("copy") for _ in range(self.rounds)]
            for name in ("flip", "copy", "tensors", "buckets", "host"):
                # A new one for each: a flip moves its weights into the range.
                engine = _Engine(num_tensors, self.nbytes, self.device)
                lanes[name] = self._lane(name, trainer, engine)
                del engine
                if self.device != "cpu":
                    torch.cuda.empty_cache()
        copied = {"samples_s": copies, **summarise(copies)}
        row = {"tensors": num_tensors, "nbytes": self.nbytes, "copy_on_the_device": copied}
        return {**row, "lanes": lanes, "ratios": _ratios(summarise(copies)["median"], lanes)}

    def _lane(self, name: str, trainer: Remote, engine: _Engine) -> dict[str, Any]:
        is_peer = name not in {"flip", "copy"}
        rounds = min(self.rounds, _PEER_ROUNDS) if is_peer else self.rounds
        try:
            with self._sampler(name, trainer, engine) as sample:
                warmup = [sample() for _ in range(_WARMUP)]
                samples = [sample() for _ in track(range(rounds), name, console=self.console)]
        except (RuntimeError, OSError) as error:
            if not is_peer:
                raise
            return {"error": str(error)}  # a container may lack what a peer needs: shared memory
        figures = {key: summarise([one[key] for one in samples]) for key in samples[0]}
        return {"warmup_samples": warmup, "samples": samples, **figures}

    @contextmanager
    def _sampler(
        self, name: str, trainer: Remote, engine: _Engine
    ) -> Iterator[Callable[[], Sample]]:
        is_peer = name not in {"flip", "copy"}
        lane = (
            _Peer(name, trainer, engine, self.device)
            if is_peer
            else _Ours(trainer, engine, self.transport, name)
        )
        try:
            yield lane.sample
        finally:
            lane.close()


def _ratios(copy_s: float, lanes: dict[str, Any]) -> dict[str, Any]:
    """What is compared, from medians."""
    flip, copy = lanes["flip"], lanes["copy"]
    found: dict[str, Any] = {
        "publish_vs_copy": copy_s / flip["publish_s"]["median"],
        "flip_ms": flip["install_ms"]["median"],
        "copy_install_ms": copy["install_ms"]["median"],
        "attach_ms": flip["attach_ms"]["median"],
        "verify_ms": flip["verify_ms"]["median"],
        "undo_of_flip_ms": flip["undo_ms"]["median"],
        "undo_of_copy_ms": copy["undo_ms"]["median"],
        "handoff_s": {
            name: lane["handoff_s"]["median"] if "error" not in lane else None
            for name, lane in lanes.items()
        },
    }
    found["aims_met"] = {
        "publish_vs_copy": found["publish_vs_copy"] >= _AIMS["publish_vs_copy"],
        "flip_ms": found["flip_ms"] <= _AIMS["flip_ms"],
    }
    return found


def _all(size: GpuSize, console: Console) -> dict[str, Any]:
    if size.dry_run:
        know_dry_transport()
    device, transport = ("cpu", DRY_TRANSPORT) if size.dry_run else ("cuda:0", "cuda-vmm")
    driver = driver_at("host", None) if size.dry_run else driver_at("cuda", 0)
    exchanges = {str(n): _exchange(driver, size.nbytes, n, size.rounds) for n in _HANDLES}
    run = _Run(size.nbytes, device, transport, size.rounds, console)
    return {
        "exchange_by_handles": exchanges,
        "layouts": [run.layout(n) for n in (_DRY_TENSORS if size.dry_run else _TENSORS)],
    }


main = gpu_command(
    _OUT, _AIMS, _all, copies=_COPIES, spare_nbytes=_SPARE_NBYTES, dry_nbytes=_DRY_NBYTES
)

if __name__ == "__main__":
    typer.run(main)
