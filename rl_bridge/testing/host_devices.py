"""``cuda-vmm`` on host memory: the transport with its real sockets and processes, without a GPU.

Only what the GPU itself does is missing: its kernels, its drain, its faults.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_bridge.cuda.devices import DriverName
from rl_bridge.testing.faults import Locate
from rl_bridge.transports.base import PublisherEnd
from rl_bridge.transports.cuda import CUDAIPC, CUDAVMM

__all__ = [
    "HostIPC",
    "HostVMM",
    "published_address",
]


def published_address(end: PublisherEnd, update_id: str, handle: Mapping[str, Any]) -> int:
    """Find a published update's bytes in its publisher's process."""
    del handle
    slots = end._ring._slots  # type: ignore[attr-defined]  # noqa: SLF001 - raw access is the point
    return next(int(slot.address) for slot in slots if slot.update_id == update_id)


class HostVMM(CUDAVMM):
    """The ``cuda-vmm`` transport on host memory; registered by whoever wants it by name."""

    name: ClassVar[str] = "cuda-vmm-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)


# ---- ``cuda-ipc`` on host memory: the transport with real processes, without a GPU.
#
# Only what the GPU and its driver do by themselves is missing.


class HostIPC(CUDAIPC):
    """The ``cuda-ipc`` transport on host memory; registered by whoever wants it by name."""

    name: ClassVar[str] = "cuda-ipc-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)
