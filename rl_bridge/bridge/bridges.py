"""The bridges that users make: one class for each transport, and a maker by name."""

from typing import Any, ClassVar

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.transports.registry import canonical_name

__all__ = [
    "CUDAIPCTensorBridge",
    "CUDAVMMTensorBridge",
    "LocalTensorCopyBridge",
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


# Transports whose bridges users know by a class name. Every other one gets a class when asked for.
_NAMED: dict[str, type[TensorBridge]] = {
    kind.transport: kind
    for kind in (
        LocalTensorCopyBridge,
        SharedMemoryTensorBridge,
        CUDAVMMTensorBridge,
        CUDAIPCTensorBridge,
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
        transport: ``local-clone``, ``shared-memory``, ``cuda-vmm`` or ``cuda-ipc``; short forms
            ``local``, ``shm``, ``ipc``; or one that was registered with
            `rl_bridge.transports.registry.register_transport`.
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
