"""What the tests of bridges and executors share: both ends, by either transport, and an engine."""

from collections.abc import Iterator

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from tests.bridge.engines import TRANSPORTS, Recording
from tests.helpers import weights


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bridge(transport: str) -> Iterator[TensorBridge]:
    """One that publishes and imports, and suspects what it publishes."""
    with make_weight_bridge(transport, source_worker="trainer", source_rank=2) as made:
        yield made


@pytest.fixture
def publisher(transport: str) -> Iterator[TensorBridge]:
    with make_weight_bridge(transport, source_worker="trainer", suspicious="off") as made:
        yield made


@pytest.fixture
def consumer(transport: str) -> Iterator[TensorBridge]:
    with make_weight_bridge(transport, source_worker="rollout") as made:
        yield made


@pytest.fixture
def engine() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


@pytest.fixture
def adapter(engine: dict[str, torch.Tensor]) -> Recording:
    return Recording(engine)


@pytest.fixture
def executor(transport: str, adapter: Recording) -> Iterator[RolloutExecutor]:
    with make_weight_bridge(transport, source_worker="rollout") as bridge:
        yield RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer", suspicious="off") as made:
        yield made


@pytest.fixture
def rollout() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="rollout") as made:
        yield made
