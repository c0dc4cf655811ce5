"""A trainer of several ranks: who was started anew, and who has other channels, is brought back."""

from collections.abc import Callable, Iterator

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import GroupAborted
from rl_bridge.ray import RolloutActor, RolloutFleet
from rl_bridge.ray.calls import Deadline
from rl_bridge.ray.group_store import GroupMembership
from rl_bridge.ray.pairing import PairChoice
from tests.groups.meshes import model
from tests.ray.actors import RayError
from tests.ray.ranks import SHAPES, TIMEOUT_S, Actor, Cluster, Run, Whole

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


def test_who_joins_behind_a_rank_that_was_started_anew_gets_the_next_version(
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
    ask = fleet._trainers._call

    def call(actor: Actor, method: str, given: tuple[object, ...]) -> object:
        if method == "publish_weights":
            actor.start_anew()
        return ask(actor, method, given)

    with monkeypatch.context() as patched:
        patched.setattr(fleet._trainers, "_call", call)
        with pytest.raises(GroupAborted, match="rank 0 did not publish version 2: it was started"):
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
    side = run.ranks[0].made._publisher_endpoint()
    side._open(PairChoice.from_json(BROADCAST))
    side._asked.add("broadcast")
    run.update(fleet if is_known else run.fleet())
    assert run.channels == [["shared-memory"]] * 2


def test_ranks_in_groups_of_two_fleets_join_one_group(made: Callable[[int], Run]) -> None:
    """As where two drivers see at once that a rank was started anew."""
    run = made(2)
    fleets = [run.fleet(), run.fleet()]
    for rank, fleet in enumerate(fleets):
        trainers = fleet._trainers
        membership = GroupMembership(rank=rank, world_size=2, timeout_s=1.0, group=trainers._group)
        run.ranks[rank].join_weight_group.remote(membership.to_json(), trainers._store).result(20)
    for fleet in (*fleets, fleets[0]):
        run.update(fleet)


def test_a_version_is_told_by_its_own_root_whatever_another_fleet_publishes_meanwhile(
    made: Callable[[int], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(2)
    fleet, other = run.fleet(), RolloutFleet(run.ranks, timeout_s=TIMEOUT_S)
    again = Actor(run.cluster, Whole)
    fleet.join("again", again)
    run.update(fleet)
    again.start_anew()  # it joins again inside of the next update
    see, seen = fleet._trainers._see_current, list[str]()

    def behind_anothers(what: str, deadline: Deadline) -> None:
        if what == "answer" and not seen:
            seen.append(what)
            for rank in run.ranks:
                rank.made.train(9)
            other._trainers.publish(9, None, deadline)
        see(what, deadline)

    monkeypatch.setattr(fleet._trainers, "_see_current", behind_anothers)
    run.version += 1
    for rank in run.ranks:
        rank.made.train(run.version)
    assert fleet.update(run.version).routable == ("one",)
    assert seen


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
        found = rollout.made.imported_weights()
        wanted = model(SHAPES, version)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_ranks_whose_store_went_with_another_driver_come_together_in_the_fleets_own(
    made: Callable[[int], Run],
) -> None:
    """Such as an evaluation's, which took their memberships and has ended since."""
    run = made(2)
    mine = run.fleet()
    run.update(mine)
    other = run.fleet()
    run.update(other)

    def gone(*_given: object) -> None:
        raise RayError("The actor died because its owner has died.")

    for call in ("set", "get", "check", "compare_set", "delete_key", "wait_for"):
        setattr(other._trainers._store.made, call, gone)
    with pytest.raises(GroupAborted):
        run.update(mine)
    run.update(mine)
    run.update(mine)
