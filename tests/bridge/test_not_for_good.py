"""What is wrong with a manifest's copy, or with this side, never costs the update itself."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.cuda.driver import driver_error
from rl_bridge.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    DigestMismatch,
    StaleUpdate,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.memory import segment as leases
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPUPlace
from rl_bridge.memory.slots import SlotRing
from rl_bridge.transports.local import _LocalPublisher
from tests.bridge.engines import Recording, content, publish
from tests.helpers import weights

CHANGES: list[dict[str, Any]] = [
    {"weight_version": 9},
    {"metadata": {"step": 9}},
    {"source_worker": "another"},
    {"source_rank": 9},
    {"created_at": 9.0},
]


def altered_digests(manifest: WeightUpdateManifest) -> WeightUpdateManifest:
    return manifest.model_copy(update={"digests": bytes(len(manifest.digests))})


# ---- a manifest that was changed on its way ------------------------------------------------------


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_a_header_that_was_changed_is_refused_and_the_one_that_was_published_is_not(
    changes: dict[str, Any], publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    altered = manifest.model_copy(update=changes)
    with pytest.raises(DigestMismatch, match=r"header \(weight_version, metadata") as caught:
        consumer.import_update(altered)
    assert f"digest is {altered.header_digest.hex()}" in str(caught.value)
    assert f"expected {manifest.header_digest.hex()}" in str(caught.value)
    assert consumer.update_status(manifest.update_id) == "rejected"
    (report,) = publisher.holders(manifest.update_id)
    assert report.state == "rejected"
    assert content(consumer.import_update(manifest)) == content(weights(1))
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.weight_version) == ("verified", 1)


def test_bytes_without_a_header_are_refused_where_the_transport_seals_one(
    publisher: TensorBridge, consumer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotRing, "seal_header", lambda *_: None)
    monkeypatch.setattr(_LocalPublisher, "seal_header", lambda *_: None)
    manifest = publish(publisher, 1)
    with pytest.raises(DigestMismatch, match="no header was sealed"):
        consumer.import_update(manifest.model_copy(update={"weight_version": 10**6}))
    assert consumer.active_weight_version is None


def test_digests_that_were_changed_are_told_by_tensor_and_do_not_cost_the_update(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    with pytest.raises(ChecksumMismatch, match=r"layer\.bias"):
        consumer.import_update(altered_digests(manifest))
    assert content(consumer.import_update(manifest)) == content(weights(1))


def test_what_is_known_of_an_update_outlives_its_altered_manifest(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)
    consumer.acknowledge(manifest.update_id)
    consumer.release(manifest.update_id)
    with pytest.raises(DigestMismatch):
        consumer.import_update(manifest.model_copy(update={"metadata": {"step": 9}}))
    assert consumer.update_status(manifest.update_id) == "released"
    (report,) = publisher.holders(manifest.update_id)
    assert report.state == "released"
    assert consumer.active_weight_version == 1


def test_an_altered_manifest_holds_no_memory(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as consumer:
        with pytest.raises(DigestMismatch) as caught:
            consumer.import_update(manifest.model_copy(update={"weight_version": 9}))
        (report,) = publisher.holders(manifest.update_id)
        assert not report.tensors_held
        assert caught.value.__traceback__ is not None  # its frames are still there


def test_an_executor_installs_the_manifest_after_its_altered_copy(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    with pytest.raises(DigestMismatch):
        executor.update_weights(manifest.model_copy(update={"weight_version": 9}))
    executor.update_weights(manifest)
    assert executor.active_weight_version == 1
    assert content(adapter.engine) == content(weights(1))


# ---- this side is short of something -------------------------------------------------------------


def fails_once(error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    left = [error]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args, **kwargs)

    return failing


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        DeadlineExceeded("the device did not get there"),
        driver_error("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY", "no"),
    ],
    ids=["memory", "thread", "kernel", "gpu", "torch", "deadline", "driver"],
)
def test_a_shortage_while_the_bytes_are_read_does_not_cost_the_update(
    error: Exception,
    publisher: TensorBridge,
    consumer: TensorBridge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = publish(publisher, 1)
    monkeypatch.setattr(BytePlan, "digest", fails_once(error, BytePlan.digest))
    with pytest.raises(type(error)) as caught:
        consumer.import_update(manifest)
    assert caught.value is error
    assert content(consumer.import_update(manifest)) == content(weights(1))


def test_a_shortage_while_an_update_is_attached_leaves_its_slot_free_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        make_weight_bridge("shared-memory", max_slots=1) as publisher,
        make_weight_bridge("shared-memory") as consumer,
    ):
        manifest = publish(publisher, 1)
        monkeypatch.setattr(CPUPlace, "plan", fails_once(MemoryError("no"), CPUPlace.plan))
        with pytest.raises(MemoryError) as caught:
            consumer.import_update(manifest)
        publisher.release(manifest.update_id)
        publish(publisher, 2)
        assert caught.value.__traceback__ is not None  # its frames are still there


def test_a_kernel_without_room_for_a_lease_does_not_cost_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_weight_bridge("shared-memory") as bridge:
        manifest = publish(bridge, 1)
        error = OSError(errno.ENOLCK, "no locks left")
        patched = fails_once(error, leases.try_shared)
        monkeypatch.setattr(leases, "try_shared", patched)
        with pytest.raises(OSError, match="no locks left"):
            bridge.import_update(manifest)
        assert content(bridge.import_update(manifest)) == content(weights(1))


def test_a_shortage_while_a_named_segment_is_read_does_not_cost_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_weight_bridge("shared-memory", directory=tmp_path) as bridge:
        manifest = publish(bridge, 1)
        error = OSError(errno.ENOMEM, "no memory left")
        monkeypatch.setattr("rl_bridge.memory.vm.os.preadv", fails_once(error, os.preadv))
        with pytest.raises(WeightBridgeUnavailableError, match="no memory left"):
            bridge.import_update(manifest)
        assert content(bridge.import_update(manifest)) == content(weights(1))


# ---- a refusal at the door -----------------------------------------------------------------------


def test_a_publisher_hears_that_its_update_came_too_late(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    late, latest = publish(publisher, 1), publish(publisher, 2)
    consumer.import_update(latest)
    consumer.acknowledge(latest.update_id)
    with pytest.raises(StaleUpdate):
        consumer.import_update(late)
    (report,) = publisher.holders(late.update_id)
    assert (report.state, report.weight_version) == ("rejected", 1)
    assert "stale" in str(report.reason)


def test_a_publisher_hears_of_an_update_that_was_rejected_before_it_came(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.reject(manifest.update_id, "not that one")
    assert publisher.holders(manifest.update_id) == []
    with pytest.raises(WeightUpdateRejectedError, match="not that one"):
        consumer.import_update(manifest)
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.weight_version) == ("rejected", 1)


def test_a_replayed_manifest_does_not_change_what_its_publisher_knows(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    for manifest in (first, second):
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
    with pytest.raises(StaleUpdate):
        consumer.import_update(first)
    (report,) = publisher.holders(first.update_id)
    assert report.state == "acknowledged"
