"""The trainer's process of `gpu_updates.py`, and the line to it.

What crosses the line by a peer's way are tensors, by torch's own reductions: for CUDA tensors that
is `reduce_tensor`, one handle each. What crosses it by ours is text.
"""

import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.multiprocessing as mp

from rl_bridge import make_weight_bridge
from rl_bridge.testing.faults import HostVMM
from rl_bridge.transports import registry

__all__ = [
    "DRY_TRANSPORT",
    "Remote",
    "know_dry_transport",
    "now",
    "pinned",
    "synchronize",
    "unpin",
]

DRY_TRANSPORT = HostVMM.name
_DEADLINE_S = 300.0
_BUCKET_NBYTES = 1 << 30
_SHM = "/dev/shm"  # where torch puts shared memory


def know_dry_transport() -> None:
    """Have the transport on host memory known by its name in this process."""
    registry.register_transport(HostVMM)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def now() -> float:
    """Seconds on a clock that all processes of the machine share."""
    return time.monotonic_ns() / 1e9


def pinned(buffer: torch.Tensor, device: str) -> torch.Tensor:
    """Page-lock shared host memory, so that copies to and from the device run at full speed."""
    if device != "cpu":
        cuda: Any = torch.cuda
        code = cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister answered {code}. Raise ulimit -l.")
    return buffer


def unpin(buffer: torch.Tensor, device: str) -> None:
    """Undo `pinned`: memory that is mapped at these addresses later could not be page-locked."""
    if device != "cpu":
        cuda: Any = torch.cuda
        cuda.cudart().cudaHostUnregister(buffer.data_ptr())


class Trainer:
    """Weights that change, and each way of sending them."""

    def __init__(self, device: str, num_tensors: int, nbytes: int) -> None:
        self._device = device
        numel = max(1, nbytes // num_tensors // 2)
        self.weights = {
            f"w{i}": torch.zeros(numel, dtype=torch.bfloat16, device=device)
            for i in range(num_tensors)
        }
        self._words = [weight.view(torch.int16) for weight in self.weights.values()]
        for i, words in enumerate(self._words):
            words.fill_(i % 251)
        self._version = 0
        self._bridge: Any = None
        self._update_id = ""
        self._host: torch.Tensor | None = None

    def step(self) -> list[int]:
        """Change every word; returns sums of the first, middle and last tensor."""
        torch._foreach_add_(self._words, 0x0101)
        synchronize(self._device)
        return [int(self._words[i].sum(dtype=torch.int64)) for i in (0, len(self._words) // 2, -1)]

    def copy(self) -> float:
        """Copy as many bytes on the device, from one flat buffer to another; seconds."""
        total = sum(words.nbytes for words in self._words)
        source, target = (
            torch.ones(total, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        target.copy_(source)
        synchronize(self._device)
        start = now()
        target.copy_(source)
        synchronize(self._device)
        seconds = now() - start
        del source, target
        if self._device != "cpu":
            torch.cuda.empty_cache()  # what torch keeps, neither slots nor the engine can have
        return seconds

    # ---- ours -----------------------------------------------------------------------------------

    def open(self, transport: str) -> None:
        if transport == DRY_TRANSPORT:
            know_dry_transport()
        self._bridge = make_weight_bridge(transport, nonfinite="warn")

    def publish(self) -> dict[str, Any]:
        if self._update_id:
            self._bridge.release(self._update_id)
        self._version += 1
        start = now()
        manifest = self._bridge.publish(self.weights, weight_version=self._version)
        seconds = now() - start
        self._update_id = manifest.update_id
        return {"manifest": manifest.to_json(), "publish_s": seconds, "start": start}

    def close(self) -> None:
        self._bridge.close()
        self._bridge, self._update_id = None, ""

    # ---- the peers ------------------------------------------------------------------------------

    def tensors(self) -> tuple[float, list[torch.Tensor]]:
        """Every tensor by a handle of its own."""
        return now(), list(self.weights.values())

    def buckets(self) -> tuple[float, list[torch.Tensor]]:
        """Flat buffers of up to 1 GiB, packed now."""
        start = now()
        packed: list[torch.Tensor] = []
        group: list[torch.Tensor] = []
        held = 0
        for weight in self.weights.values():
            if group and held + weight.nbytes > _BUCKET_NBYTES:
                packed.append(torch.cat(group))
                group, held = [], 0
            group.append(weight)
            held += weight.nbytes
        packed.append(torch.cat(group))
        synchronize(self._device)
        return start, packed

    def host_buffer(self) -> torch.Tensor:
        """Shared host memory for all weights."""
        total = sum(words.nbytes for words in self._words)
        room = os.statvfs(_SHM)
        if room.f_bavail * room.f_frsize < total:  # to write there would be SIGBUS
            raise RuntimeError(f"{_SHM} has no room for {total} bytes. In a container: --shm-size.")
        plain: Any = torch.zeros(total, dtype=torch.uint8)
        self._host = buffer = pinned(plain.share_memory_(), self._device)
        return buffer

    def to_host(self) -> float:
        """Copy every tensor there."""
        if self._host is None:
            raise RuntimeError("there is no host buffer. Call host_buffer first.")
        start, at = now(), 0
        for weight in self.weights.values():
            room = self._host[at : at + weight.nbytes]
            room.view(torch.bfloat16).copy_(weight, non_blocking=True)
            at += weight.nbytes
        synchronize(self._device)
        return start


def _serve(line: Connection, device: str, num_tensors: int, nbytes: int) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(device, num_tensors, nbytes)
    answer: Any = None
    while True:
        try:
            name, arguments = line.recv()
        except EOFError:
            return
        try:
            # Kept until the next call: what was exported must not be freed while it is opened.
            answer = getattr(trainer, name)(*arguments)
            line.send((True, answer))
        except Exception:  # noqa: BLE001 - told to the parent, which notes it beside the figures
            line.send((False, traceback.format_exc()))


class Remote:
    """The trainer, from the engine's process."""

    def __init__(self, device: str, num_tensors: int, nbytes: int) -> None:
        """Start it."""
        spawn = mp.get_context("spawn")
        self._line, there = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(there, device, num_tensors, nbytes), daemon=True
        )
        self._process.start()
        there.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method there.

        Raises:
            RuntimeError: it failed, or did not answer in time.

        """
        try:
            self._line.send((name, arguments))
            if not self._line.poll(_DEADLINE_S):
                raise RuntimeError(f"the trainer did not answer {name} within {_DEADLINE_S} s.")
            is_good, answer = self._line.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"the trainer's process ended in {name}.") from error
        if not is_good:
            raise RuntimeError(f"the trainer failed in {name}: {answer}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
