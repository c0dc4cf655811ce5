"""Which transports there are, by name. The only module that knows them all."""

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.transports.base import Availability, Transport
from rl_bridge.transports.cuda import CUDAIPC, CUDAVMM
from rl_bridge.transports.local import LocalClone
from rl_bridge.transports.shared_memory import SharedMemory

__all__ = ["ALIASES", "TRANSPORTS", "canonical_name", "probe", "transport_class"]

TRANSPORTS: dict[str, type[Transport]] = {
    kind.name: kind for kind in (LocalClone, SharedMemory, CUDAVMM, CUDAIPC)
}

ALIASES = {
    "local": "local-clone",
    "shm": "shared-memory",
    "ipc": "cuda-ipc",
    "cuda-vmm-fd": "cuda-vmm",
}

# Names that stand for what seed users know to be out of reach on one node's transports.
_MULTI_NODE = frozenset({"multi-node", "rdma", "nccl-rdma", "nixl", "broadcast"})


def canonical_name(name: str) -> str:
    """Resolve a short form.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.

    """
    resolved = ALIASES.get(name, name)
    if resolved in TRANSPORTS:
        return resolved
    if resolved in _MULTI_NODE:
        msg = (
            f"multi-node/RDMA weight transport is not implemented (asked for {name!r}). "
            "Publish a gathered full-state update on one node with shared-memory."
        )
        raise WeightBridgeUnavailableError(msg)
    known = ", ".join([*TRANSPORTS, *ALIASES])
    msg = f"unknown weight bridge transport {name!r}, expected one of: {known}."
    raise WeightBridgeUnavailableError(msg)


def transport_class(name: str) -> type[Transport]:
    """Find a transport by name or short form.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.

    """
    return TRANSPORTS[canonical_name(name)]


def probe(name: str) -> Availability:
    """Whether a transport works on this machine."""
    return transport_class(name).probe()
