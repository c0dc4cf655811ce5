"""What actors of Ray do with bytes, tried without Ray: one publisher's endpoint, many rollouts'."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rl_bridge import (
    EngineLost,
    ModuleInstallAdapter,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
    WeightUpdateRejectedError,
)
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import BridgeClosed, MalformedManifest, VersionNotMonotonic
from rl_bridge.ray import EndpointOptions, PublisherEndpoint, RolloutEndpoint
from rl_bridge.ray.calls import Announcement, RolloutAnswer
from rl_bridge.ray.fleet import FleetUpdate
from rl_bridge.ray.pairing import EndpointFacts, PairChoice, choose_transport
from rl_bridge.trainers.state_dict import Source

MEMORY = PairChoice(transport="shared-memory", reason="a test").to_json()
BROADCAST = PairChoice(
    transport="broadcast", reason="a test", publisher_options={"address": "127.0.0.1"}
).to_json()


TIMEOUT_S = 60.0


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0), "b": torch.ones(3, 2)}


class Trainer:
    """A publisher's endpoint over one dict of weights."""

    def __init__(self) -> None:
        self.weights = weights()
        self.rollouts: list[Rollout] = []
        self.source: Callable[[], Source] = lambda: self.weights
        self.endpoint = PublisherEndpoint(lambda: self.source())  # noqa: PLW0108 - tests change it

    def rollout(self, choice: bytes | None = MEMORY) -> "Rollout":
        """A rollout that is closed with the trainer."""
        self.rollouts.append(Rollout(choice))
        return self.rollouts[-1]

    def step(self) -> None:
        for tensor in self.weights.values():
            tensor.add_(1)


class Rollout:
    """A rollout's endpoint over an engine of its own."""

    def __init__(self, choice: bytes | None = MEMORY) -> None:
        self.engine = {name: torch.zeros_like(one) for name, one in weights().items()}
        self.adapter_fails = False
        self.endpoint = RolloutEndpoint(self.adapter)
        if choice is not None:
            assert RolloutAnswer.from_json(self.endpoint.join(choice)).error == ""

    def adapter(self) -> ModuleInstallAdapter:
        if self.adapter_fails:
            raise MemoryError
        return ModuleInstallAdapter(self.engine)

    def update(self, manifest: bytes) -> RolloutAnswer:
        return RolloutAnswer.from_json(self.endpoint.update(manifest))

    def holds(self, wanted: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.engine[name], one) for name, one in wanted.items())


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    for one in made.rollouts:
        one.endpoint.close()
    made.endpoint.close()


def test_endpoints_exchange_bytes_only(trainer: Trainer) -> None:
    rollout = trainer.rollout(None)
    facts = trainer.endpoint.facts()
    found = rollout.endpoint.facts(facts)
    choice = choose_transport(EndpointFacts.from_json(facts), EndpointFacts.from_json(found))
    assert choice.transport == "shared-memory"
    empty = trainer.endpoint.serve(choice.to_json())
    joined = rollout.endpoint.join(choice.to_json())
    told, manifests = trainer.endpoint.publish(1)
    answer = rollout.endpoint.update(manifests[choice.channel])
    passed = [
        facts,
        found,
        empty,
        joined,
        told,
        *manifests.values(),
        answer,
        rollout.endpoint.status(),
    ]
    assert {type(item) for item in passed} == {bytes}
    assert all(json.loads(item) for item in passed if item)


def test_an_answer_carries_version_root_and_proof(trainer: Trainer) -> None:
    rollout = trainer.rollout()
    told, manifests = trainer.endpoint.publish(1)
    answer = rollout.update(manifests["shared-memory"])
    announced = Announcement.from_json(told)
    assert answer.outcome == "acknowledged"
    assert (answer.active_version, answer.active_root) == (1, announced.root)
    assert answer.proof["root"] == announced.root
    assert answer.timings_ms["total"] > 0
    assert rollout.holds(trainer.weights)
    reports = json.loads(trainer.endpoint.reports())["shared-memory"]
    assert [report["state"] for report in reports] == ["acknowledged"]


