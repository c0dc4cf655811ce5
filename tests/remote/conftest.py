"""Side-cars, a key, and a trainer's bridge."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from tests.remote.process import SidecarProcess, make_key, warm


@pytest.fixture(scope="package", autouse=True)
def nothing_stays_warm() -> Iterator[None]:
    yield
    if warm.cache_info().currsize:
        warm().close()
        warm.cache_clear()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return make_key(tmp_path)


@pytest.fixture
def sidecar(tmp_path: Path, key_file: Path) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    made = SidecarProcess(tmp_path, key_file)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One that runs, for tests that leave nothing behind but another version."""
    directory = tmp_path_factory.mktemp("sidecar")
    made = SidecarProcess(directory, make_key(directory))
    made.start("failing")
    yield made
    made.stop()
    assert not made.is_alive


def states(trainer: TensorBridge, manifest: WeightUpdateManifest) -> list[str]:
    """What the trainer is told of an update."""
    return [
        report.state for report in trainer.consumers() if report.update_id == manifest.update_id
    ]


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge(
        "shared-memory", source_worker="trainer", suspicious="off", max_slots=8
    ) as made:
        yield made
