"""Updates whose bytes only the engine's own processes read, over ``broadcast``."""

from typing import cast

from rl_bridge.transports.broadcast.consumer import BroadcastConsumer
from rl_bridge.transports.wire.arenas import Arrivals
from tests.transports.unread import Rig, UnreadUpdates


class TestBroadcast(UnreadUpdates):
    transport = "broadcast"

    @staticmethod
    def arrivals(rig: Rig) -> Arrivals:
        ((_, found),) = cast("BroadcastConsumer", rig.driver.consumer.end)._clients.values()
        return found