def test_a_refused_version_is_told_in_words_and_leaves_the_one_before(trainer: Trainer) -> None:
    rollout = trainer.rollout()
    _, first = trainer.endpoint.publish(1)
    rollout.update(first["shared-memory"])
    before = {name: one.clone() for name, one in rollout.engine.items()}
    trainer.weights = {"a": torch.ones(6)}
    _, second = trainer.endpoint.publish(2)
    answer = rollout.update(second["shared-memory"])
    assert (answer.outcome, answer.active_version) == ("refused", 1)
    assert answer.error == "IncompatibleUpdate"
    assert "b" in answer.message
    assert rollout.holds(before)
    for text in (b"", b"\xff", b"{}"):
        assert rollout.update(text).outcome == "refused"


def test_a_rollout_that_has_not_joined_says_so() -> None:
    rollout = Rollout(None)
    assert rollout.update(b"{}").outcome == "unjoined"
    assert RolloutAnswer.from_json(rollout.endpoint.status()).outcome == "unjoined"
    with pytest.raises(WeightBridgeUnavailableError, match="has no transport yet"):
        _ = rollout.endpoint.executor
    nowhere = PairChoice(transport="nowhere", reason="a test").to_json()
    answer = RolloutAnswer.from_json(rollout.endpoint.join(nowhere))
    assert answer.error == "WeightBridgeUnavailableError"


def test_an_engine_that_cannot_be_made_is_told_in_words(trainer: Trainer) -> None:
    rollout, broken = trainer.rollout(None), RuntimeError("CUDA out of memory")

    def adapter() -> ModuleInstallAdapter:
        raise broken

    rollout.endpoint = RolloutEndpoint(adapter)
    answer = RolloutAnswer.from_json(rollout.endpoint.join(MEMORY))
    assert (answer.error, answer.message) == ("RuntimeError", "CUDA out of memory")
    _, manifests = trainer.endpoint.publish(1)
    assert rollout.update(manifests["shared-memory"]).outcome == "unjoined"


def test_an_update_that_comes_while_it_joins_waits_for_that(trainer: Trainer) -> None:
    """As in an actor that runs several methods at a time."""
    rollout = trainer.rollout(None)
    _, manifests = trainer.endpoint.publish(1)
    with ThreadPoolExecutor(1) as pool:
        updates: list[Future[RolloutAnswer]] = []

        def adapter() -> ModuleInstallAdapter:
            updates.append(pool.submit(rollout.update, manifests["shared-memory"]))
            # An update that does not wait would find no transport, and answer at once.
            assert not wait(updates, 0.3).done
            return ModuleInstallAdapter(rollout.engine)

        rollout.endpoint = RolloutEndpoint(adapter)
        rollout.endpoint.join(MEMORY)
        answer = updates[0].result(TIMEOUT_S)
    assert answer.outcome == "acknowledged", answer


def test_two_publishes_at_once_are_taken_in_turn(trainer: Trainer) -> None:
    """As in an actor that runs several methods at a time."""
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[Any]] = []

        def source() -> Source:
            trainer.source = lambda: trainer.weights
            others.append(pool.submit(trainer.endpoint.publish, 1))
            # A publication that does not wait would have succeeded by then.
            assert not wait(others, 0.3).done
            return trainer.weights

        trainer.source = source
        first = trainer.endpoint.publish(1)
        with pytest.raises(VersionNotMonotonic):
            others[0].result(TIMEOUT_S)
    rollout = trainer.rollout()
    assert rollout.update(first[1]["shared-memory"]).active_version == 1


def test_joining_the_same_way_again_keeps_the_engines_version(trainer: Trainer) -> None:
    rollout = trainer.rollout()
    _, manifests = trainer.endpoint.publish(1)
    rollout.update(manifests["shared-memory"])
    assert RolloutAnswer.from_json(rollout.endpoint.join(MEMORY)).active_version == 1


