"""`WeightTransferStrategy`: config in, sender and receiver out.

The controller makes one and sends it to the workers: it holds nothing but the config. Senders,
receivers, memory and sockets are made by the process that uses them.
"""

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from rl_bridge.bridge.bridges import BroadcastTensorBridge, make_weight_bridge
from rl_bridge.bridge.group_exchange import GroupExchange
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transfer.clean_up import CleanUp, cuda_calls
from rl_bridge.bridge.transfer.config import WeightTransferConfig, choose
from rl_bridge.bridge.transfer.init_info import EmptyWeightSyncInitInfo, WeightSyncInitInfo
from rl_bridge.bridge.transfer.ipc_sender import CudaIpcTransferSender
from rl_bridge.bridge.transfer.receiver import BridgeTransferReceiver
from rl_bridge.bridge.transfer.requests import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
    WeightUpdateRequest,
)
from rl_bridge.bridge.transfer.sender import (
    BridgeTransferSender,
    HelperTransferSender,
    WeightTransferSender,
)
from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.transports.broadcast.init_info import TorchDistributedWeightSyncInitInfo

__all__ = [
    "BroadcastTransferStrategy",
    "CudaIpcTransferStrategy",
    "PackedCudaIpcTransferStrategy",
    "SharedMemoryTransferStrategy",
    "WeightTransferStrategy",
    "make_transfer_strategy",
]

_LOG = logging.getLogger(__name__)


class WeightTransferStrategy(ABC):
    """One way of transfer.

    Order: `create_init_info` on the trainer's rank 0; its text to every engine; then
    `create_sender` on every rank of the trainer, and `create_receiver` on every engine.

    Attributes:
        config: as given.

    """

    transport: ClassVar[str]
    request_type: ClassVar[type[WeightUpdateRequest]]

    def __init__(self, config: WeightTransferConfig) -> None:
        """Keep the config."""
        self.config = config

    def get_request_type(self) -> type[WeightUpdateRequest]:
        """The requests that engines will be sent."""
        return self.request_type

    async def create_init_info(self) -> WeightSyncInitInfo:
        """What engines must know before the first sync. Called once, by the rank that sends."""
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
            exchange: how the trainer's ranks talk; None where there is one.

        Raises:
            WeightBridgeUnavailableError: this machine cannot do it, or several ranks without an
                exchange.

        """
        if rank == 0 or init_info is not None:
            self._check_info(init_info)
        if rank != 0 and exchange is None:
            msg = (
                f"rank {rank} of the trainer has no exchange to learn from what became of a sync. "
                "Pass exchange=, such as ProcessGroupExchange()."
            )
            raise WeightBridgeUnavailableError(msg)
        clean_up = CleanUp(
            device=cuda_calls(self.config.device),
            exchange=exchange,
            timeout_s=self.config.timeout_s,
        )
        return self._make_sender(rank, exchange, clean_up)

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
        bridge = make_weight_bridge(
            self.transport,
            source_worker=f"engine-{rank_offset}",
            source_rank=rank,
            **{**options, **self.config.engine_options},
        )
        try:
            return self._make_receiver(bridge)
        except BaseException:
            bridge.close()
            raise

    # ---- what a strategy fills in

    @abstractmethod
    def _check_info(self, init_info: object) -> None:
        """Refuse another strategy's init info."""

    def _make_sender(
        self, rank: int, exchange: GroupExchange | None, clean_up: CleanUp
    ) -> WeightTransferSender:
        del exchange
        if rank != 0:
            return HelperTransferSender(clean_up)
        return BridgeTransferSender(
            self._trainer_bridge(rank),
            self.request_type,
            threshold_nbytes=self.config.threshold_nbytes,
            clean_up=clean_up,
        )

    def _make_receiver(self, bridge: TensorBridge) -> BridgeTransferReceiver:
        return BridgeTransferReceiver(bridge)

    def _engine_options(self, init_info: WeightSyncInitInfo, rank_offset: int) -> dict[str, object]:
        del init_info, rank_offset
        return {}

    def _trainer_bridge(self, rank: int, **options: object) -> TensorBridge:
        return make_weight_bridge(
            self.transport,
            source_worker="trainer",
            source_rank=rank,
            **{**options, **self.config.trainer_options},
        )


class _WithoutInitInfo(WeightTransferStrategy):
    """Manifests say where the bytes are; nothing has to be known before."""

    def _check_info(self, init_info: object) -> None:
        if not isinstance(init_info, EmptyWeightSyncInitInfo):
            raise MalformedManifest(_foreign(self, init_info))


