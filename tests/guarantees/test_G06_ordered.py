"""G6 Ordered: versions of one publisher only grow, for everybody.

Also when threads publish at once and, with `state_dir`, across a restart. Late and replayed
manifests are refused, and so is one whose header is not the one that was sealed with the bytes.

It ends at the process: a restarted consumer knows no earlier versions. Without `state_dir` a
restarted publisher is another stream, which nothing orders relative to the first.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import (
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing import contents_of, sample_weights
from tests.guarantees.kit import OverEachAdapter, OverEachTransport, on_engines, scenarios


@scenarios(
    "test_versions_only_grow",
    "test_threads_that_publish_at_once_hand_out_each_number_once",
    "test_a_late_manifest_is_stale",
    "test_a_replayed_version_number_is_stale",
    "test_an_older_version_cannot_be_acknowledged_after_a_newer_one",
    "test_a_changed_header_is_refused_and_the_update_still_arrives",
    "test_a_released_update_is_stale",
    "test_release_is_idempotent_and_final",
    "test_a_killed_publisher_leaves_consumers_their_bytes",
)
class TestEachTransport(OverEachTransport):
    """The publisher counts, and consumers refuse what comes late."""


@scenarios(
    "test_a_late_manifest_leaves_the_engine_as_it_is",
)
class TestEachAdapter(OverEachAdapter):
    """Nor does an engine go back."""


ENGINES = on_engines(
    "test_a_late_manifest_leaves_the_engine_as_it_is",
    "test_what_a_rank_refused_is_told_to_the_trainer_and_never_let_in_again",
)


@pytest.fixture
def bridge() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", suspicious="off") as made:
        yield made


def test_a_publication_that_fails_leaves_its_number_free(bridge: TensorBridge) -> None:
    with pytest.raises(WeightBridgeError):
        bridge.publish({"w": torch.ones(2, device="meta")}, weight_version=1)
    assert bridge.publish(sample_weights(1), weight_version=1).weight_version == 1


def test_a_rejected_update_stays_out_also_if_it_was_never_seen(bridge: TensorBridge) -> None:
    manifest = bridge.publish(sample_weights(1), weight_version=1)
    bridge.reject(manifest, "not this one")
    with pytest.raises(WeightUpdateRejectedError, match="rejected"):
        bridge.import_update(manifest)
    assert bridge.import_update(bridge.publish(sample_weights(2), weight_version=2))


def test_the_active_update_may_come_again_into_a_fresh_engine(bridge: TensorBridge) -> None:
    manifest = bridge.publish(sample_weights(1), weight_version=1)
    for _ in range(2):  # the second executor's engine was started anew
        with RolloutExecutor(weight_bridge=bridge) as executor:
            executor.update_weights(manifest)
            assert executor.active_weight_version == 1


def test_a_trainer_that_resumes_from_an_older_step_goes_on_counting(bridge: TensorBridge) -> None:
    for version, step in ((1, 100), (2, 200), (3, 100)):
        source = sample_weights(step)
        manifest = bridge.publish(source, weight_version=version, metadata={"step": step})
        assert contents_of(bridge.import_update(manifest)) == contents_of(source)
        bridge.acknowledge(manifest)


# ---- across a restart ---------------------------------------------------------------------------


def persistent(directory: Path) -> TensorBridge:
    return make_weight_bridge("shared-memory", state_dir=directory)


def test_a_restarted_publisher_with_a_state_directory_cannot_use_a_number_again(
    tmp_path: Path,
) -> None:
    with persistent(tmp_path) as first:
        stream = first.publish(sample_weights(7), weight_version=7).publisher_id
    with persistent(tmp_path) as second:
        with pytest.raises(VersionNotMonotonic):
            second.publish(sample_weights(7), weight_version=7)
        assert second.publish(sample_weights(8), weight_version=8).publisher_id == stream


def test_two_publishers_cannot_count_in_one_state_directory(tmp_path: Path) -> None:
    with persistent(tmp_path) as first, persistent(tmp_path) as second:
        first.publish(sample_weights(1), weight_version=1)
        with pytest.raises(WeightBridgeUnavailableError):
            second.publish(sample_weights(2), weight_version=2)
