"""What a trainer's actor and those of its rollouts do with bytes, called without a fleet."""

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
from rl_bridge.ray import EndpointFacts, EndpointOptions, FleetUpdate
from rl_bridge.ray.calls import Announcement, RolloutAnswer
from rl_bridge.ray.pairing import choose_transport
from rl_bridge.trainers.state_dict import Source
from tests.ray.rig import BROADCAST, MEMORY, TIMEOUT_S, Cluster, Engine, Learner, answer, choice
from tests.ray.rig import weights as first_weights
from tests.tls_files import Certificates

NOWHERE = choice("nowhere")
MakeRollout = Callable[..., Engine]


@pytest.fixture
def trainer(cluster: Cluster) -> Iterator[Learner]:
    assert cluster
    made = Learner()
    yield made
    made.close_weights()


@pytest.fixture
def rollout(trainer: Learner) -> Iterator[MakeRollout]:
    """Rollouts on a channel of the trainer's, which are closed before it."""
    assert trainer
    made: list[Engine] = []

    def make(channel: bytes | None = MEMORY) -> Engine:
        made.append(Engine())
        return made[-1] if channel is None else made[-1].joined(channel)

    yield make
    for one in made:
        one.close_weights()


def publish(trainer: Learner, version: int, channel: str = "shared-memory") -> bytes:
    return trainer.publish_weights(version)[1][channel]


def test_endpoints_exchange_bytes_only(trainer: Learner, rollout: MakeRollout) -> None:
    engine = rollout(None)
    facts = trainer.weight_facts()
    found = engine.find_weights(facts)
    chosen = choose_transport(EndpointFacts.from_json(facts), EndpointFacts.from_json(found))
    assert chosen.transport == "shared-memory"
    empty = trainer.serve_weights(chosen.to_json())
    joined = engine.join_weights(chosen.to_json())
    told, manifests = trainer.publish_weights(1)
    taken = engine.update_weights(manifests[chosen.channel])
    passed = [facts, found, empty, joined, told, *manifests.values(), taken, engine.weight_status()]
    assert {type(item) for item in passed} == {bytes}
    assert all(json.loads(item) for item in passed if item)


def test_an_answer_carries_version_root_and_proof(trainer: Learner, rollout: MakeRollout) -> None:
    engine = rollout()
    told, manifests = trainer.publish_weights(1)
    taken = answer(engine.update_weights(manifests["shared-memory"]))
    announced = Announcement.from_json(told)
    assert taken.outcome == "acknowledged"
    assert (taken.active_version, taken.active_root) == (1, announced.root)
    assert taken.proof["root"] == announced.root
    assert taken.timings_ms["total"] > 0
    assert engine.holds(trainer.held)
    reports = json.loads(trainer.weight_reports())["shared-memory"]
    assert [report["state"] for report in reports] == ["acknowledged"]


