"""Importing: order per publisher, verification of every byte, and a life that ends in one word."""

import gc
from typing import Any

import pytest

from rl_bridge import (
    SharedMemoryTensorBridge,
    TensorBridge,
)
from rl_bridge.bridge.consumer import REMEMBERED
from rl_bridge.errors import (
    IllegalTransition,
    MalformedManifest,
    UnknownUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import Event, State
from rl_bridge.testing.leaks import Holdings
from tests.bridge.engines import linear_weights, publish

# ---- what import gives --------------------------------------------------------------------------


def test_importing_again_gives_the_same_bytes_and_moves_nothing(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    first = consumer.import_update(manifest)
    second = consumer.import_update(manifest.to_json())
    assert first["layer.bias"].data_ptr() == second["layer.bias"].data_ptr()
    consumer.acknowledge(manifest.update_id)
    with pytest.raises(IllegalTransition, match="it is acknowledged"):
        consumer.acknowledge(manifest.update_id)


def test_the_same_update_under_another_manifest_is_refused(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    altered = manifest.model_copy(update={"metadata": {"step": 99}})
    with pytest.raises(WeightUpdateRejectedError, match="imported already, from another manifest"):
        consumer.import_update(altered)
    assert consumer.update_state(manifest.update_id) is State.VERIFIED


# ---- refused before anything is touched ---------------------------------------------------------


# ---- order --------------------------------------------------------------------------------------


def test_versions_that_were_only_imported_may_come_in_any_order(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    consumer.import_update(second)
    consumer.import_update(first)
    consumer.acknowledge(first.update_id)
    consumer.acknowledge(second.update_id)
    assert consumer.active_weight_version == 2


def test_an_update_that_was_imported_and_released_may_come_again(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.release(manifest.update_id)
    assert consumer.update_status(manifest.update_id) == "released"
    assert consumer.import_update(manifest)
    assert consumer.update_status(manifest.update_id) == "imported"


# ---- acknowledge, reject, release ---------------------------------------------------------------


def test_rejecting_twice_keeps_the_first_reason(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.reject(manifest.update_id, "first")
    consumer.reject(manifest.update_id, "second")
    assert consumer.rejection_reason(manifest.update_id) == "first"


def test_a_release_of_an_update_that_is_another_bridges_says_that_it_released_nothing(
    publisher: TensorBridge, consumer: TensorBridge, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = publish(publisher, 1)
    consumer.release(manifest)
    assert f"knows no update {manifest.update_id}, so it released nothing" in caplog.text
    caplog.clear()
    publisher.release(manifest)
    publisher.release(manifest)
    assert "released nothing" not in caplog.text


@pytest.mark.parametrize("given", ["v1", "", "0" * 31, "G" * 32])
def test_text_that_is_no_updates_id_is_refused(publisher: TensorBridge, given: str) -> None:
    with pytest.raises(MalformedManifest, match="expected an update's id or its manifest"):
        publisher.release(given)


def test_fine_steps_of_an_unknown_update_are_refused(consumer: TensorBridge) -> None:
    end = consumer.consumer
    with pytest.raises(UnknownUpdate, match="cannot stage update: unknown weight update x"):
        end.advance("x", Event.STAGE)
    assert (end.state("x"), end.reason("x"), end.timings_ms("x")) == (None, None, {})
    end.release("x")  # idempotent


@pytest.mark.parametrize(
    ("proof", "timings"),
    [
        ({"ok": {1, 2}}, None),
        ({3: "x"}, None),
        ({"x": float("nan")}, None),
        (None, {"verify": float("inf")}),
        (None, {"verify": "fast"}),
    ],
    ids=["set", "int-key", "nan", "inf", "text"],
)
def test_a_proof_that_cannot_travel_changes_nothing(
    proof: Any, timings: Any, publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    with pytest.raises((MalformedManifest, ValueError)):
        consumer.acknowledge(manifest.update_id, proof=proof, timings_ms=timings)
    assert consumer.update_state(manifest.update_id) is State.VERIFIED
    assert consumer.active_weight_version is None
    consumer.acknowledge(manifest.update_id, proof={"ok": [True, None]}, timings_ms={"verify": 3})
    assert consumer.timings(manifest.update_id)["verify"] == 3.0


def test_records_of_updates_stay_bounded_and_live_ones_are_kept(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    active = publish(publisher, 1)
    consumer.import_update(active)
    consumer.acknowledge(active.update_id)
    for number in range(2 * REMEMBERED):
        consumer.reject(f"{number:032x}", "no")
    assert len(consumer.consumer._updates) == REMEMBERED
    assert consumer.update_status(active.update_id) == "acknowledged"
    assert consumer.update_status(f"{number:032x}") == "rejected"


# ---- close and fork -----------------------------------------------------------------------------


def test_a_bridge_that_is_dropped_instead_of_closed_leaves_nothing() -> None:
    with SharedMemoryTensorBridge(max_consumers=2) as trainer:
        manifest = trainer.publish(linear_weights(1.0), weight_version=1)
        before = Holdings.now()
        for _ in range(10):
            SharedMemoryTensorBridge(source_worker="dropped").import_update(manifest)
            gc.collect()
        after = Holdings.now()
        assert len(after.descriptors) <= len(before.descriptors)
