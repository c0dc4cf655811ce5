"""An engine of two ranks, and a trainer."""

from collections.abc import Iterator

import pytest

from rl_bridge import TensorBridge, make_weight_bridge
from tests.engine_protocol.fake import Engine


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer", max_slots=8) as bridge:
        yield bridge
