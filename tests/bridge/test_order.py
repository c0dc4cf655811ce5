"""What was rejected stays out and what was active may come back, as long as a consumer lives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.bridge.consumer import REMEMBERED, UNSEEN, Order
from rl_bridge.errors import (
    ChecksumMismatch,
    StaleUpdate,
    TornEngine,
    WeightUpdateRejectedError,
)
from rl_bridge.memory.views import Attachment
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import make_manifest, weights


def reject_others(consumer: TensorBridge) -> None:
    """Meet more updates than are remembered one by one."""
    for number in range(2 * REMEMBERED):
        consumer.reject(f"{number:032x}", "no")


def by_hand(consumer: TensorBridge, manifest: WeightUpdateManifest) -> None:
    consumer.import_update(manifest)
    consumer.reject(manifest.update_id, "no")


def unseen(consumer: TensorBridge, manifest: WeightUpdateManifest) -> None:
    consumer.reject(manifest.update_id, "no")


def damaged(consumer: TensorBridge, manifest: WeightUpdateManifest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attachment, "digests", lambda _: bytes(len(manifest.digests)))
        with pytest.raises(ChecksumMismatch):
            consumer.import_update(manifest)


def torn(consumer: TensorBridge, manifest: WeightUpdateManifest) -> None:
    adapter = Recording({name: torch.zeros_like(tensor) for name, tensor in weights().items()})
    executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    with pytest.raises(TornEngine):
        executor.update_weights(manifest)
    adapter.fails = {}
    executor.recover()


@pytest.mark.parametrize("reject", [by_hand, unseen, damaged, torn])
@pytest.mark.parametrize("is_forgotten", [False, True], ids=["released", "forgotten"])
def test_a_rejected_update_stays_out_after_its_record_is_over(
    reject: Callable[[TensorBridge, WeightUpdateManifest], None],
    is_forgotten: bool,
    publisher: TensorBridge,
    consumer: TensorBridge,
) -> None:
    manifest = publish(publisher, 1)
    reject(consumer, manifest)
    consumer.release(manifest.update_id)
    if is_forgotten:
        reject_others(consumer)
    with pytest.raises(WeightUpdateRejectedError, match=r"was rejected.*Publish again under a new"):
        consumer.import_update(manifest)
    assert consumer.import_update(publish(publisher, 2))


def test_the_released_active_update_may_come_back_after_its_record_is_forgotten(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    executor.release_weights()
    reject_others(bridge_of(executor))
    adapter.engine["steps"].zero_()
    executor.update_weights(manifest)
    assert content(adapter.engine) == content(weights(1))


def test_a_sibling_of_the_acknowledged_version_is_never_acknowledged() -> None:
    # Only local-clone can be made to show one: elsewhere, a slot's stamp names its update.
    with make_weight_bridge("local-clone") as bridge:
        manifest = publish(bridge, 1)
        end: Any = bridge.publisher.end
        sibling = manifest.model_copy(update={"update_id": "c" * 32})
        end._snapshots[sibling.update_id] = copy.copy(end.snapshot(manifest.update_id))
        end.seal_header(sibling.update_id, sibling.header_digest)
        bridge.import_update(manifest)
        bridge.import_update(sibling)
        bridge.acknowledge(manifest.update_id)
        with pytest.raises(StaleUpdate, match="cannot acknowledge version 1: version 1"):
            bridge.acknowledge(sibling.update_id)


def test_rejections_below_the_acknowledged_version_are_forgotten() -> None:
    order = Order()
    manifests = [
        make_manifest(update_id=f"{version:032x}", weight_version=version) for version in range(50)
    ]
    for manifest in manifests:
        order.rejected(manifest.update_id, manifest)
    order.acknowledged(make_manifest(weight_version=40))
    assert len(order._rejected) == 9
    with pytest.raises(StaleUpdate, match=r"version 40 of publisher.*latest"):
        order.check(manifests[40], reason=None)
    with pytest.raises(WeightUpdateRejectedError, match=r"was rejected: why\. Publish"):
        order.check(manifests[41], reason="why")


def test_only_the_last_ids_that_were_rejected_unseen_are_remembered() -> None:
    order = Order()
    for number in range(UNSEEN + 5):
        order.rejected(f"{number:032x}", None)
    assert len(order._unseen) == UNSEEN
    order.check(make_manifest(update_id=f"{4:032x}"), reason=None)
    with pytest.raises(WeightUpdateRejectedError):
        order.check(make_manifest(update_id=f"{5:032x}"), reason=None)
