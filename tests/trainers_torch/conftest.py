"""Ranks that the tests of one module share."""

from collections.abc import Iterator

import pytest

from tests.trainers_torch.worlds import World

CASES = "tests.trainers_torch.fsdp_cases"


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(2, tmp_path_factory.mktemp("two"), CASES) as world:
        yield world


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(4, tmp_path_factory.mktemp("four"), CASES) as world:
        yield world
