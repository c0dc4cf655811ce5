"""Importing what is damaged, hostile or gone: refused by its own error, nothing left behind."""

from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    ChecksumMismatch,
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    StaleUpdate,
    TransportUnavailable,
    UnknownUpdate,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.testing.strategies import bytes_of
from rl_bridge.transports.shared_memory import SharedMemory
from tests.bridge.engines import publish
from tests.helpers import open_fds, weights

# ---- damage -------------------------------------------------------------------------------------


def digests_with_one_bit_changed(manifest: WeightUpdateManifest) -> WeightUpdateManifest:
    digests = bytes([manifest.digests[0] ^ 1]) + manifest.digests[1:]
    return manifest.model_copy(update={"digests": digests})


def test_bytes_that_differ_from_the_manifest_are_rejected_by_name(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    altered = digests_with_one_bit_changed(manifest)
    with pytest.raises(
        ChecksumMismatch, match=r"^tensor checksum mismatch for 'layer.bias' in version 1: expected"
    ) as caught:
        consumer.import_update(altered)
    assert altered.digests[:16].hex() in str(caught.value)
    assert manifest.digests[:16].hex() in str(caught.value)
    assert "(1 of 3 tensors differ)" in str(caught.value)
    assert consumer.update_status(manifest.update_id) == "rejected"
    assert "checksum" in (consumer.rejection_reason(manifest.update_id) or "")
    publisher.release(manifest.update_id)
    assert consumer.import_update(publish(publisher, 2))


@pytest.mark.parametrize("name", ["layer.bias", "layer.weight", "steps"])
@pytest.mark.parametrize("at", [0, -1])
def test_one_changed_byte_anywhere_is_found(name: str, at: int) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher, make_weight_bridge("shared-memory") as consumer:
        manifest = publish(publisher, 1)
        descriptor = manifest.tensors[name]
        damaged.corrupt(manifest, descriptor.offset + at % descriptor.nbytes)
        with pytest.raises(ChecksumMismatch, match=f"'{name}'"):
            consumer.import_update(manifest)


def test_padding_is_not_part_of_an_update(consumer: TensorBridge) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher, make_weight_bridge("shared-memory") as reader:
        manifest = publish(publisher, 1)
        descriptor = manifest.tensors["layer.bias"]
        damaged.corrupt(manifest, descriptor.offset + descriptor.nbytes)
        assert reader.import_update(manifest)


def test_what_a_user_wrote_into_his_tensors_does_not_count_as_damage(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.import_update(manifest)["layer.weight"].zero_()
    consumer.release(manifest.update_id)
    publisher.release(manifest.update_id)
    for version in range(2, 6):
        manifest = publish(publisher, version)
        tensors = consumer.import_update(manifest)
        assert bytes_of(tensors["layer.weight"]) == bytes_of(weights(version)["layer.weight"])
        tensors["layer.weight"].zero_()
        del tensors
        consumer.release(manifest.update_id)
        publisher.release(manifest.update_id)


HANDLES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no-slot": ({"slot": None}, MalformedManifest, "handle field slot"),
    "slot-kind": ({"slot": {"kind": "posix"}}, MalformedManifest, "slot.kind"),
    "negative-fd": ({"slot": {"fd": -1}}, MalformedManifest, "slot.fd"),
    "huge-nbytes": ({"slot": {"nbytes": 2**63}}, MalformedManifest, "slot.nbytes"),
    "bool-pid": ({"slot": {"pid": True}}, MalformedManifest, "slot.pid"),
    "generation": ({"generation": 0}, MalformedManifest, "generation"),
    "extra": ({"path": "/etc/passwd"}, MalformedManifest, "path"),
    "too-small": ({"slot": {"nbytes": 4096}}, RangeBeyondSegment, "does not fit its segment"),
    "other-size": ({"slot": {"nbytes": 2**40}}, SegmentError, "the manifest says"),
    "other-inode": ({"slot": {"inode": 1}}, SegmentError, "was replaced"),
    "other-process": ({"slot": {"pid": 1}}, SegmentError, "gone or not visible"),
    "other-write": ({"generation": 9}, StaleUpdate, "is gone"),
    "control-gone": ({"control": {"fd": 9999}}, SegmentError, "cannot be opened"),
    "a-file": ({"slot": {"kind": "file", "name": "x"}}, TransportUnavailable, "same directory="),
}


@pytest.mark.parametrize("case", HANDLES)
def test_a_hostile_handle_is_refused_and_leaves_nothing(case: str) -> None:
    change, error, said = HANDLES[case]
    with (
        make_weight_bridge("shared-memory") as publisher,
        make_weight_bridge("shared-memory") as consumer,
    ):
        good = publish(publisher, 1)
        consumer.import_update(good)
        before = open_fds().keys()
        handle = thaw(good.handle)
        for key, value in change.items():
            both = isinstance(value, dict) and isinstance(handle.get(key), dict)
            handle[key] = handle[key] | value if both else value
        hostile = good.model_copy(update={"handle": handle, "update_id": "e" * 32})
        if error is StaleUpdate:
            consumer.release(good.update_id)
            hostile = good.model_copy(update={"handle": handle})
        with pytest.raises(error, match=said):
            consumer.import_update(hostile)
        assert open_fds().keys() <= before
        if error is TransportUnavailable:  # this side's own fault: the update may come again
            with pytest.raises(UnknownUpdate):
                consumer.update_status(hostile.update_id)
        else:  # what is known of an update outlives a copy that leads elsewhere
            state = "released" if error is StaleUpdate else "rejected"
            assert consumer.update_status(hostile.update_id) == state


def test_a_handle_of_local_clone_is_empty() -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifest = publish(bridge, 1)
        with pytest.raises(MalformedManifest, match="handle is empty"):
            bridge.import_update(manifest.model_copy(update={"handle": {"a": 1}}))


def test_an_update_that_was_released_before_it_was_imported_is_gone(transport: str) -> None:
    with make_weight_bridge(transport) as publisher, make_weight_bridge(transport) as consumer:
        manifest = publish(publisher, 1)
        publisher.release(manifest.update_id)
        publisher.release(publish(publisher, 2).update_id)
        with pytest.raises((StaleUpdate, SegmentError), match="is gone"):
            consumer.import_update(manifest)
        publisher.close()
        late = manifest.model_copy(update={"update_id": "e" * 32, "weight_version": 3})
        with pytest.raises((StaleUpdate, SegmentError), match=r"[Pp]ublish"):
            consumer.import_update(late)
