"""An engine that has its model twice, each time on two ranks that vote for themselves alone.

Two small engines of the documentation stand for it, behind one client. All replicas have a version
or none has it, though they never speak with each other.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.engines import EngineDriver, Replies, Reply, ServingOptions, default_label
from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.testing import EngineUnderTest
from tests.in_ci import TOGETHER

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "docs" / "examples" / "small_engine"))

import test_small_engine as small  # noqa: E402 - a folder of examples is no package
from client import SmallClient  # noqa: E402 - as above
from test_small_engine import folder  # noqa: E402 - as above

__all__ = ["folder"]


class Replicas(SmallClient):
    """Several small engines as one."""

    def __init__(self, engines: list[Any]) -> None:
        super().__init__(engines[0])
        self.each = [SmallClient(engine) for engine in engines]

    def replicas(self) -> int:
        return len(self.each)

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        said = [one.call(verb, payload, timeout_s) for one in self.each]
        return [reply for replica in said for reply in replica]

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        for one in self.each:
            one.pause(mode, undoes=undoes)

    def resume(self) -> None:
        for one in self.each:
            one.resume()

    def is_paused(self) -> bool:
        (is_paused,) = {one.is_paused() for one in self.each}
        return is_paused

    def drop_caches(self, policy: str | None) -> str:
        return "".join(one.drop_caches(policy) for one in self.each)

    def label(self) -> str:
        (label,) = {one.label() for one in self.each}
        return label

    def set_label(self, label: str) -> None:
        for one in self.each:
            one.set_label(label)


@contextmanager
def started(folder: Path) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(small.started(folder, 0)) for _ in range(2)]
        for number, engine in enumerate(engines):
            engine.ask("replica_program:be_replica", str(number))
        yield engines


def driver_of(
    engines: list[Any],
    *,
    pause: str | None = "freeze",
    label: Any = default_label,
    take_over: bool = False,
    **options: Any,
) -> EngineDriver:
    return EngineDriver(
        Replicas(engines),
        serving=ServingOptions(pause=pause, cache="drop", label=label),
        options={"staging": None, "memory_budget_nbytes": None, **options},
        take_over=take_over,
    )


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[EngineUnderTest]:
    with small.started(folder, 1) as second, started(folder) as engines:
        fresh = [[small.answers(engine)] * 2 for engine in (engines[0], second)]
        yield EngineUnderTest(engines, (fresh[0], fresh[1]))


class TestReplicas(small.TestSmallEngine):
    ranks = 4
    replicas = 2
    kills = ("install",)
    every = 5
    in_ci = TOGETHER

    def start(self) -> Any:
        return started(self.folder)

    def make_driver(self, engine: Any, **options: Any) -> EngineDriver:
        return driver_of(engine, **options)

    def answers(self, engine: Any) -> object:
        return [small.answers(one) for one in engine]

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        return [said for one in engine for said in super(TestReplicas, self).in_ranks(one, text)]


def test_replicas_that_no_pause_holds_are_refused(running: EngineUnderTest, trainer: Any) -> None:
    manifest = trainer.publish(small.weights(1), weight_version=1)
    with pytest.raises(WeightBridgeUnavailableError, match=r"2 replicas.*Let updates pause it"):
        driver_of(running.engine, pause=None).prepare(manifest, {})


def test_what_one_replica_leaves_out_is_no_other_ones_to_take(
    running: EngineUnderTest, trainer: Any
) -> None:
    driver = driver_of(running.engine, take_over=True)
    call = driver.client.call

    def without_a_part(verb: str, *given: Any) -> Replies:
        replies = call(verb, *given)
        if verb == "prepare":
            replies[-1]["shards"].pop()
        return replies

    vars(driver.client)["call"] = without_a_part
    with pytest.raises(IncompatibleUpdate, match="the rest goes nowhere"):
        driver.prepare(trainer.publish(small.weights(1), weight_version=1), {})
    driver.abandon()
    driver.close()