class SharedMemoryTransferStrategy(_WithoutInitInfo):
    """Trainer and engines share a machine, weights lie on the CPU."""

    transport = "shared-memory"
    request_type = SharedMemoryWeightUpdateRequest


class CudaIpcTransferStrategy(_WithoutInitInfo):
    """Trainer and engines share GPUs: every rank publishes on its own, engines open their GPU's."""

    transport = "cuda-vmm"
    request_type: ClassVar[type[WeightUpdateRequest]] = CudaIpcWeightUpdateRequest

    def _make_sender(
        self, rank: int, exchange: GroupExchange | None, clean_up: CleanUp
    ) -> WeightTransferSender:
        return CudaIpcTransferSender(
            self._trainer_bridge(rank),
            self.request_type,
            gpu=_gpu_uuid(self.config.trainer_options.get("device")),
            exchange=exchange,
            threshold_nbytes=self.config.threshold_nbytes,
            clean_up=clean_up,
            timeout_s=self.config.timeout_s,
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

    def __init__(self, config: WeightTransferConfig) -> None:
        """Keep the config."""
        super().__init__(config)
        self._opened: BroadcastTensorBridge | None = None

    async def create_init_info(self) -> WeightSyncInitInfo:
        """Open the group, in the process that will send."""
        if self._opened is None:
            bridge = self._trainer_bridge(0, **self._group_options())
            assert isinstance(bridge, BroadcastTensorBridge)
            self._opened = bridge
        try:
            return self._opened.init_info()
        except BaseException:
            self._opened.close()
            self._opened = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Travel as the config alone: what was opened belongs to this process."""
        return {"config": self.config, "_opened": None}

    def _group_options(self) -> dict[str, object]:
        size = None if self.config.is_elastic else self.config.world_size
        return {"backend": self.config.wire_backend, "world_size": size}

    def _make_sender(
        self, rank: int, exchange: GroupExchange | None, clean_up: CleanUp
    ) -> WeightTransferSender:
        del exchange
        if rank != 0:
            return HelperTransferSender(clean_up)
        bridge, self._opened = self._opened, None
        if bridge is None:
            msg = (
                "the broadcast group was not opened in this process. Call create_init_info in the "
                "process that sends, then create_sender in the same one, once."
            )
            raise WeightBridgeUnavailableError(msg)
        return BridgeTransferSender(
            bridge,
            self.request_type,
            threshold_nbytes=self.config.threshold_nbytes,
            clean_up=clean_up,
        )

    def _make_receiver(self, bridge: TensorBridge) -> BridgeTransferReceiver:
        assert isinstance(bridge, BroadcastTensorBridge)
        bridge.join()  # now: the first version then goes to all at once
        return BridgeTransferReceiver(bridge)

    def _engine_options(self, init_info: WeightSyncInitInfo, rank_offset: int) -> dict[str, object]:
        assert isinstance(init_info, TorchDistributedWeightSyncInitInfo)
        mine = init_info.model_copy(update={"rank_offset": rank_offset})
        return {"backend": init_info.backend, "init_info": mine}

    def _check_info(self, init_info: object) -> None:
        if not isinstance(init_info, TorchDistributedWeightSyncInitInfo):
            raise MalformedManifest(_foreign(self, init_info))


_STRATEGIES: dict[str, type[WeightTransferStrategy]] = {
    "broadcast": BroadcastTransferStrategy,
    "shared-memory": SharedMemoryTransferStrategy,
    "cuda-ipc": CudaIpcTransferStrategy,
    "packed-cuda-ipc": PackedCudaIpcTransferStrategy,
}


def make_transfer_strategy(config: WeightTransferConfig) -> WeightTransferStrategy:
    """Choose the strategy for a placement; the log says which one, and why."""
    name, why = choose(config)
    _LOG.info("weights travel by %s: %s", name, why)
    return _STRATEGIES[name](config)


def _gpu_uuid(device: object) -> str:
    """UUID of a GPU of this process; None is torch's current one."""
    if not torch.cuda.is_available():
        msg = (
            "no CUDA device can be used here, so nothing can be shared on one. Use device='cpu', "
            "or is_colocated=False."
        )
        raise WeightBridgeUnavailableError(msg)
    ordinal = device if isinstance(device, int) else torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(ordinal).uuid)


def _foreign(strategy: WeightTransferStrategy, given: object) -> str:
    return (
        f"{type(strategy).__name__} got a {type(given).__name__}, not what its create_init_info "
        "makes. Make strategies from the same config on all sides."
    )
