"""Where every rollout of a trainer on Ray reads over nixl, its versions are copied once."""

import json
from collections.abc import Iterator

import pytest

from rl_bridge.errors import VersionNotMonotonic
from rl_bridge.ray.calls import Announcement
from tests.ray.rig import (
    MEMORY,
    Cluster,
    Engine,
    FarShare,
    GroupRun,
    Learner,
    Share,
    answer,
    choice,
)

NIXL = choice("nixl")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(monkeypatch)
    yield made
    made.close()


class Run:
    """A trainer, and rollouts that follow it."""

    def __init__(self) -> None:
        self.trainer = Learner()
        self.rollouts: list[Engine] = []

    def join(self, channel: bytes) -> Engine:
        manifest = self.trainer.serve_weights(channel)
        self.rollouts.append(Engine().joined(channel))
        if manifest:
            assert answer(self.rollouts[-1].update_weights(manifest)).outcome == "acknowledged"
        return self.rollouts[-1]

    def publish(self, version: int) -> dict[str, bytes]:
        self.trainer.step()
        return self.trainer.publish_weights(version)[1]


@pytest.fixture
def run(cluster: Cluster) -> Iterator[Run]:
    assert cluster
    made = Run()
    yield made
    for one in made.rollouts:
        one.close_weights()
    made.trainer.close_weights()


def test_versions_that_travel_by_nixl_alone_are_sealed_there_alone(run: Run) -> None:
    engine = run.join(NIXL)
    for version in range(1, 5):
        manifests = run.publish(version)
        assert list(manifests) == ["nixl"]
        assert answer(engine.update_weights(manifests["nixl"])).outcome == "acknowledged"
        assert engine.holds(run.trainer.held)
    # Of one ring, and not of two.
    assert list(run.trainer._publisher_endpoint()._channels) == ["nixl"]
    assert list(json.loads(run.trainer.weight_reports())) == ["nixl"]


@pytest.mark.parametrize("first", [NIXL, None], ids=["to_another", "to_nobody"])
@pytest.mark.parametrize("late", [MEMORY, NIXL], ids=["here", "elsewhere"])
def test_a_late_rollout_gets_the_sealed_version(run: Run, first: bytes | None, late: bytes) -> None:
    if first is not None:
        run.join(first)
    run.publish(1)
    sealed = {name: one.clone() for name, one in run.trainer.held.items()}
    run.trainer.step()  # what the trainer holds by now is not what was published
    assert run.join(late).holds(sealed)
    channels = {"nixl"} if late == NIXL else {"shared-memory"}
    assert set(run.publish(2)) == channels | ({"nixl"} if first else set())


def test_the_last_seal_outlives_its_last_rollout_until_another_one_has_a_seal(run: Run) -> None:
    run.join(NIXL)
    run.publish(1)
    run.trainer.drop_weights("nixl")
    assert Announcement.from_json(run.trainer.weight_announcement()).weight_version == 1
    assert list(run.publish(2)) == ["nixl"]
    with pytest.raises(VersionNotMonotonic):
        run.publish(2)
    run.trainer.step()
    run.join(MEMORY)
    assert list(run.publish(3)) == ["shared-memory"]


class Distant(FarShare):
    """A share of the model that is read over nixl."""

    reaches = "nixl"


def test_a_group_is_read_over_nixl_alone_and_a_late_rollout_gets_what_was_sealed(
    cluster: Cluster,
) -> None:
    group = GroupRun(cluster)
    group.rollouts.clear()
    fleet = group.fleet()
    group.join(fleet, "far", Distant)
    for _ in range(3):
        assert group.update(fleet).routable == ("far",)
        assert group.channels == [["nixl"]] * 2
    group.train()  # what they hold by now is not what was published
    assert group.join(fleet, "near", Share).holds(3)
    assert group.update(fleet).routable == ("far", "near")
    assert group.channels == [["nixl", "shared-memory"]] * 2
