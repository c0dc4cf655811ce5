"""Slots of ``broadcast`` in memory of torch's allocator, as NCCL takes them: here on the CPU."""

from collections.abc import Iterator

import pytest

from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.wire.arenas import Arenas, DeviceArenas
from tests.transports.on_device import InTorchMemory


class OverGloo(Broadcast):
    """Gloo, from and to memory of torch's allocator."""

    def _arenas(self) -> Arenas:
        return DeviceArenas(CPU_PLACE)


class TestBroadcast(InTorchMemory):
    @pytest.fixture
    def trainer(self) -> Iterator[BridgeOver]:
        with BridgeOver(FaultInjecting(OverGloo(timeout_s=20.0))) as bridge:
            yield bridge

    @pytest.fixture
    def rollout(self, trainer: BridgeOver) -> Iterator[BridgeOver]:
        with BridgeOver(OverGloo(timeout_s=20.0)) as bridge:
            yield bridge
