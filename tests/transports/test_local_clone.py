"""``local-clone`` keeps every promise of a transport: it is the suite's oracle."""

from rl_bridge.testing import TransportSuite
from rl_bridge.transports.local import LocalClone


class TestLocalClone(TransportSuite):
    transport_class = LocalClone
