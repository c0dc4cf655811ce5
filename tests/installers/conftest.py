"""A trainer whose versions may be whatever a test publishes."""

from collections.abc import Iterator

import pytest

from rl_bridge import SharedMemoryTensorBridge


@pytest.fixture
def trainer() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(
        source_worker="trainer", suspicious="off", nonfinite="off"
    ) as bridge:
        yield bridge
