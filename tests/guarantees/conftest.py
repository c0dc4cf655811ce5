"""What the tests of the guarantees share: each transport and each adapter in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import TensorBridge
from rl_bridge.testing import BridgeOver, Child
from tests.guarantees.kit import ADAPTERS, TRANSPORTS, Carrier, ModuleReplica, Replica


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    """Each transport in turn."""
    return TRANSPORTS[request.param](tmp_path)


@pytest.fixture
def make_bridge(transport: Carrier) -> Iterator[Callable[..., BridgeOver]]:
    """Make bridges over the transport; the end of the test closes them."""
    made: list[TensorBridge] = []

    def make(worker: str = "rollout", **options: Any) -> BridgeOver:
        bridge = transport.bridge(source_worker=worker, **options)
        made.append(bridge)
        return bridge

    yield make
    for bridge in reversed(made):
        bridge.close()


@pytest.fixture
def trainer(make_bridge: Callable[..., BridgeOver]) -> BridgeOver:
    """The side that publishes."""
    return make_bridge("trainer")


@pytest.fixture
def rollout(make_bridge: Callable[..., BridgeOver]) -> BridgeOver:
    """The side that imports."""
    return make_bridge("rollout")


@pytest.fixture
def make_peer(transport: Carrier) -> Iterator[Callable[..., Child]]:
    """Start processes with a bridge of their own; the end of the test kills them."""
    if not transport.declares.crosses_processes:
        pytest.skip("this transport stays inside one process, and says so")
    started: list[Child] = []

    def make(worker: str, **options: Any) -> Child:
        child = transport.peer(worker=worker, **options)
        started.append(child)
        return child

    yield make
    for child in started:
        with child:
            pass  # leaving the block kills


@pytest.fixture(params=ADAPTERS)
def replica(request: pytest.FixtureRequest) -> Iterator[Replica]:
    """An engine behind each adapter in turn."""
    made = ModuleReplica(request.param)
    yield made
    made.close()
