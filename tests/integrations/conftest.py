"""A trainer."""

from collections.abc import Iterator

import pytest

from rl_bridge import TensorBridge, make_weight_bridge


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer", max_slots=8) as bridge:
        yield bridge
