"""The engine protocol, kept by an engine whose ranks read over NIXL: whole updates, and shards."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.testing import EngineUnderTest
from rl_bridge.testing.engine_suite import Rig

HOME = Path(__file__).resolve().parents[2] / "docs" / "examples" / "small_engine"
sys.path.insert(0, str(HOME))

import test_small_engine as small  # noqa: E402 - a folder of examples is no package
from test_small_engine import folder, running  # noqa: E402 - as above

__all__ = ["folder", "running"]


@pytest.mark.full  # each trainer starts processes of its own, which serve
class TestSmallEngine(small.TestSmallEngine):
    """The whole protocol, with one trainer rank."""

    transport = "nixl"
    kills = ("install",)
    every = 8
    asks_each_call = False


@pytest.mark.full
class TestSmallEngineOfShards(TestSmallEngine):
    """With versions that two trainer ranks publish, each its shard."""

    publishers = 2


class TestFew:
    """What the protocol begins with, with versions of two trainer ranks."""

    @pytest.fixture
    def rig(self, folder: Path, running: EngineUnderTest) -> Iterator[Rig]:
        suite = TestSmallEngineOfShards()
        suite.folder = folder
        with suite.published() as trainer:
            rig = Rig(suite, running.engine, running.fresh, trainer)
            rig.reset()
            yield rig

    def test_version_after_version_the_engine_answers_as_a_fresh_one(self, rig: Rig) -> None:
        suite = TestSmallEngineOfShards()
        suite.test_version_after_version_the_engine_answers_as_a_fresh_one(rig)

    def test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
        self, rig: Rig
    ) -> None:
        TestSmallEngineOfShards().test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
            rig, "install"
        )
