"""`WeightTransferStrategy`: config in, sender and receiver out.

The config says how trainer and engines are placed; the way of transfer follows from that. The
controller makes one strategy and sends it to the workers: it holds nothing but the config. Senders,
receivers, memory and sockets are made by the process that uses them.
"""

import logging
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rl_bridge.bridge.bridges import BroadcastTensorBridge, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.memory.passes import checked_count
from rl_bridge.strategies.receiver import BridgeTransferReceiver
from rl_bridge.strategies.requests import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)
from rl_bridge.strategies.sender import (
    BridgeTransferSender,
    CleanUpOptions,
    CudaIpcTransferSender,
    HelperTransferSender,
    WeightTransferSender,
)
from rl_bridge.trainers.chunks import DEFAULT_CHUNK_NBYTES, checked_threshold
from rl_bridge.transports.base import checked_seconds
from rl_bridge.transports.broadcast.messages import TorchDistributedWeightSyncInitInfo

_LOG = logging.getLogger(__name__)


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
            driver receives in addition to its workers, as with `rl_bridge.vllm.VLLMEngineAdapter`.
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
        """The backend of a broadcast."""
        return self.backend or ("nccl" if self.device == "cuda" else "gloo")


class WeightTransferStrategy(ABC):
    """One way of transfer.

    Order: `create_init_info` on the trainer's rank 0; its text to every engine; then
    `create_sender` on every rank of the trainer, and `create_receiver` on every engine.

    Attributes:
        config: as given.

    """

    transport: ClassVar[str]
    request_type: ClassVar[type[WeightUpdateRequest]]
    init_info_type: ClassVar[type] = EmptyWeightSyncInitInfo

    def __init__(self, config: WeightTransferConfig) -> None:
        """Keep the config."""
        self.config = config

    def get_request_type(self) -> type[WeightUpdateRequest]:
        """The requests that engines will be sent."""
        return self.request_type

    async def create_init_info(self) -> WeightSyncInitInfo:
        """Make what engines must know before the first sync. The sending rank calls it once."""
        return EmptyWeightSyncInitInfo()

    async def create_sender(
        self,
        init_info: WeightSyncInitInfo | None,
        *,
        rank: int = 0,
        exchange: GroupExchange | None = None,
    ) -> WeightTransferSender:
        """Make a trainer rank's half, in its process.

        Args:
            init_info: what `create_init_info` gave; ranks above 0 may not know it, and pass None.
            rank: of the trainer; rank 0 sends.
            exchange: how the trainer's ranks talk; None if there is one rank.

        Raises:
            WeightBridgeUnavailableError: this machine cannot do it, or several ranks without an
                exchange.
            ValueError: `rank` is not the exchange's.

        """
        if rank == 0 or init_info is not None:
            self._check_info(init_info)
        if rank != 0 and exchange is None:
            raise WeightBridgeUnavailableError(
                f"rank {rank} of the trainer has no exchange to learn from whether a sync failed. "
                "Pass exchange=, such as ProcessGroupExchange()."
            )
        if exchange is not None and exchange.rank != rank:
            # Ranks believe the exchange's rank 0 about what was sent.
            raise ValueError(f"rank={rank}: expected {exchange.rank}, as the exchange counts.")
        clean_up: CleanUpOptions = {
            "device": torch.cuda if self.config.device == "cuda" else None,
            "exchange": exchange,
            "timeout_s": self.config.timeout_s,
        }
        return self._make_sender(rank, clean_up)

    async def create_receiver(
        self, init_info: WeightSyncInitInfo, *, rank_offset: int = 1, rank: int = 0
    ) -> BridgeTransferReceiver:
        """Make an engine rank's half, in its process.

        Args:
            init_info: what the trainer's `create_init_info` gave.
            rank_offset: the engine's place in the group: ``config.rank_offset(engine)``.
            rank: of this process, in its engine.

        Raises:
            WeightBridgeUnavailableError: this machine cannot do it, or the group has no such rank.
            SegmentError: the trainer is gone.

        """
        self._check_info(init_info)
        options = self._engine_options(init_info, rank_offset)
        options |= self.config.engine_options
        bridge = make_weight_bridge(
            self.transport, source_worker=f"engine-{rank_offset}", source_rank=rank, **options
        )
        try:
            return self._make_receiver(bridge)
        except BaseException:
            bridge.close()
            raise

    def _check_info(self, init_info: object) -> None:
        """Refuse another strategy's init info."""
        if not isinstance(init_info, self.init_info_type):
            raise MalformedManifest(
                f"{type(self).__name__} got a {type(init_info).__name__}, not what its "
                "create_init_info makes. Make strategies from the same config on all sides."
            )

    # ---- what a subclass may change

    def _make_sender(self, rank: int, clean_up: CleanUpOptions) -> WeightTransferSender:
        if rank != 0:
            return HelperTransferSender(**clean_up)
        return BridgeTransferSender(
            self._sending_bridge(),
            self.request_type,
            threshold_nbytes=self.config.threshold_nbytes,
            **clean_up,
        )

    def _sending_bridge(self) -> TensorBridge:
        return self._trainer_bridge(0)

    def _make_receiver(self, bridge: TensorBridge) -> BridgeTransferReceiver:
        return BridgeTransferReceiver(bridge)

    def _engine_options(self, init_info: WeightSyncInitInfo, rank_offset: int) -> dict[str, Any]:
        del init_info, rank_offset
        return {}

    def _trainer_bridge(self, rank: int, **options: Any) -> TensorBridge:
        options |= self.config.trainer_options
        return make_weight_bridge(
            self.transport, source_worker="trainer", source_rank=rank, **options
        )


