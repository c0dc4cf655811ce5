"""A manifest that was changed on its way is refused alone; what is decided of its update holds."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    DigestMismatch,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.memory.slots import SlotRing
from rl_bridge.transports.local import _LocalPublisher
from tests.bridge.engines import content, publish
from tests.helpers import weights

Handle = dict[str, Any]


def with_handle(change: Callable[[Handle], object]) -> Callable[..., WeightUpdateManifest]:
    def altered(manifest: WeightUpdateManifest) -> WeightUpdateManifest:
        handle: Handle = thaw(manifest.handle)
        change(handle)
        return manifest.model_copy(update={"handle": handle})

    return altered


ALTERED = {
    "publisher": lambda manifest: manifest.model_copy(update={"publisher_id": "f" * 32}),
    "generation": with_handle(lambda handle: handle.update(generation=9)),
    "control": with_handle(lambda handle: handle["control"].update(inode=1)),
    "size": with_handle(lambda handle: handle["slot"].update(nbytes=1 << 20)),
}


def test_an_update_is_rejected_although_an_altered_copy_of_it_was_refused_before(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    between, manifest = publish(publisher, 2), publish(publisher, 3)
    altered = manifest.model_copy(update={"weight_version": 1})
    with pytest.raises(DigestMismatch):
        consumer.import_update(altered)
    consumer.reject(altered, "not that one")
    with pytest.raises(WeightUpdateRejectedError, match="not that one"):
        consumer.import_update(manifest)
    # Nor is it forgotten once a version above the altered one is active.
    consumer.import_update(between)
    consumer.acknowledge(between.update_id)
    with pytest.raises(WeightUpdateRejectedError, match="not that one"):
        consumer.import_update(manifest)


@pytest.mark.parametrize("name", ALTERED)
def test_a_copy_that_leads_nowhere_does_not_cost_the_update(name: str) -> None:
    with (
        make_weight_bridge("shared-memory") as publisher,
        make_weight_bridge("shared-memory") as consumer,
    ):
        manifest = publish(publisher, 1)
        altered = ALTERED[name](manifest)
        with pytest.raises(WeightBridgeError):
            consumer.import_update(altered)
        with pytest.raises(WeightUpdateRejectedError):
            consumer.import_update(altered)
        assert content(consumer.import_update(manifest)) == content(weights(1))
        consumer.acknowledge(manifest.update_id)
        assert consumer.active_weight_version == 1


def test_what_is_known_of_an_update_outlives_a_copy_that_leads_nowhere() -> None:
    with (
        make_weight_bridge("shared-memory") as publisher,
        make_weight_bridge("shared-memory") as consumer,
    ):
        manifest = publish(publisher, 1)
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
        consumer.release(manifest.update_id)
        with pytest.raises(WeightBridgeError):
            consumer.import_update(ALTERED["generation"](manifest))
        assert consumer.update_status(manifest.update_id) == "released"
        (report,) = publisher.holders(manifest.update_id)
        assert report.state == "released"


def test_bytes_without_a_header_are_refused_where_the_transport_seals_one(
    publisher: TensorBridge, consumer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotRing, "seal_header", lambda *_: None)
    monkeypatch.setattr(_LocalPublisher, "seal_header", lambda *_: None)
    manifest = publish(publisher, 1)
    with pytest.raises(DigestMismatch, match="no header was sealed"):
        consumer.import_update(manifest.model_copy(update={"weight_version": 10**6}))
    assert consumer.active_weight_version is None


def test_an_altered_manifest_holds_no_memory(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as consumer:
        with pytest.raises(DigestMismatch) as caught:
            consumer.import_update(manifest.model_copy(update={"weight_version": 9}))
        (report,) = publisher.holders(manifest.update_id)
        assert not report.tensors_held
        assert caught.value.__traceback__ is not None  # its frames are still there
