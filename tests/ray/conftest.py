"""A cluster for each test, and a fleet in it."""

from collections.abc import Iterator

import pytest

from tests.ray.rig import Cluster, GroupRun, Run


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def run(cluster: Cluster) -> Run:
    return Run(cluster)


@pytest.fixture
def group(cluster: Cluster) -> GroupRun:
    return GroupRun(cluster)
