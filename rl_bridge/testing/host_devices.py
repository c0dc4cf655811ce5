"""The CUDA transports on host memory: their real sockets and processes, without a GPU.

Only what the GPU and its driver do by themselves is missing: kernels, drains, faults.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rl_bridge.cuda.devices import DriverName
from rl_bridge.testing.faults import Locate
from rl_bridge.transports._slots import SlotPublisher
from rl_bridge.transports.base import PublisherEnd
from rl_bridge.transports.cuda import CUDAIPC, CUDAVMM


def published_address(end: PublisherEnd, update_id: str, handle: Mapping[str, Any]) -> int:
    """Find a published update's bytes in its publisher's process."""
    del handle
    assert isinstance(end, SlotPublisher)
    return end.address_of(update_id)


class HostVMM(CUDAVMM):
    """``cuda-vmm`` on host memory; tests that want it by name register it."""

    name: ClassVar[str] = "cuda-vmm-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)


class HostIPC(CUDAIPC):
    """``cuda-ipc`` on host memory; tests that want it by name register it."""

    name: ClassVar[str] = "cuda-ipc-on-host"
    driver_name: ClassVar[DriverName] = "host"
    locate: ClassVar[Locate] = staticmethod(published_address)