class SharedMemoryTransferStrategy(WeightTransferStrategy):
    """Trainer and engines share a machine, weights lie on the CPU."""

    transport = "shared-memory"
    request_type = SharedMemoryWeightUpdateRequest


class CudaIpcTransferStrategy(WeightTransferStrategy):
    """Trainer and engines share GPUs: every rank publishes on its own, engines open their GPU's."""

    transport = "cuda-vmm"
    request_type: ClassVar[type[WeightUpdateRequest]] = CudaIpcWeightUpdateRequest

    def _make_sender(self, rank: int, clean_up: CleanUpOptions) -> WeightTransferSender:
        return CudaIpcTransferSender(
            self._trainer_bridge(rank),
            self.request_type,
            gpu=_gpu_uuid(self.config.trainer_options.get("device")),
            threshold_nbytes=self.config.threshold_nbytes,
            **clean_up,
        )

    def _make_receiver(self, bridge: TensorBridge) -> BridgeTransferReceiver:
        return BridgeTransferReceiver(
            bridge, gpu=_gpu_uuid(self.config.engine_options.get("device"))
        )


class PackedCudaIpcTransferStrategy(CudaIpcTransferStrategy):
    """The same, with one handle for all tensors."""

    request_type = PackedCudaIpcWeightUpdateRequest


class BroadcastTransferStrategy(WeightTransferStrategy):
    """Trainer and engines have a process group of their own."""

    transport = "broadcast"
    request_type = BroadcastWeightUpdateRequest
    init_info_type = TorchDistributedWeightSyncInitInfo

    def __init__(self, config: WeightTransferConfig) -> None:
        """Keep the config."""
        super().__init__(config)
        self._opened: BroadcastTensorBridge | None = None

    async def create_init_info(self) -> WeightSyncInitInfo:
        """Open the group, in the process that will send."""
        if self._opened is None:
            size = None if self.config.is_elastic else self.config.world_size
            bridge = self._trainer_bridge(0, backend=self.config.wire_backend, world_size=size)
            assert isinstance(bridge, BroadcastTensorBridge)
            self._opened = bridge
        try:
            return self._opened.init_info()
        except BaseException:
            self._opened.close()
            self._opened = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Travel as the config alone: the open group belongs to this process."""
        return {"config": self.config, "_opened": None}

    def _sending_bridge(self) -> TensorBridge:
        bridge, self._opened = self._opened, None
        if bridge is None:
            raise WeightBridgeUnavailableError(
                "the broadcast group was not opened in this process. Call create_init_info in the "
                "process that sends, then create_sender in the same one, once."
            )
        return bridge

    def _make_receiver(self, bridge: TensorBridge) -> BridgeTransferReceiver:
        assert isinstance(bridge, BroadcastTensorBridge)
        bridge.join()  # now, so that the first version is sent to all engines at once
        return BridgeTransferReceiver(bridge)

    def _engine_options(self, init_info: WeightSyncInitInfo, rank_offset: int) -> dict[str, Any]:
        assert isinstance(init_info, TorchDistributedWeightSyncInitInfo)
        mine = init_info.model_copy(update={"rank_offset": rank_offset})
        return {"backend": init_info.backend, "init_info": mine}


def make_transfer_strategy(config: WeightTransferConfig) -> WeightTransferStrategy:
    """Choose the strategy for a placement; the log says which one, and why."""
    kind, why = _choose(config)
    _LOG.info("weights travel by %s: %s", kind.__name__, why)
    return kind(config)


def _choose(config: WeightTransferConfig) -> tuple[type[WeightTransferStrategy], str]:
    """The way of transfer, and the reason."""
    if not config.is_colocated:
        why = "trainer and engines are not on the same machine and devices"
        return BroadcastTransferStrategy, why
    if config.device == "cpu":
        why = "trainer and engines share this machine; weights lie on the CPU"
        return SharedMemoryTransferStrategy, why
    if config.wire_backend == "gloo":
        why = "backend='gloo' was asked for, which does not share GPU memory"
        return BroadcastTransferStrategy, why
    if config.is_packed:
        return PackedCudaIpcTransferStrategy, "trainer and engines share GPUs"
    why = "trainer and engines share GPUs, and is_packed=False was asked for"
    return CudaIpcTransferStrategy, why


def _gpu_uuid(device: object) -> str:
    """UUID of a GPU of this process; None is torch's current one."""
    if not torch.cuda.is_available():
        raise WeightBridgeUnavailableError(
            "no CUDA device can be used here, so nothing can be shared on one. Use device='cpu', "
            "or is_colocated=False."
        )
    ordinal = device if isinstance(device, int) else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(ordinal).uuid)
