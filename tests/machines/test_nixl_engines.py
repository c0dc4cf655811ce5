"""The engine protocol, kept by an engine whose ranks read over NIXL: whole updates, and shards."""

import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / "docs" / "examples" / "small_engine"
sys.path.insert(0, str(HOME))

import test_small_engine as small  # noqa: E402 - a folder of examples is no package
from test_small_engine import folder, running  # noqa: E402 - as above

__all__ = ["folder", "running"]


class TestSmallEngine(small.TestSmallEngine):
    """Of versions that one trainer rank publishes."""

    transport = "nixl"
    kills = ("install",)
    every = 8
    asks_each_call = False


class TestSmallEngineOfShards(TestSmallEngine):
    """Of versions that two trainer ranks publish, each its shard."""

    publishers = 2
