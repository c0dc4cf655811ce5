"""What the tests of slots and views share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.cuda.broker import Broker
from rl_bridge.cuda.host import HostDriver
from rl_bridge.memory.slots import SlotRing
from tests.memory.slots_rig import new_ring
from tests.memory.vmm.publishers import offering, short_folder


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    made = new_ring(limit=2)
    yield made
    made.close()


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def broker(driver: HostDriver, root: Path) -> Iterator[Broker]:
    """A broker that offers what `driver` made."""
    with offering(driver, root) as made:
        yield made
