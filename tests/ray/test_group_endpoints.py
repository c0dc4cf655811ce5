"""Ranks of a trainer that publish as a group, as actors of Ray do it, tried without Ray."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.errors import GroupAborted, IncompleteCoverage
from rl_bridge.ray import EndpointOptions, PublisherEndpoint
from rl_bridge.ray.calls import Announcement
from tests.ray.group_endpoints import BROADCAST, MEMORY, TIMEOUT_S, HashStore, Rollout, Run


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


@pytest.fixture
def rollouts(run: Run) -> Iterator[list[Rollout]]:
    run.all(lambda rank: rank.endpoint.serve(MEMORY))
    made = [Rollout(rank, MEMORY) for rank in range(2)]
    yield made
    for one in made:
        one.close()


def test_each_rollout_takes_its_share_and_answers_with_the_groups_root(
    run: Run, rollouts: list[Rollout]
) -> None:
    for version in range(1, 5):
        told, manifests = run.publish(version)
        for one in rollouts:
            answer = one.update(manifests["shared-memory"])
            assert answer.outcome == "acknowledged", answer
            assert (answer.active_version, answer.active_root) == (version, told.root)
            assert one.holds(version)
    for rank in run.ranks:
        reports = json.loads(rank.endpoint.reports())["shared-memory"]
        assert [one["state"] for one in reports].count("acknowledged") == 2


def test_a_refused_version_leaves_the_answer_at_the_one_before(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    assert rollouts[0].update(manifests["shared-memory"]).outcome == "acknowledged"
    _, manifests = run.publish(2)
    changed = manifests["shared-memory"].replace(b'"weight_version":2', b'"weight_version":3')
    answer = rollouts[0].update(changed)
    assert answer.outcome == "refused"
    assert (answer.active_version, answer.active_root) == (1, told.root)
    assert rollouts[0].holds(1)


def test_a_late_channel_gets_the_sealed_version_of_all_ranks(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    for rank in run.ranks:
        rank.train(7)  # what they hold by now is not what was published
    manifest = run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    late = Rollout(1, BROADCAST)
    answer = late.update(manifest)
    assert (answer.active_version, answer.active_root) == (1, told.root), answer
    assert late.holds(1)
    _, manifests = run.publish(2)
    for one, channel in ((late, "broadcast"), (rollouts[0], "shared-memory")):
        assert one.update(manifests[channel]).outcome == "acknowledged"
        assert one.holds(2)
    late.close()


def test_a_rollout_that_takes_another_channel_answers_with_the_groups_root_still(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    rollouts[0].update(manifests["shared-memory"])
    manifest = run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    rollouts[0].endpoint.join(BROADCAST)
    changed = manifest.replace(b'"weight_version":1', b'"weight_version":3')
    answer = rollouts[0].update(changed)
    assert answer.outcome == "refused"
    assert (answer.active_version, answer.active_root) == (1, told.root)
    answer = rollouts[0].update(manifest)
    assert (answer.outcome, answer.active_root) == ("acknowledged", told.root)


def test_where_a_rank_fails_no_rank_publishes_and_the_next_version_goes_through(
    run: Run, rollouts: list[Rollout]
) -> None:
    run.publish(1)
    for rank in run.ranks:
        rank.train(2)
    run.ranks[1].tensors.pop("embed")
    run.ranks[1].placed = {n: p for n, p in run.ranks[1].placed.items() if n != "embed"}
    futures = [run.pool.submit(rank.endpoint.publish, 2) for rank in run.ranks]
    for future in futures:
        with pytest.raises((IncompleteCoverage, GroupAborted)):
            future.result(TIMEOUT_S)
    told, manifests = run.publish(3)
    assert told.weight_version == 3
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 3


def test_a_channel_that_was_dropped_is_published_on_no_more(
    run: Run, rollouts: list[Rollout]
) -> None:
    run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    assert set(run.publish(1)[1]) == {"shared-memory", "broadcast"}
    run.all(lambda rank: rank.endpoint.drop("broadcast"))
    run.all(lambda rank: rank.endpoint.drop("broadcast"))
    _, manifests = run.publish(2)
    assert set(manifests) == {"shared-memory"}
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 2


def test_ranks_that_have_their_channels_in_another_order_publish_together(
    run: Run, rollouts: list[Rollout]
) -> None:
    run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    endpoint = run.ranks[1].endpoint
    endpoint._channels = dict(reversed(endpoint._channels.items()))
    _, manifests = run.publish(1)
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 1


def test_a_dropped_channel_that_is_opened_again_gets_the_version_of_now(
    run: Run, rollouts: list[Rollout]
) -> None:
    run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    run.publish(1)
    run.all(lambda rank: rank.endpoint.drop("broadcast"))
    run.publish(2)
    manifest = run.all(lambda rank: rank.endpoint.serve(BROADCAST))
    late = Rollout(1, BROADCAST)
    assert late.update(manifest).active_version == 2
    assert late.holds(2)
    _, manifests = run.publish(3)
    assert late.update(manifests["broadcast"]).active_version == 3
    late.close()


def test_ranks_that_talk_over_another_store_go_on_with_their_versions(
    run: Run, rollouts: list[Rollout]
) -> None:
    told, manifests = run.publish(1)
    store = HashStore()
    for rank in run.ranks:
        rank.endpoint.rejoin(rank.made_on(store))
    assert Announcement.from_json(run.all(lambda rank: rank.endpoint.announcement())) == told
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 1
    _, manifests = run.publish(2)
    assert rollouts[0].update(manifests["shared-memory"]).active_version == 2
    assert rollouts[0].holds(2)


def test_ranks_that_name_one_directory_of_state_do_not_get_into_each_others_way(
    run: Run, tmp_path: Path
) -> None:
    endpoints = []
    for rank in run.ranks:
        channels = rank.made_on(HashStore())
        options = EndpointOptions(rank=rank.rank, state_dir=str(tmp_path))
        endpoints.append(PublisherEndpoint(dict, options, make_channel=channels))
    for endpoint in endpoints:
        endpoint.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank-0", "rank-1"]
