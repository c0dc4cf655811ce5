"""The scripted driver, and that nothing of it is left."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.cuda import owners as references
from rl_bridge.cuda.broker import Broker
from rl_bridge.cuda.host import HostDriver
from tests.cuda.publishers import offering, short_folder
from tests.cuda.rig import NOTHING, Scripted


@pytest.fixture
def driver() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.calm()
    if made.live() != NOTHING:
        gc.collect()
        references.settle_late()
    assert made.live() == NOTHING, "a test, or the code, left something"


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
