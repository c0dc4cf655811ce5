"""How trainer and engines are placed, and which way of transfer follows from that. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rl_bridge.extractors.chunks import DEFAULT_CHUNK_NBYTES, checked_threshold
from rl_bridge.transports.base import checked_count, checked_seconds

__all__ = ["Choice", "WeightTransferConfig", "choose"]

Choice = Literal["broadcast", "shared-memory", "cuda-ipc", "packed-cuda-ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferConfig:
    """What the choice of a strategy depends on. Cheap: the controller holds it, and sends it.

    Attributes:
        is_colocated: trainer and engines are on the same machine and share its GPUs.
        device: where the weights lie, ``cpu`` or ``cuda``.
        backend: ``gloo`` or ``nccl``; None takes the device's own.
        num_engines: how many engines there are.
        tensor_parallel_size: ranks of an engine, in each of its degrees.
        pipeline_parallel_size: the same.
        data_parallel_size: the same.
        is_elastic: engines come and go: a broadcast group of no fixed size. Also for engines whose
            driver receives beside its workers, as with `rl_bridge.VLLMEngineAdapter`.
        is_packed: one handle for all tensors, of GPU memory; False: one for each in `extras`.
        threshold_nbytes: bytes of a batch; a module that is larger goes alone.
        timeout_s: how long ranks of the trainer wait for each other, while engines load.
        trainer_options: what the trainer's bridge is made with, such as ``address``.
        engine_options: what the engines' bridges are made with.

    Raises:
        TypeError: a size that is no integer, a limit that is no number.
        ValueError: a value out of its range.

    """

    is_colocated: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["gloo", "nccl"] | None = None
    num_engines: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    is_elastic: bool = False
    is_packed: bool = True
    threshold_nbytes: int = DEFAULT_CHUNK_NBYTES
    timeout_s: float = 600.0
    trainer_options: Mapping[str, object] = field(default_factory=dict)
    engine_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in {"cpu", "cuda"}:
            raise ValueError(f"device={self.device!r}: expected 'cpu' or 'cuda'.")
        if self.backend not in {"gloo", "nccl", None}:
            raise ValueError(f"backend={self.backend!r}: expected 'gloo', 'nccl' or None.")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend='nccl' with device='cpu': expected 'gloo', or None.")
        sizes = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size")
        for name in (*sizes, "data_parallel_size"):
            checked_count(name, getattr(self, name))
        checked_threshold(self.threshold_nbytes)
        checked_seconds("timeout_s", self.timeout_s)

    @property
    def ranks_per_engine(self) -> int:
        """Ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def world_size(self) -> int:
        """The trainer's sending rank, and all ranks of all engines."""
        return 1 + self.num_engines * self.ranks_per_engine

    def rank_offset(self, engine: int) -> int:
        """Place in the group of an engine's rank 0.

        Raises:
            ValueError: there is no such engine.

        """
        if not 0 <= engine < self.num_engines:
            raise ValueError(f"engine={engine}: expected 0 to {self.num_engines - 1}.")
        return 1 + engine * self.ranks_per_engine

    @property
    def wire_backend(self) -> Literal["gloo", "nccl"]:
        """What would carry a broadcast."""
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")


def choose(config: WeightTransferConfig) -> tuple[Choice, str]:
    """The way of transfer, and why."""
    if not config.is_colocated:
        return "broadcast", "trainer and engines are not on the same machine and devices"
    if config.device == "cpu":
        return "shared-memory", "trainer and engines share this machine; weights lie on the CPU"
    if config.wire_backend == "gloo":
        return "broadcast", "backend='gloo' was asked for, which does not share GPU memory"
    if config.is_packed:
        return "packed-cuda-ipc", "trainer and engines share GPUs"
    return "cuda-ipc", "trainer and engines share GPUs, and is_packed=False was asked for"
