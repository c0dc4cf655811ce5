"""``nixl`` keeps what every transport keeps: the conformance suite, with real NIXL."""

from rl_bridge.testing import TransportSuite
from rl_bridge.transports.nixl.transport import NIXL


class TestNIXL(TransportSuite):
    transport_class = NIXL
    num_cycles = 10  # each bridge starts an agent
