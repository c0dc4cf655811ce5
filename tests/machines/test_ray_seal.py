"""Where every rollout of a trainer on Ray reads over nixl, its versions are copied once."""

import json
from collections.abc import Iterator

import pytest
import torch

from rl_bridge import ModuleInstallAdapter
from rl_bridge.errors import VersionNotMonotonic
from rl_bridge.ray import PublisherEndpoint, RolloutEndpoint
from rl_bridge.ray.calls import Announcement, RolloutAnswer
from rl_bridge.ray.pairing import PairChoice

NIXL = PairChoice(transport="nixl", reason="a test").to_json()
MEMORY = PairChoice(transport="shared-memory", reason="a test").to_json()
NBYTES = 1 << 20


class Run:
    """A trainer's endpoint, and what its rollouts hold."""

    def __init__(self) -> None:
        self.weights = {"w": torch.zeros(NBYTES // 4)}
        self.trainer = PublisherEndpoint(lambda: self.weights)
        self.rollouts: list[RolloutEndpoint] = []

    def join(self, choice: bytes) -> dict[str, torch.Tensor]:
        engine = {"w": torch.full((NBYTES // 4,), -1.0)}
        endpoint = RolloutEndpoint(lambda: ModuleInstallAdapter(engine))
        self.rollouts.append(endpoint)
        manifest = self.trainer.serve(choice)
        assert RolloutAnswer.from_json(endpoint.join(choice)).error == ""
        if manifest:
            assert RolloutAnswer.from_json(endpoint.update(manifest)).outcome == "acknowledged"
        return engine

    def publish(self, version: int) -> dict[str, bytes]:
        self.weights["w"].fill_(version)
        return self.trainer.publish(version)[1]

    def sealed_nbytes(self) -> int:
        channels = self.trainer._channels.values()
        return sum(channel.bridge.publisher.nbytes for channel in channels)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    for one in made.rollouts:
        one.close()
    made.trainer.close()


def test_versions_that_travel_by_nixl_alone_are_sealed_there_alone(run: Run) -> None:
    engine = run.join(NIXL)
    for version in range(1, 5):
        manifests = run.publish(version)
        assert list(manifests) == ["nixl"]
        answer = RolloutAnswer.from_json(run.rollouts[0].update(manifests["nixl"]))
        assert answer.outcome == "acknowledged"
        assert engine["w"][-1] == version
    # Two slots of one ring, and not of two.
    assert run.sealed_nbytes() < 3 * NBYTES
    assert list(json.loads(run.trainer.reports())) == ["nixl"]


def test_a_late_rollout_of_this_machine_gets_the_sealed_version(run: Run) -> None:
    run.join(NIXL)
    run.publish(1)
    run.weights["w"].fill_(7)  # what the trainer holds by now is not what was published
    late = run.join(MEMORY)
    assert late["w"][-1] == 1
    manifests = run.publish(2)
    assert set(manifests) == {"nixl", "shared-memory"}


def test_a_late_rollout_elsewhere_gets_what_was_published_before_anybody_came(run: Run) -> None:
    run.publish(1)
    run.weights["w"].fill_(7)
    late = run.join(NIXL)
    assert late["w"][-1] == 1
    assert set(run.publish(2)) == {"nixl"}


def test_the_last_seal_outlives_its_last_rollout_until_another_one_has_a_seal(run: Run) -> None:
    run.join(NIXL)
    run.publish(1)
    run.trainer.drop("nixl")
    assert Announcement.from_json(run.trainer.announcement()).weight_version == 1
    assert list(run.publish(2)) == ["nixl"]
    with pytest.raises(VersionNotMonotonic):
        run.publish(2)
    late = run.join(MEMORY)
    assert late["w"][-1] == 2
    assert list(run.publish(3)) == ["shared-memory"]