def test_a_rollout_that_fails_to_take_another_channel_goes_on_with_its_version(
    trainer: Trainer,
) -> None:
    rollout = trainer.rollout()
    _, manifests = trainer.endpoint.publish(1)
    rollout.update(manifests["shared-memory"])
    trainer.endpoint.serve(BROADCAST)
    nowhere = PairChoice(transport="nowhere", reason="a test").to_json()
    for choice, error in ((nowhere, "WeightBridgeUnavailableError"), (BROADCAST, "MemoryError")):
        rollout.adapter_fails = error == "MemoryError"
        answer = RolloutAnswer.from_json(rollout.endpoint.join(choice))
        assert (answer.error, answer.active_version) == (error, 1)
        rollout.endpoint.executor.check_servable()
    _, manifests = trainer.endpoint.publish(2)
    assert rollout.update(manifests["shared-memory"]).active_version == 2


def test_a_rollout_that_takes_another_channel_lets_go_of_the_one_before(trainer: Trainer) -> None:
    rollout = trainer.rollout()
    _, manifests = trainer.endpoint.publish(1)
    rollout.update(manifests["shared-memory"])
    before = rollout.endpoint.executor
    manifest = trainer.endpoint.serve(BROADCAST)
    assert RolloutAnswer.from_json(rollout.endpoint.join(BROADCAST)).error == ""
    assert rollout.endpoint.executor is not before
    with pytest.raises(BridgeClosed):
        before.update_weights(manifests["shared-memory"].decode())
    reports = json.loads(trainer.endpoint.reports())["shared-memory"]
    told = {one["worker"]: (one["presence"], one["state"]) for one in reports}
    assert told["rollout"] == ("gone", "released")
    assert rollout.update(manifest).active_version == 1


def test_a_rollout_serves_its_version_until_one_has_come_by_another_channel(
    trainer: Trainer,
) -> None:
    rollout = trainer.rollout()
    told, manifests = trainer.endpoint.publish(1)
    rollout.update(manifests["shared-memory"])
    first = Announcement.from_json(told)
    manifest = trainer.endpoint.serve(BROADCAST)
    joined = RolloutAnswer.from_json(rollout.endpoint.join(BROADCAST))
    asked = RolloutAnswer.from_json(rollout.endpoint.status())
    for answer in (joined, asked, rollout.update(b"{}")):
        assert (answer.active_version, answer.active_root) == (1, first.root), answer
        assert rollout.endpoint.check_servable() == 1
    assert rollout.update(manifest).outcome == "acknowledged"
    trainer.step()
    _, manifests = trainer.endpoint.publish(2)
    assert rollout.update(manifests["broadcast"]).active_version == 2
    assert rollout.endpoint.check_servable() == 2


