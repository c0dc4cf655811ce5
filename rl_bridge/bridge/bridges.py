"""The bridges that users make: one class for each transport, and a maker by name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.transports.base import Transport
from rl_bridge.transports.broadcast.init_info import BroadcastInitInfo
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.registry import canonical_name

__all__ = [
    "BroadcastTensorBridge",
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "LocalTensorCopyBridge",
    "NIXLTensorBridge",
    "SharedMemoryTensorBridge",
    "TensorBridge",
    "make_weight_bridge",
]


class LocalTensorCopyBridge(TensorBridge):
    """``local-clone``: one process, every update copied."""

    transport: ClassVar[str] = "local-clone"


class SharedMemoryTensorBridge(TensorBridge):
    """``shared-memory``: CPU tensors between processes of one machine, no copy on import."""

    transport: ClassVar[str] = "shared-memory"


class CUDAVMMTensorBridge(TensorBridge):
    """``cuda-vmm``: GPU tensors between processes of one machine, no copy on import."""

    transport: ClassVar[str] = "cuda-vmm"


class CUDAIPCTensorBridge(TensorBridge):
    """``cuda-ipc``: GPU tensors between processes of one machine, copied on import."""

    transport: ClassVar[str] = "cuda-ipc"


class BroadcastTensorBridge(TensorBridge):
    """``broadcast``: one trainer to many engines over Gloo or NCCL, also on other machines."""

    transport: ClassVar[str] = "broadcast"

    def init_info(self, *, rank_offset: int = 1) -> BroadcastInitInfo:
        """What an engine's side takes as ``init_info=`` to join before the first version.

        Engines that only get manifests need none: a manifest says it as well.

        Args:
            rank_offset: the place in the group of that engine's rank 0.

        Raises:
            TransportUnavailable: the backend is blocked here, or the port is taken.

        """
        self._publisher_end()
        assert isinstance(self._transport, Broadcast)
        return self._transport.init_info(rank_offset=rank_offset)

    def join(self) -> None:
        """Join the group that ``init_info=`` names now, and be sent every version from here on.

        Without it the first `import_update` joins.

        Raises:
            SegmentError: its publisher is gone.
            WeightBridgeUnavailableError: it has no room for this side.
            TransferTimeout: it does not answer in time.

        """
        self._consumer_end()


class NIXLTensorBridge(TensorBridge):
    """``nixl``: engines read out of the trainer's memory, also from other machines."""

    transport: ClassVar[str] = "nixl"

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        # Each rank's server has a port and a name of its own.
        return super()._make_transport({"source_rank": self.source_rank, **options})


# Transports whose bridges users know by a class name. Every other one gets a class when asked for.
_NAMED: dict[str, type[TensorBridge]] = {
    kind.transport: kind
    for kind in (
        LocalTensorCopyBridge,
        SharedMemoryTensorBridge,
        CUDAVMMTensorBridge,
        CUDAIPCTensorBridge,
        BroadcastTensorBridge,
        NIXLTensorBridge,
    )
}


def make_weight_bridge(
    transport: str = "local-clone",
    *,
    source_worker: str = "local-training",
    source_rank: int = 0,
    **options: object,
) -> TensorBridge:
    """Make the bridge of a transport.

    Args:
        transport: ``local-clone``, ``shared-memory``, ``cuda-vmm``, ``cuda-ipc``,
            ``broadcast`` or ``nixl``; short forms ``local``, ``shm``, ``ipc``; or one that was
            registered with `rl_bridge.transports.registry.register_transport`.
        source_worker: this worker's name.
        source_rank: its rank.
        options: what `TensorBridge` and the transport take.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.
        TypeError: an option that the transport does not have.
        ValueError: an option out of its range.

    """
    name = canonical_name(transport)
    kind: Any = _NAMED.get(name) or type("TensorBridge", (TensorBridge,), {"transport": name})
    made: TensorBridge = kind(source_worker=source_worker, source_rank=source_rank, **options)
    return made
