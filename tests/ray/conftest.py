"""A fleet for each test."""

from collections.abc import Iterator

import pytest

from tests.ray.actors import Cluster, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(Cluster(monkeypatch))
    yield made
    made.close()
