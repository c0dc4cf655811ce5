"""Importing what is damaged, hostile or gone: refused by its own error, nothing left behind."""

import os
from typing import Any

import pytest

from rl_bridge import (
    RolloutExecutor,
    SharedMemoryTensorBridge,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.errors import (
    ChecksumMismatch,
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    StaleUpdate,
    TransportUnavailable,
    UnknownUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import State
from rl_bridge.manifest.canonical import thaw
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from tests.bridge.engines import fours, linear_weights, publish
from tests.helpers import open_fds

# ---- damage -------------------------------------------------------------------------------------


def test_padding_is_not_part_of_an_update(consumer: TensorBridge) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher, make_weight_bridge("shared-memory") as reader:
        manifest = publish(publisher, 1)
        descriptor = manifest.tensors["layer.bias"]
        damaged.corrupt(manifest, descriptor.offset + descriptor.nbytes)
        assert reader.import_update(manifest)


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


def test_a_handle_to_a_terminal_is_never_opened() -> None:
    master, slave = os.openpty()
    try:
        with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
            manifest = trainer.publish(linear_weights(1.0), weight_version=1)
            status = os.fstat(slave)
            slot = {**manifest.handle["slot"], "fd": slave}
            slot |= {"device": status.st_dev, "inode": status.st_ino}
            hostile = manifest.model_copy(update={"handle": {**manifest.handle, "slot": slot}})
            with pytest.raises(SegmentError, match="was replaced"):
                rollout.import_update(hostile)
    finally:
        os.close(master)
        os.close(slave)


# ---- bytes that go bad behind an import ----------------------------------------------------------


@pytest.mark.parametrize("by_executor", [False, True])
def test_an_imported_update_whose_bytes_go_bad_is_rejected_when_it_is_looked_at_again(
    by_executor: bool, rollout: SharedMemoryTensorBridge
) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher:
        manifest = publisher.publish(fours(1), weight_version=1)
        mapping = rollout.import_update(manifest)
        damaged.corrupt(manifest, 0)
        again = (
            RolloutExecutor(weight_bridge=rollout).update_weights
            if by_executor
            else rollout.import_update
        )
        with pytest.raises(ChecksumMismatch) as caught:
            again(manifest)
        assert rollout.update_state(manifest) is State.REJECTED
        (report,) = publisher.holders(manifest)
        assert (report.state, report.tensors_held) == ("rejected", False)
        assert "checksum mismatch" in str(report.reason)
        with pytest.raises(WeightUpdateRejectedError):
            mapping["weight"]
        del caught  # up to here it held the frames of the import, and nothing of the update


def test_what_is_acknowledged_stays_so_although_its_bytes_go_bad(
    rollout: SharedMemoryTensorBridge,
) -> None:
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as publisher:
        manifest = publisher.publish(fours(1), weight_version=1)
        mapping = rollout.import_update(manifest)
        rollout.acknowledge(manifest)
        damaged.corrupt(manifest, 0)
        with pytest.raises(ChecksumMismatch):
            rollout.import_update(manifest)
        assert rollout.active_weight_version == 1
        assert mapping["weight"].shape == (4,)
