"""``cuda-vmm`` keeps every promise of a transport, on host memory."""

from typing import ClassVar

from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate
from rl_bridge.testing.host_vmm import HostVMM, published_address


class TestOnHostMemory(TransportSuite):
    transport_class = HostVMM
    locate: ClassVar[Locate] = staticmethod(published_address)
