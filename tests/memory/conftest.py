"""What the tests of slots and views share."""

from collections.abc import Iterator

import pytest

from rl_bridge.memory.slots import SlotRing
from tests.memory.slots_rig import new_ring


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    made = new_ring(limit=2)
    yield made
    made.close()
