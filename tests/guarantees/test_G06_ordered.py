"""G6 Ordered: versions of one publisher only grow, for everybody.

Also when threads publish at once and, with `state_dir`, across a restart. Late and replayed
manifests are refused, and so is one whose header is not the one that was sealed with the bytes.

It ends at the process: a restarted consumer knows no earlier versions. Without `state_dir` a
restarted publisher is another stream, which nothing orders relative to the first.
"""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import (
    DigestMismatch,
    StaleUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing import BridgeOver, contents_of, sample_weights
from tests.guarantees.kit import Carrier, Replica


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((9,), float(version))}


# ---- the publisher counts -----------------------------------------------------------------------


def test_a_version_is_published_once_and_never_below_a_later_one(trainer: BridgeOver) -> None:
    trainer.publish(weights(5), weight_version=5)
    for version in (5, 4, 0):
        with pytest.raises(VersionNotMonotonic, match="must increase monotonically"):
            trainer.publish(weights(9), weight_version=version)
    assert trainer.publish(weights(6), weight_version=6).weight_version == 6


def test_a_publication_that_fails_leaves_its_number_free(trainer: BridgeOver) -> None:
    with pytest.raises(WeightBridgeError):
        trainer.publish({"w": torch.ones(2, device="meta")}, weight_version=1)
    assert trainer.publish(weights(1), weight_version=1).weight_version == 1


def test_threads_that_publish_at_once_hand_out_each_number_once(trainer: BridgeOver) -> None:
    handed_out: list[int] = []

    def publish() -> None:
        for version in range(1, 25):
            with suppress(VersionNotMonotonic):
                manifest = trainer.publish(weights(version), weight_version=version)
                handed_out.append(manifest.weight_version)
                trainer.release(manifest.update_id)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(handed_out) == len(set(handed_out)) > 0
    assert trainer.latest_manifest is not None
    assert trainer.latest_manifest.weight_version == max(handed_out) == 24


def persistent(directory: Path) -> TensorBridge:
    return make_weight_bridge("shared-memory", state_dir=directory)


def test_a_restarted_publisher_with_a_state_directory_cannot_use_a_number_again(
    tmp_path: Path,
) -> None:
    with persistent(tmp_path) as first:
        stream = first.publish(weights(7), weight_version=7).publisher_id
    with persistent(tmp_path) as second:
        with pytest.raises(VersionNotMonotonic):
            second.publish(weights(7), weight_version=7)
        assert second.publish(weights(8), weight_version=8).publisher_id == stream


def test_two_publishers_cannot_count_in_one_state_directory(tmp_path: Path) -> None:
    with persistent(tmp_path) as first, persistent(tmp_path) as second:
        first.publish(weights(1), weight_version=1)
        with pytest.raises(WeightBridgeUnavailableError):
            second.publish(weights(2), weight_version=2)


def test_a_restarted_publisher_without_one_is_another_stream(
    rollout: BridgeOver, transport: Carrier
) -> None:
    for version in (5, 1):
        with transport.bridge() as trainer:
            manifest = trainer.publish(weights(version), weight_version=version)
            rollout.import_update(manifest)
            rollout.acknowledge(manifest)
            assert rollout.active_weight_version == version


# ---- the consumer refuses -----------------------------------------------------------------------


def test_a_manifest_that_comes_late_is_stale(trainer: BridgeOver, rollout: BridgeOver) -> None:
    early, late = (trainer.publish(weights(version), weight_version=version) for version in (1, 2))
    rollout.import_update(late)
    rollout.acknowledge(late)
    with pytest.raises(StaleUpdate):
        rollout.import_update(early)
    assert rollout.active_weight_version == 2


def test_an_older_version_is_not_acknowledged_after_a_newer_one(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    early, late = (trainer.publish(weights(version), weight_version=version) for version in (1, 2))
    for manifest in (early, late):
        rollout.import_update(manifest)
    rollout.acknowledge(late)
    with pytest.raises(StaleUpdate):
        rollout.acknowledge(early)
    assert rollout.active_update_id == late.update_id


@pytest.mark.parametrize(
    "changed",
    [{"weight_version": 4}, {"metadata": {"step": 2}}, {"source_worker": "w"}, {"source_rank": 3}],
    ids=str,
)
def test_a_header_that_was_not_sealed_with_the_bytes_is_refused(
    changed: dict[str, object], trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(weights(3), weight_version=3, metadata={"step": 1})
    with pytest.raises(DigestMismatch, match="weight_version"):
        rollout.import_update(manifest.model_copy(update=changed))
    assert contents_of(rollout.import_update(manifest)) == contents_of(weights(3))


def test_a_manifest_under_a_new_id_is_not_taken_for_a_new_update(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    rollout.import_update(manifest)
    rollout.acknowledge(manifest)
    with pytest.raises(WeightBridgeError):
        rollout.import_update(manifest.model_copy(update={"update_id": "f" * 32}))


def test_an_old_manifest_never_shows_the_bytes_of_a_later_version(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    old = trainer.publish(weights(1), weight_version=1)
    trainer.release(old.update_id)
    for version in range(2, 8):
        later = trainer.publish(weights(version), weight_version=version)
        with suppress(WeightBridgeError):
            assert contents_of(rollout.import_update(old)) == contents_of(weights(1))
        trainer.release(later.update_id)


def test_a_rejected_update_stays_out_also_if_it_was_never_seen(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    rollout.reject(manifest, "not this one")
    with pytest.raises(WeightUpdateRejectedError, match="rejected"):
        rollout.import_update(manifest)
    assert rollout.import_update(trainer.publish(weights(2), weight_version=2))


def test_a_released_update_stays_released(trainer: BridgeOver, rollout: BridgeOver) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    rollout.import_update(manifest)
    for side in (rollout, trainer):
        side.release(manifest.update_id)
    for version in (2, 3):
        trainer.publish(weights(version), weight_version=version)
    with pytest.raises(WeightBridgeError):
        rollout.import_update(manifest)
    assert rollout.update_status(manifest.update_id) == "released"


# ---- the engine ---------------------------------------------------------------------------------


def test_a_late_manifest_leaves_the_engine_as_it_is(replica: Replica) -> None:
    early, late = replica.publish(2), replica.publish(1)
    replica.executor.update_weights(late)
    with pytest.raises(StaleUpdate):
        replica.executor.update_weights(early)
    with pytest.raises(StaleUpdate, match="active already"):
        replica.executor.update_weights(late)
    assert replica.version == late.weight_version
    assert replica.holds(1)


def test_the_active_update_may_come_again_into_a_fresh_engine(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    for _ in range(2):  # the second executor's engine was started anew
        with RolloutExecutor(weight_bridge=rollout) as executor:
            executor.update_weights(manifest)
            assert executor.active_weight_version == 1


def test_a_trainer_that_resumes_from_an_older_step_goes_on_counting(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    for version, step in ((1, 100), (2, 200), (3, 100)):
        source = sample_weights(step)
        manifest = trainer.publish(source, weight_version=version, metadata={"step": step})
        assert contents_of(rollout.import_update(manifest)) == contents_of(source)
        rollout.acknowledge(manifest)
        for side in (rollout, trainer):
            side.release(manifest.update_id)
