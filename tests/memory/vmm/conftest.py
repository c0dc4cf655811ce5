"""The scripted driver, and that nothing of it is left."""

import gc
from collections.abc import Iterator

import pytest

from rl_bridge.cuda import owners as references
from tests.memory.vmm.rig import NOTHING, Scripted


@pytest.fixture
def driver() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.calm()
    if made.live() != NOTHING:
        gc.collect()
        references.settle_late()
    assert made.live() == NOTHING, "a test, or the code, left something"
