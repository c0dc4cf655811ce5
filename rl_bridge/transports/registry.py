"""Which transports there are, by name. The only module that knows them all.

A transport of your own joins by `register_transport`; from then on its name is worth as much as
the built-in ones, in `rl_bridge.make_weight_bridge` for instance.

Two transports can do more than the seam asks for: `Broadcast.init_info`, `NIXL.catalog` and
`NIXL.counters`. A bridge that offers this to users takes the classes from here, and the types of
what they give.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from rl_bridge.errors import WeightBridgeUnavailableError, did_you_mean
from rl_bridge.transports.base import Availability, Transport
from rl_bridge.transports.broadcast.messages import BroadcastInitInfo
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.cuda import CUDAIPC, CUDAVMM
from rl_bridge.transports.files.transport import Files
from rl_bridge.transports.local import LocalClone
from rl_bridge.transports.nixl.agent import Counters
from rl_bridge.transports.nixl.messages import Entry
from rl_bridge.transports.nixl.transport import NIXL
from rl_bridge.transports.shared_memory import SharedMemory
from rl_bridge.transports.wire.tls import TLSFiles

__all__ = [
    "ALIASES",
    "NIXL",
    "TRANSPORTS",
    "Broadcast",
    "BroadcastInitInfo",
    "Counters",
    "Entry",
    "Files",
    "TLSFiles",
    "canonical_name",
    "probe",
    "register_transport",
    "transport_class",
]

_Kind = TypeVar("_Kind", bound=type[Transport])

_KINDS: dict[str, type[Transport]] = {
    kind.name: kind for kind in (LocalClone, SharedMemory, CUDAVMM, CUDAIPC, Broadcast, NIXL, Files)
}

TRANSPORTS: Mapping[str, type[Transport]] = MappingProxyType(_KINDS)
"""Name -> class of every transport, to read; `register_transport` adds to it."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "local": "local-clone",
        "shm": "shared-memory",
        "ipc": "cuda-ipc",
        "cuda-vmm-fd": "cuda-vmm",
    }
)
"""Short form -> name."""

# Taken, but not advertised: an older name of cuda-vmm.
_OLDER_NAMES = frozenset({"cuda-vmm-fd"})

# Names of what the transports of one node do not reach.
_MULTI_NODE = frozenset({"multi-node", "rdma", "nccl-rdma"})


def register_transport(kind: _Kind) -> _Kind:
    """Make a transport of your own known by its name; also a decorator.

    It counts in this process only: each process that uses the transport registers it, usually by
    importing the module that defines it. Registering a class again changes nothing, and a class
    that was defined anew in its place (a reload, a notebook's cell) replaces its earlier self.

    Args:
        kind: the class, with both ends, `probe` and a `name`.

    Returns:
        The class.

    Raises:
        TypeError: not a transport class that can be made.
        ValueError: it has no name, or the name is taken.

    """
    given: object = kind
    if not isinstance(given, type) or not issubclass(given, Transport):
        raise TypeError(
            f"{given!r} is no transport. Pass a class derived from "
            "rl_bridge.transports.base.Transport, not an object."
        )
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise TypeError(f"{kind.__qualname__} lacks {missing}. Write them, then register it.")
    name: object = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{kind.__qualname__}.name is {name!r}, expected what users type, such as 'file'."
        )
    taken: object = ALIASES.get(name) or _KINDS.get(name, kind)
    if _origin(taken) != _origin(kind):
        raise ValueError(f"the transport name {name!r} is taken by {taken!r}. Choose another one.")
    _KINDS[name] = kind
    return kind


def _origin(kind: object) -> tuple[object, object]:
    return getattr(kind, "__module__", kind), getattr(kind, "__qualname__", kind)


def canonical_name(name: str) -> str:
    """Resolve a short form.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.

    """
    resolved = ALIASES.get(name, name)
    if resolved in TRANSPORTS:
        return resolved
    if resolved in _MULTI_NODE:
        raise WeightBridgeUnavailableError(
            f"multi-node/RDMA weight transport is not implemented (asked for {name!r}). "
            "Publish a gathered full-state update on one node with shared-memory, or go between "
            "machines with 'broadcast' or 'nixl'."
        )
    short = [alias for alias in ALIASES if alias not in _OLDER_NAMES]
    known = [*TRANSPORTS, *short]
    hint = did_you_mean(str(name).lower().replace("_", "-"), known)
    raise WeightBridgeUnavailableError(
        f"unknown weight bridge transport {name!r}, expected one of: {', '.join(known)}.{hint}"
    )


def transport_class(name: str) -> type[Transport]:
    """Find a transport by name or short form.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.

    """
    return TRANSPORTS[canonical_name(name)]


def probe(name: str) -> Availability:
    """Whether a transport works on this machine.

    Raises:
        WeightBridgeUnavailableError: no transport of that name.

    """
    return transport_class(name).probe()
