"""Ranks on Ray whose rollouts all read over nixl: sealed once, also for who is late."""

from collections.abc import Iterator

import pytest

from tests.ray.group_endpoints import MEMORY, NIXL, Rollout, Run


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


def test_a_group_is_read_over_nixl_alone_and_a_late_rollout_gets_what_was_sealed(run: Run) -> None:
    run.all(lambda rank: rank.endpoint.serve(NIXL))
    near = [Rollout(rank, NIXL) for rank in range(2)]
    for version in range(1, 4):
        told, manifests = run.publish(version)
        assert list(manifests) == ["nixl"]
        for one in near:
            answer = one.update(manifests["nixl"])
            assert (answer.outcome, answer.active_root) == ("acknowledged", told.root), answer
            assert one.holds(version)
    for rank in run.ranks:
        rank.train(7)  # what they hold by now is not what was published
    manifest = run.all(lambda rank: rank.endpoint.serve(MEMORY))
    late = Rollout(0, MEMORY)
    assert late.update(manifest).active_root == told.root
    assert late.holds(3)
    _, manifests = run.publish(4)
    assert set(manifests) == {"nixl", "shared-memory"}
    for one, channel in ((near[1], "nixl"), (late, "shared-memory")):
        assert one.update(manifests[channel]).outcome == "acknowledged"
        assert one.holds(4)
    for one in (*near, late):
        one.close()
