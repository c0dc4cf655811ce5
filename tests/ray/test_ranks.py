"""A trainer of several ranks: who was started anew, and who has other channels, is brought back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import GroupAborted
from rl_bridge.ray import RolloutActor
from rl_bridge.ray.pairing import PairChoice
from tests.groups.meshes import model, same
from tests.ray.actors import RayError
from tests.ray.ranks import SHAPES, Actor, Cluster, Run

BROADCAST = PairChoice(
    transport="broadcast",
    reason="a test",
    publisher_options={"address": "127.0.0.1"},
    group="broadcast",
).to_json()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Run]]:
    cluster = Cluster(monkeypatch)
    yield lambda num_ranks: Run(cluster, num_ranks)
    cluster.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_was_started_anew_joins_its_group_again(
    made: Callable[[int], Run], num_ranks: int
) -> None:
    run = made(num_ranks)
    fleet = run.fleet()
    run.update(fleet)
    run.ranks[-1].start_anew()
    for _ in range(2):
        assert run.update(fleet).routable == ("one",)
    assert run.channels == [["shared-memory"]] * num_ranks


def test_a_rollout_that_joins_after_a_rank_was_started_anew_gets_the_next_version(
    made: Callable[[int], Run],
) -> None:
    run = made(2)
    fleet = run.fleet()
    run.update(fleet)
    run.ranks[0].start_anew()
    fleet.join("one", run.rollout)
    assert fleet.weight_version == 1
    run.update(fleet)


def test_a_rank_that_is_started_anew_in_a_publication_does_not_publish_by_itself(
    made: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Ray asks the new one what the one before did not answer."""
    run = made(1)
    fleet = run.fleet()
    run.update(fleet)
    ask = fleet._trainers._ask

    def call(what: str, method: str, *given: Any) -> object:
        if method == "publish_weights":
            run.ranks[0].start_anew()
        return ask(what, method, *given)

    with monkeypatch.context() as patched:
        patched.setattr(fleet._trainers, "_ask", call)
        with pytest.raises(GroupAborted, match="rank 0 did not publish version 2: it was"):
            run.update(fleet)
    assert run.rollout.made.holds(1)
    run.update(fleet)


@pytest.mark.parametrize("is_known", [True, False], ids=["to_this_fleet", "to_the_next_fleet"])
def test_ranks_that_have_not_the_same_channels_begin_anew(
    made: Callable[[int], Run], is_known: bool
) -> None:
    """A driver that dies may have had one of them drop a channel, and not the others."""
    run = made(2)
    fleet = run.fleet()
    run.update(fleet)
    endpoint = run.ranks[0].made._publisher_endpoint()
    endpoint._open(PairChoice.from_json(BROADCAST))
    endpoint._channels["broadcast"].is_used = True
    run.update(fleet if is_known else run.fleet())
    assert run.channels == [["shared-memory"]] * 2


class Plain(RolloutActor):
    """A rollout that uses the tensors as they are imported."""

    def weight_adapter(self) -> None:
        return None


def test_a_rollout_without_an_adapter_has_the_tensors_of_the_active_version(
    made: Callable[[int], Run],
) -> None:
    run = made(2)
    fleet = run.fleet()
    rollout = Actor(run.cluster, Plain)
    fleet.join("plain", rollout)
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        rollout.made.imported_weights()
    for version in (1, 2):
        run.update(fleet)
        assert same(rollout.made.imported_weights(), model(SHAPES, version))


def test_a_fleet_whose_store_is_lost_makes_another_one(made: Callable[[int], Run]) -> None:
    run = made(2)
    mine = run.fleet()
    run.update(mine)

    def gone(*_given: object) -> None:
        raise RayError("The actor died.")

    for call in ("set", "get", "check", "compare_set", "delete_key", "wait_for"):
        setattr(mine._trainers._store.made, call, gone)
    with pytest.raises(GroupAborted):
        run.update(mine)
    run.update(mine)
    run.update(mine)
