"""A trainer of several ranks: a share for each rollout, and ranks that are started anew."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import GroupAborted, IncompleteCoverage
from rl_bridge.ray.pairing import PairChoice
from tests.ray.rig import Actor, Cluster, FarShare, GroupRun, RayError, Share, answer, choice

FAR = choice("broadcast", publisher_options={"address": "127.0.0.1"}, group="broadcast")


def test_each_rollout_takes_its_share_and_answers_with_the_groups_root(group: GroupRun) -> None:
    group.rollouts["other"] = Actor(group.cluster, partial(Share, 0))
    fleet = group.fleet()
    for _ in range(3):
        update = group.update(fleet)
        assert update.routable == ("one", "other")
        assert {one.active_root for one in update.answers.values()} == {update.root}
    for rank in group.ranks:
        reports = json.loads(rank.made.weight_reports())["shared-memory"]
        assert [one["state"] for one in reports].count("acknowledged") == 2


def test_a_refused_version_leaves_the_answer_at_the_root_of_the_one_before(
    group: GroupRun,
) -> None:
    """On the rollout's own channel, and on the next one before its first version has come."""
    fleet, rollout = group.fleet(), group.rollouts["one"].made
    root = group.update(fleet).root
    group.join(fleet, "far", FarShare)  # so that there is another channel
    for channel in ("shared-memory", "broadcast"):
        chosen = choice(channel, group=channel) if channel == "shared-memory" else FAR
        manifest = group.ranks[0].made.serve_weights(chosen)
        rollout.join_weights(chosen)
        changed = manifest.replace(b'"weight_version":1', b'"weight_version":3')
        taken = answer(rollout.update_weights(changed))
        assert taken.outcome == "refused"
        assert (taken.active_version, taken.active_root) == (1, root)
        assert rollout.holds(1)
    taken = answer(rollout.update_weights(manifest))
    assert (taken.outcome, taken.active_root) == ("acknowledged", root)


def test_a_late_channel_gets_the_sealed_version_of_all_ranks(group: GroupRun) -> None:
    fleet = group.fleet()
    update = group.update(fleet)
    group.train()  # what they hold by now is not what was published
    late = group.join(fleet, "far", FarShare)
    assert late.holds(1)
    assert answer(late.weight_status()).active_root == update.root
    group.update(fleet)
    fleet.leave("far")
    group.update(fleet)
    assert group.channels == [["shared-memory"]] * 2
    # A channel that is opened again gets the version of now.
    assert group.join(fleet, "far", FarShare).holds(group.version)
    # Ranks that have their channels in another order publish together all the same.
    endpoint = group.ranks[1].made._publisher_endpoint()
    endpoint._channels = dict(reversed(endpoint._channels.items()))
    group.update(fleet)


def test_where_a_rank_fails_no_rank_publishes_and_the_next_version_goes_through(
    group: GroupRun,
) -> None:
    fleet = group.fleet()
    group.update(fleet)
    failing = group.ranks[1].made
    version = group.train()
    del failing.held["embed"]
    failing.placed = {name: one for name, one in failing.placed.items() if name != "embed"}
    with pytest.raises((IncompleteCoverage, GroupAborted)):
        fleet.update(version)
    assert group.rollouts["one"].made.holds(1)
    group.update(fleet)


def test_a_rank_whose_weights_cannot_be_had_is_named_and_the_others_are_told_at_once(
    group: GroupRun,
) -> None:
    fleet = group.fleet()
    group.update(fleet)
    failing, other = group.ranks[1].made, group.ranks[0].made
    told: list[BaseException] = []
    publish = other.publish_weights

    def publishing(*given: Any) -> Any:
        try:
            return publish(*given)
        except BaseException as error:
            told.append(error)
            raise

    other.publish_weights = publishing
    version = group.train()
    del failing.held
    with pytest.raises(AttributeError, match="held") as raised:
        fleet.update(version)
    assert any("trainer rank 1" in note for note in raised.value.__notes__)
    (error,) = told
    assert isinstance(error, GroupAborted)
    assert "rank 1" in str(error)
    assert "held" in str(error)
    del other.publish_weights
    group.update(fleet)


def test_ranks_that_name_one_directory_of_state_have_a_part_of_it_each(
    group: GroupRun, tmp_path: Path
) -> None:
    for rank in group.ranks:
        rank.made.weight_state_dir = str(tmp_path)
    group.update(group.fleet())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank-0", "rank-1"]


# ---- started anew --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_was_started_anew_joins_its_group_again(
    cluster: Cluster, num_ranks: int
) -> None:
    group = GroupRun(cluster, num_ranks)
    fleet = group.fleet()
    group.update(fleet)
    group.ranks[-1].start_anew()
    for _ in range(2):
        assert group.update(fleet).routable == ("one",)
    assert group.channels == [["shared-memory"]] * num_ranks


def test_a_rollout_that_joins_after_a_rank_was_started_anew_gets_the_next_version(
    group: GroupRun,
) -> None:
    fleet = group.fleet()
    group.update(fleet)
    group.ranks[0].start_anew()
    fleet.join("one", group.rollouts["one"])
    assert fleet.weight_version == 1
    group.update(fleet)


def test_a_rank_that_is_started_anew_in_a_publication_does_not_publish_by_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Ray asks the new one what the one before did not answer."""
    group = GroupRun(cluster, 1)
    fleet = group.fleet()
    group.update(fleet)
    ask = fleet._trainers._ask

    def call(what: str, method: str, *given: Any) -> object:
        if method == "publish_weights":
            group.ranks[0].start_anew()
        return ask(what, method, *given)

    with monkeypatch.context() as patched:
        patched.setattr(fleet._trainers, "_ask", call)
        with pytest.raises(GroupAborted, match="rank 0 did not publish version 2: it was"):
            group.update(fleet)
    assert group.rollouts["one"].made.holds(1)
    group.update(fleet)


@pytest.mark.parametrize("is_known", [True, False], ids=["to_this_fleet", "to_the_next_fleet"])
def test_ranks_that_have_not_the_same_channels_begin_anew(group: GroupRun, is_known: bool) -> None:
    """A driver that dies may have had one of them drop a channel, and not the others."""
    fleet = group.fleet()
    group.update(fleet)
    endpoint = group.ranks[0].made._publisher_endpoint()
    endpoint._open(PairChoice.from_json(FAR))
    endpoint._channels["broadcast"].is_used = True
    group.update(fleet if is_known else group.fleet())
    assert group.channels == [["shared-memory"]] * 2


def test_ranks_that_another_fleet_has_go_on_with_their_version(group: GroupRun) -> None:
    root = group.update(group.fleet()).root
    fleet = group.fleet()
    assert (fleet.weight_version, fleet.routable) == (1, ("one",))
    assert answer(group.rollouts["one"].made.weight_status()).active_root == root
    group.update(fleet)


def test_a_fleet_whose_store_is_lost_makes_another_one(group: GroupRun) -> None:
    fleet = group.fleet()
    group.update(fleet)

    def gone(*_given: object) -> None:
        raise RayError("The actor died.")

    for call in ("set", "get", "check", "compare_set", "delete_key", "wait_for"):
        setattr(fleet._trainers._store.made, call, gone)
    with pytest.raises(GroupAborted):
        group.update(fleet)
    group.update(fleet)
