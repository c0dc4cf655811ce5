"""``cuda-vmm`` keeps every promise of a transport, on host memory."""

from rl_bridge.testing import TransportSuite
from rl_bridge.testing.host_vmm import HostVMM, published_address


class TestOnHostMemory(TransportSuite):
    transport_class = HostVMM
    locate = staticmethod(published_address)
