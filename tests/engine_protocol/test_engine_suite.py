"""The engine protocol, kept by the small engine of the documentation: by import, and by a file.

Versions that it imports are made beside the serving one, or written through into its memory.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    RolloutExecutor,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.engines import EngineDriver
from rl_bridge.errors import IncompatibleUpdate, SessionRefused
from rl_bridge.groups import GroupBridge
from rl_bridge.testing import EngineUnderTest
from tests.in_ci import MEMORY

HOME = Path(__file__).resolve().parents[2] / "docs" / "examples" / "small_engine"
sys.path.insert(0, str(HOME))

import test_small_engine as small  # noqa: E402 - as above
from client import small_engine_adapter  # noqa: E402 - a folder of examples is no package
from test_small_engine import folder, running, started, weights  # noqa: E402 - as above

__all__ = ["folder", "running"]


class TestSmallEngine(small.TestSmallEngine):
    """As the page has it, at fewer places."""

    kills = ("install",)
    every = 5


class TestSmallEngineThrough(TestSmallEngine):
    """Written into the memory that serves."""

    in_ci = MEMORY

    def make_driver(self, engine: Any, **options: Any) -> EngineDriver:
        return small_engine_adapter(engine, staging="through", **options)


class TestSmallEngineOfShards(TestSmallEngine):
    """Two trainer ranks publish each version, each its shard."""

    in_ci = MEMORY
    publishers = 2


@pytest.mark.full
class TestSmallEngineThroughOfShards(TestSmallEngineThrough):
    """Both."""

    publishers = 2


@pytest.mark.full
class TestSmallEngineEverywhere(small.TestSmallEngine):
    """At each place that the page tries."""


@pytest.mark.full
class TestSmallEngineByFile(small.TestSmallEngineByFile):
    """Fed by its own loader."""


def test_an_engine_that_is_fed_by_its_own_loader_takes_what_the_driver_assembled_of_shards(
    running: EngineUnderTest, tmp_path: Path
) -> None:
    suite = TestSmallEngineOfShards()
    driver = small_engine_adapter(
        running.engine, file=tmp_path / "update.safetensors", take_over=True
    )
    with (
        suite.published() as trainer,
        GroupBridge() as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=driver) as executor,
    ):
        for version, number in enumerate((1, 0, 1, 0), 1):
            group = trainer.publish(weights(number), weight_version=version)
            executor.update_weights(group)
            assert suite.answers(running.engine) == running.fresh[number]
            (told,) = trainer.holders(group)
            assert (told.state, told.worker) == ("acknowledged", "rollout")


@pytest.mark.full
@pytest.mark.parametrize("by", ["refused", "in an update"])
def test_an_engine_that_was_started_anew_holds_no_version_until_it_gets_one(
    folder: Path, by: str
) -> None:
    with (
        started(folder, 0) as engine,
        started(folder, 0) as other,
        make_weight_bridge("shared-memory", source_worker="trainer", max_slots=8) as trainer,
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=small_engine_adapter(engine)
        ) as executor,
    ):

        def publish(version: int, **changed: torch.Tensor) -> WeightUpdateManifest:
            sent: dict[str, torch.Tensor] = {**weights(version % 2), **changed}
            return trainer.publish(sent, weight_version=version)

        executor.update_weights(publish(1))
        client: Any = executor.weight_install_adapter.client  # type: ignore[union-attr]
        if by == "in an update":
            pause = client.pause

            def start_anew(*given: Any, **options: Any) -> None:
                pause(*given, **options)
                client.engine = other

            client.pause = start_anew
            with pytest.raises(SessionRefused, match="started anew"):
                executor.update_weights(publish(2))
            client.pause = pause
        client.engine = other
        if by == "refused":
            with pytest.raises(IncompatibleUpdate):
                executor.update_weights(publish(2, more=torch.ones(3)))
        assert executor.active_weight_version is None
        with pytest.raises(WeightBridgeUnavailableError):
            executor.check_servable()
        executor.update_weights(publish(3))
        executor.check_servable()
        assert other.generate([1, 2])["version"].startswith("3@")