def test_a_refused_version_is_told_in_words_and_leaves_the_one_before(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout()
    engine.update_weights(publish(trainer, 1))
    before = {name: one.clone() for name, one in engine.engine.items()}
    trainer.held = {"a": torch.ones(6)}
    taken = answer(engine.update_weights(publish(trainer, 2)))
    assert (taken.outcome, taken.active_version) == ("refused", 1)
    assert taken.error == "IncompatibleUpdate"
    assert "b" in taken.message
    assert engine.holds(before)
    for text in (b"", b"\xff", b"{}"):
        assert answer(engine.update_weights(text)).outcome == "refused"


def test_a_rollout_that_has_not_joined_says_so(rollout: MakeRollout) -> None:
    engine = rollout(None)
    assert answer(engine.update_weights(b"{}")).outcome == "unjoined"
    assert answer(engine.weight_status()).outcome == "unjoined"
    with pytest.raises(WeightBridgeUnavailableError, match="has no transport yet"):
        engine.check_weights()
    assert answer(engine.join_weights(NOWHERE)).error == "WeightBridgeUnavailableError"


def test_an_engine_that_cannot_be_made_is_told_in_words(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout(None)
    engine.adapter = Mock(side_effect=RuntimeError("out of memory"))
    taken = answer(engine.join_weights(MEMORY))
    assert (taken.error, taken.message) == ("RuntimeError", "out of memory")
    assert answer(engine.update_weights(publish(trainer, 1))).outcome == "unjoined"


def test_an_update_that_comes_while_it_joins_waits_for_that(
    trainer: Learner, rollout: MakeRollout
) -> None:
    """As in an actor that runs several methods at a time."""
    engine, manifest = rollout(None), publish(trainer, 1)
    with ThreadPoolExecutor(1) as pool:
        updates: list[Future[bytes]] = []

        def adapter() -> ModuleInstallAdapter:
            updates.append(pool.submit(engine.update_weights, manifest))
            # An update that does not wait would find no transport, and answer at once.
            assert not wait(updates, 0.1).done
            return ModuleInstallAdapter(engine.engine)

        engine.adapter = adapter
        engine.join_weights(MEMORY)
        taken = answer(updates[0].result(TIMEOUT_S))
    assert taken.outcome == "acknowledged", taken


def test_two_publishes_at_once_are_taken_in_turn(trainer: Learner, rollout: MakeRollout) -> None:
    """As in an actor that runs several methods at a time."""
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[Any]] = []

        def source() -> Source:
            trainer.source = lambda: trainer.held
            others.append(pool.submit(trainer.publish_weights, 1))
            # A publication that does not wait would have succeeded by then.
            assert not wait(others, 0.1).done
            return trainer.held

        trainer.source = source
        manifest = publish(trainer, 1)
        with pytest.raises(VersionNotMonotonic):
            others[0].result(TIMEOUT_S)
    assert answer(rollout().update_weights(manifest)).active_version == 1


def test_joining_the_same_way_again_keeps_the_engines_version(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout()
    engine.update_weights(publish(trainer, 1))
    assert answer(engine.join_weights(MEMORY)).active_version == 1


def test_a_rollout_that_fails_to_take_another_channel_goes_on_with_its_version(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout()
    engine.update_weights(publish(trainer, 1))
    trainer.serve_weights(BROADCAST)
    for channel, error in ((NOWHERE, "WeightBridgeUnavailableError"), (BROADCAST, "MemoryError")):
        if error == "MemoryError":
            engine.adapter = Mock(side_effect=MemoryError)
        taken = answer(engine.join_weights(channel))
        assert (taken.error, taken.active_version) == (error, 1)
        assert engine.check_weights() == 1
    assert answer(engine.update_weights(publish(trainer, 2))).active_version == 2


def test_a_rollout_that_takes_another_channel_releases_the_one_before(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout()
    first = publish(trainer, 1)
    engine.update_weights(first)
    before = engine._rollout_endpoint().executor
    manifest = trainer.serve_weights(BROADCAST)
    engine.joined(BROADCAST)
    assert engine._rollout_endpoint().executor is not before
    with pytest.raises(BridgeClosed):
        before.update_weights(first.decode())
    reports = json.loads(trainer.weight_reports())["shared-memory"]
    told = {one["worker"]: (one["presence"], one["state"]) for one in reports}
    assert told["Engine"] == ("gone", "released")
    assert answer(engine.update_weights(manifest)).active_version == 1


def test_tls_is_an_option_of_both_actors_transports(
    trainer: Learner, rollout: MakeRollout, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path, ["127.0.0.1"])
    trainer.weight_options = {"broadcast": {"tls": certificates.good.plain()}}
    trainer.serve_weights(BROADCAST)
    for files, outcome in ((certificates.good, "acknowledged"), (certificates.foreign, "refused")):
        engine = rollout(None)
        engine.weight_options = {"broadcast": {"tls": files.plain()}}
        manifest = publish(trainer, 1 + (outcome == "refused"), "broadcast")
        taken = answer(engine.joined(BROADCAST).update_weights(manifest))
        assert taken.outcome == outcome, taken
        assert taken.error == ("CertificateRefused" if outcome == "refused" else "")


def test_a_rollout_serves_its_version_until_one_has_come_by_another_channel(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout()
    told, manifests = trainer.publish_weights(1)
    engine.update_weights(manifests["shared-memory"])
    first = Announcement.from_json(told)
    manifest = trainer.serve_weights(BROADCAST)
    answers = (
        engine.join_weights(BROADCAST),
        engine.weight_status(),
        engine.update_weights(b"{}"),
    )
    for taken in map(answer, answers):
        assert (taken.active_version, taken.active_root) == (1, first.root), taken
        assert engine.check_weights() == 1
    assert answer(engine.update_weights(manifest)).outcome == "acknowledged"
    trainer.step()
    assert answer(engine.update_weights(publish(trainer, 2, "broadcast"))).active_version == 2
    assert engine.check_weights() == 2


def test_a_rollout_whose_engine_is_lost_on_a_new_channel_says_no_version(
    trainer: Learner, rollout: MakeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rollout()
    engine.update_weights(publish(trainer, 1))
    manifest = trainer.serve_weights(BROADCAST)
    engine.joined(BROADCAST)
    lost = EngineLost("the engine ended: a fresh one is in its place.")
    monkeypatch.setattr(RolloutExecutor, "update_weights", Mock(side_effect=lost))
    assert answer(engine.update_weights(manifest)).active_version is None
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        engine.check_weights()


def test_tensors_that_are_used_as_they_came_do_not_outlive_their_channel(
    trainer: Learner, rollout: MakeRollout
) -> None:
    engine = rollout(None)
    engine.adapter = lambda: None
    engine.joined(MEMORY)
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        engine.imported_weights()
    for version in (1, 2):
        trainer.step()
        engine.update_weights(publish(trainer, version))
        found = engine.imported_weights()
        assert all(torch.equal(found[name], one) for name, one in trainer.held.items())
    trainer.serve_weights(BROADCAST)
    engine.joined(BROADCAST)
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        engine.check_weights()


def test_a_late_channel_gets_the_sealed_version_and_not_the_weights_of_now(
    trainer: Learner, rollout: MakeRollout
) -> None:
    near = rollout()
    told, manifests = trainer.publish_weights(1)
    near.update_weights(manifests["shared-memory"])
    trainer.step()
    manifest = trainer.serve_weights(BROADCAST)
    assert WeightUpdateManifest.from_json(manifest).root == Announcement.from_json(told).root
    far = rollout(BROADCAST)
    assert answer(far.update_weights(manifest)).active_version == 1
    assert far.holds(first_weights())
    told, manifests = trainer.publish_weights(2)
    assert sorted(manifests) == ["broadcast", "shared-memory"]
    for engine, channel in ((near, "shared-memory"), (far, "broadcast")):
        taken = answer(engine.update_weights(manifests[channel]))
        assert taken.active_root == Announcement.from_json(told).root, taken
        assert engine.holds(trainer.held)


def test_a_trainer_that_comes_back_goes_on_behind_its_last_version(
    trainer: Learner, rollout: MakeRollout, tmp_path: Path
) -> None:
    trainer.weight_state_dir = str(tmp_path)
    for version in (3, 4):
        trainer.close_weights()
        trainer = Learner()
        trainer.weight_state_dir = str(tmp_path)
        trainer.publish_weights(version)
    with pytest.raises(VersionNotMonotonic, match="4 came after 4"):
        trainer.publish_weights(4)
    for _ in range(2):  # a channel that is opened again gets the version of now
        far = Engine()
        manifest = trainer.serve_weights(BROADCAST)
        far.joined(BROADCAST)
        assert answer(far.update_weights(manifest)).active_version == 4
        far.close_weights()
        trainer.drop_weights("broadcast")
    trainer.close_weights()


def test_weights_that_move_between_two_channels_are_refused(trainer: Learner) -> None:
    trainer.serve_weights(BROADCAST)
    trainer.publish_weights(1)

    def moving() -> Source:
        trainer.step()
        return trainer.held

    trainer.source = moving
    with pytest.raises(WeightUpdateRejectedError, match="moved while they were published"):
        trainer.publish_weights(2)
    assert Announcement.from_json(trainer.weight_announcement()).weight_version == 1


def test_many_versions_hold_no_more_than_two_slots(trainer: Learner, rollout: MakeRollout) -> None:
    engine, sizes = rollout(), []
    for version in range(1, 9):
        taken = answer(engine.update_weights(publish(trainer, version)))
        assert taken.outcome == "acknowledged"
        trainer.step()
        channels = trainer._publisher_endpoint()._channels
        sizes.append(channels["shared-memory"].bridge.published_nbytes)
    assert len(set(sizes[2:])) == 1


def test_transports_in_place_are_refused() -> None:
    with pytest.raises(ValueError, match="'nixl': in_place=True, expected False"):
        EndpointOptions(transports={"nixl": {"in_place": True}})


def test_malformed_messages_are_refused(trainer: Learner, rollout: MakeRollout) -> None:
    with pytest.raises(MalformedManifest):
        trainer.serve_weights(b"{}")
    with pytest.raises(MalformedManifest):
        rollout(None).find_weights(b'{"boot_id":"x"}')
    with pytest.raises(MalformedManifest):
        answer(b'{"worker":"w","rank":0,"pid":1,"outcome":"fine"}')


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
    taken = RolloutAnswer(**{"worker": "one", "rank": 0, "pid": 1, "outcome": "refused"} | told)
    update = FleetUpdate(weight_version=3, root="a", answers={"one": taken})
    with pytest.raises(WeightUpdateRejectedError, match=f"version 3, .*{why}"):
        update.require_all()
