"""Updates whose bytes only the engine's own processes read, over ``nixl``."""

from typing import cast

from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.transports.wire.arenas import Arrivals
from tests.machines.nixl_roles import source_of
from tests.transports.unread import Rig, UnreadUpdates


class TestNIXL(UnreadUpdates):
    transport = "nixl"

    @staticmethod
    def arrivals(rig: Rig) -> Arrivals:
        return source_of(cast("NIXLTensorBridge", rig.driver)).arrivals

    def test_once_warm_nothing_is_registered_or_connected_again(self, rig: Rig) -> None:
        """Whether the driver reads a version or not."""
        counts = []
        for version in range(1, 13):
            tensors = rig.update(version)
            if version % 2:
                assert tensors["scale"].isfinite().all()
            del tensors
            counts.append(cast("NIXLTensorBridge", rig.driver).counters)
        assert counts[-1] == counts[5], counts