def test_a_rollout_whose_engine_is_lost_on_a_new_channel_says_no_version(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = trainer.rollout()
    rollout.update(trainer.endpoint.publish(1)[1]["shared-memory"])
    manifest = trainer.endpoint.serve(BROADCAST)
    rollout.endpoint.join(BROADCAST)
    lost = EngineLost("the engine ended: a fresh one is in its place.")
    monkeypatch.setattr(RolloutExecutor, "update_weights", Mock(side_effect=lost))
    assert rollout.update(manifest).active_version is None
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        rollout.endpoint.check_servable()


def test_tensors_that_are_used_as_they_came_do_not_outlive_their_channel(trainer: Trainer) -> None:
    endpoint = RolloutEndpoint(lambda: None)
    endpoint.join(MEMORY)
    _, manifests = trainer.endpoint.publish(1)
    endpoint.update(manifests["shared-memory"])
    assert endpoint.check_servable() == 1
    trainer.endpoint.serve(BROADCAST)
    endpoint.join(BROADCAST)
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        endpoint.check_servable()
    endpoint.close()


def test_a_late_channel_gets_the_sealed_version_and_not_the_weights_of_now(
    trainer: Trainer,
) -> None:
    near = trainer.rollout()
    told, manifests = trainer.endpoint.publish(1)
    near.update(manifests["shared-memory"])
    trainer.step()
    manifest = trainer.endpoint.serve(BROADCAST)
    assert WeightUpdateManifest.from_json(manifest).root == Announcement.from_json(told).root
    far = trainer.rollout(BROADCAST)
    assert far.update(manifest).active_version == 1
    assert far.holds(weights())
    told, manifests = trainer.endpoint.publish(2)
    assert sorted(manifests) == ["broadcast", "shared-memory"]
    for rollout, channel in ((near, "shared-memory"), (far, "broadcast")):
        answer = rollout.update(manifests[channel])
        assert answer.active_root == Announcement.from_json(told).root, answer
        assert rollout.holds(trainer.weights)


def test_a_channel_that_is_opened_again_gets_the_version_of_now(tmp_path: Path) -> None:
    endpoint = PublisherEndpoint(weights, EndpointOptions(state_dir=str(tmp_path)))
    endpoint.serve(BROADCAST)
    endpoint.publish(3)
    endpoint.drop("broadcast")
    far = Rollout(BROADCAST)
    assert far.update(endpoint.serve(BROADCAST)).active_version == 3
    far.endpoint.close()
    endpoint.close()


def test_a_trainer_that_comes_back_goes_on_behind_its_last_version(tmp_path: Path) -> None:
    for version in (3, 4):
        endpoint = PublisherEndpoint(weights, EndpointOptions(state_dir=str(tmp_path)))
        endpoint.publish(version)
        endpoint.close()
    endpoint = PublisherEndpoint(weights, EndpointOptions(state_dir=str(tmp_path)))
    with pytest.raises(VersionNotMonotonic, match="4 came after 4"):
        endpoint.publish(4)
    endpoint.close()


def test_versions_only_grow_on_every_channel(trainer: Trainer) -> None:
    trainer.endpoint.serve(BROADCAST)
    trainer.endpoint.publish(3)
    with pytest.raises(VersionNotMonotonic, match="3 came after 3"):
        trainer.endpoint.publish(3)
    trainer.step()
    trainer.endpoint.publish(4)


def test_weights_that_move_between_two_channels_are_refused(trainer: Trainer) -> None:
    trainer.endpoint.serve(BROADCAST)
    trainer.endpoint.publish(1)

    def moving() -> Source:
        trainer.step()
        return trainer.weights

    trainer.source = moving
    with pytest.raises(WeightUpdateRejectedError, match="moved while they were published"):
        trainer.endpoint.publish(2)
    assert Announcement.from_json(trainer.endpoint.announcement()).weight_version == 1


def test_many_versions_hold_no_more_than_two_slots(trainer: Trainer) -> None:
    rollout = trainer.rollout()
    sizes = []
    for version in range(1, 9):
        _, manifests = trainer.endpoint.publish(version)
        assert rollout.update(manifests["shared-memory"]).outcome == "acknowledged"
        trainer.step()
        sizes.append(trainer.endpoint._channels["shared-memory"].bridge.published_nbytes)
    assert len(set(sizes[2:])) == 1


def test_transports_in_place_are_refused() -> None:
    with pytest.raises(ValueError, match="'nixl': in_place=True, expected False"):
        EndpointOptions(transports={"nixl": {"in_place": True}})


def test_malformed_messages_are_refused(trainer: Trainer) -> None:
    with pytest.raises(MalformedManifest):
        trainer.endpoint.serve(b"{}")
    with pytest.raises(MalformedManifest):
        trainer.rollout(None).endpoint.facts(b'{"boot_id":"x"}')
    with pytest.raises(MalformedManifest):
        RolloutAnswer.from_json(b'{"worker":"w","rank":0,"pid":1,"outcome":"fine"}')


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"error": "OutOfMemoryError", "message": "no room"}, "OutOfMemoryError: no room"),
        ({"active_version": 5, "active_root": "b"}, "it holds 5: another driver had it install"),
        ({"outcome": "unjoined"}, "it holds None: it was started anew meanwhile"),
    ],
    ids=["refused", "of_another_fleet", "started_anew"],
)
def test_a_rollout_that_has_another_version_says_why(told: dict[str, Any], why: str) -> None:
    answer = RolloutAnswer(**{"worker": "one", "rank": 0, "pid": 1, "outcome": "refused"} | told)
    update = FleetUpdate(weight_version=3, root="a", answers={"one": answer})
    with pytest.raises(WeightUpdateRejectedError, match=f"version 3, .*{why}"):
        update.require_all()
