"""``cuda-ipc`` keeps every promise of a transport, on host memory; and what only it can refuse."""

from typing import ClassVar

from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate
from rl_bridge.testing.host_ipc import HostIPC
from rl_bridge.testing.host_vmm import published_address


class TestOnHostMemory(TransportSuite):
    transport_class = HostIPC
    locate: ClassVar[Locate] = staticmethod(published_address)
