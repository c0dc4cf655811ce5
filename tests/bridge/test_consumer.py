"""Importing: order per publisher, verification of every byte, and a life that ends in one word."""

import gc
from typing import Any

import pytest
import torch

from rl_bridge import (
    SharedMemoryTensorBridge,
    TensorBridge,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.bridge.consumer import REMEMBERED
from rl_bridge.errors import (
    BridgeClosed,
    IllegalTransition,
    MalformedManifest,
    StaleUpdate,
    UnknownUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import Event, State
from rl_bridge.testing.leaks import Holdings
from rl_bridge.testing.strategies import bytes_of
from tests.bridge.engines import linear_weights, publish
from tests.helpers import weights

# ---- what import gives --------------------------------------------------------------------------


def test_the_tensors_are_those_that_were_published(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    state = weights(3)
    state["tied"] = state["layer.weight"]
    state["empty"] = torch.empty(0, 4)
    manifest = publisher.publish(state, weight_version=1)
    imported = consumer.import_update(manifest.to_json())
    assert set(imported) == set(state)
    assert len(imported) == 5
    for name, tensor in state.items():
        assert imported[name].dtype == tensor.dtype
        assert imported[name].shape == tensor.shape
        assert bytes_of(imported[name]) == bytes_of(tensor)
    assert imported["tied"] is imported["layer.weight"]
    assert consumer.update_state(manifest.update_id) is State.VERIFIED
    assert {"attach", "verify"} <= set(consumer.timings(manifest.update_id))


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


@pytest.mark.parametrize(
    "given", [None, 5, {"update_id": "x"}, object()], ids=lambda one: type(one).__name__
)
def test_what_is_no_manifest_is_malformed(given: Any, consumer: TensorBridge) -> None:
    with pytest.raises(MalformedManifest, match="expected a WeightUpdateManifest"):
        consumer.import_update(given)


# ---- refused before anything is touched ---------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [{"node_count": 2}, {"rdma_enabled": True}, {"tensor_parallel_size": 4}], ids=str
)
def test_a_layout_that_cannot_be_carried_is_refused(
    layout: dict[str, object], publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1).model_copy(update={"metadata": {"layout": layout}})
    with pytest.raises(WeightBridgeUnavailableError, match="gathered full-state"):
        consumer.import_update(manifest)


# ---- order --------------------------------------------------------------------------------------


def test_what_is_older_than_the_acknowledged_version_is_stale(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    consumer.import_update(second)
    consumer.acknowledge(second.update_id)
    with pytest.raises(
        StaleUpdate, match=r"\(version 1\) is stale: version 2 .* acknowledged here already"
    ):
        consumer.import_update(first)
    with pytest.raises(UnknownUpdate):
        consumer.update_status(first.update_id)
    assert consumer.active_weight_version == 2


def test_versions_that_were_only_imported_may_come_in_any_order(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    consumer.import_update(second)
    consumer.import_update(first)
    consumer.acknowledge(first.update_id)
    consumer.acknowledge(second.update_id)
    assert consumer.active_weight_version == 2


def test_each_publisher_is_a_stream_of_its_own(transport: str, consumer: TensorBridge) -> None:
    with make_weight_bridge(transport) as one, make_weight_bridge(transport) as other:
        late, early = publish(one, 9), publish(other, 1)
        consumer.import_update(late)
        consumer.acknowledge(late.update_id)
        consumer.import_update(early)
        consumer.acknowledge(early.update_id)
        assert consumer.active_weight_version == 1


def test_the_last_acknowledged_update_can_be_imported_again_after_its_release(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    for _ in range(3):
        assert bytes_of(consumer.import_update(manifest)["layer.bias"]) == bytes_of(
            weights(1)["layer.bias"]
        )
        consumer.acknowledge(manifest.update_id)
        active = [consumer.active_update_id]
        consumer.release(manifest.update_id)
        assert [*active, consumer.active_update_id] == [manifest.update_id, None]
        assert consumer.active_weight_version == 1


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


def test_a_rejected_update_never_gets_in_again(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.reject(manifest.update_id, "the vocabulary differs")
    assert consumer.update_status(manifest.update_id) == "rejected"
    assert consumer.rejection_reason(manifest.update_id) == "the vocabulary differs"
    with pytest.raises(WeightUpdateRejectedError, match="was rejected: the vocabulary differs"):
        consumer.import_update(manifest)
    with pytest.raises(IllegalTransition, match=r"cannot acknowledge.*the vocabulary differs"):
        consumer.acknowledge(manifest.update_id)


@pytest.mark.parametrize("by", ["id", "manifest"])
def test_an_update_can_be_rejected_before_it_is_imported(
    by: str, publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.reject(manifest if by == "manifest" else manifest.update_id, "not wanted")
    assert consumer.update_state(manifest.update_id) is State.REJECTED
    with pytest.raises(WeightUpdateRejectedError, match="not wanted"):
        consumer.import_update(manifest)


def test_rejecting_twice_keeps_the_first_reason(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.reject(manifest.update_id, "first")
    consumer.reject(manifest.update_id, "second")
    assert consumer.rejection_reason(manifest.update_id) == "first"


def test_an_acknowledged_update_cannot_be_rejected(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.acknowledge(manifest.update_id)
    with pytest.raises(IllegalTransition, match="cannot reject"):
        consumer.reject(manifest.update_id, "too late")
    assert consumer.active_update_id == manifest.update_id


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
    for number in range(600):
        consumer.reject(f"{number:032x}", "no")
    assert len(consumer.consumer._updates) == REMEMBERED
    assert consumer.update_status(active.update_id) == "acknowledged"
    assert consumer.update_status(f"{599:032x}") == "rejected"


# ---- close and fork -----------------------------------------------------------------------------


def test_a_closed_consumer_imports_nothing(publisher: TensorBridge, consumer: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.close()
    consumer.close()
    for attempt in (
        lambda: consumer.import_update(manifest),
        lambda: consumer.acknowledge(manifest.update_id),
        lambda: consumer.reject(manifest.update_id, "x"),
    ):
        with pytest.raises(BridgeClosed, match="Make a new bridge"):
            attempt()
    consumer.release(manifest.update_id)


def test_a_bridge_that_is_dropped_instead_of_closed_leaves_nothing() -> None:
    with SharedMemoryTensorBridge(max_consumers=2) as trainer:
        manifest = trainer.publish(linear_weights(1.0), weight_version=1)
        before = Holdings.now()
        for _ in range(10):
            SharedMemoryTensorBridge(source_worker="dropped").import_update(manifest)
            gc.collect()
        after = Holdings.now()
        assert len(after.descriptors) <= len(before.descriptors)
