"""The ends of ``shared-memory`` where things go wrong: directories, interrupts, closed bridges."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.errors import BridgeClosed, SegmentError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.control import ControlWriter
from rl_bridge.memory.slots import Slot
from rl_bridge.transports import shared_memory
from rl_bridge.transports.shared_memory import SharedMemory, SharedMemoryHandle

WEIGHTS = {"w": torch.arange(1000.0), "b": torch.zeros(3)}


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# ---- directories --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_a_segment_error_with_a_remedy(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine", "ascii")
    with (
        make_weight_bridge("shared-memory", directory=tmp_path / name) as bridge,
        pytest.raises(SegmentError, match=r"directory='.*file.*tmpfs"),
    ):
        bridge.publish(WEIGHTS, weight_version=1)
    assert (tmp_path / "file").read_text("ascii") == "mine"


def test_a_directory_that_cannot_be_swept_is_a_segment_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rlb-0123456789ab-1.seg").touch()
    monkeypatch.setattr("rl_bridge.memory.segment.is_held", failing(errno.ENOLCK))
    with pytest.raises(SegmentError, match=r"cannot hold segments: .*locks"):
        SharedMemory(directory=tmp_path).publisher_end("a" * 32)


def test_a_file_that_cannot_be_read_is_a_segment_error_and_no_lease_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        make_weight_bridge("shared-memory", directory=tmp_path, max_slots=1) as bridge,
        make_weight_bridge("shared-memory", directory=tmp_path) as consumer,
    ):
        manifest = bridge.publish(WEIGHTS, weight_version=1)
        with monkeypatch.context() as patch:
            patch.setattr(vm, "read_into", failing(errno.EIO))
            with pytest.raises(SegmentError, match=r"cannot be read: .*Publish again") as caught:
                consumer.import_update(manifest)
        bridge.release(manifest.update_id)
        bridge.publish(WEIGHTS, weight_version=2)  # into the only slot
        del caught


# ---- interrupts ---------------------------------------------------------------------------------


def test_a_publication_that_is_interrupted_while_it_is_stamped_holds_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamp = Slot.stamp

    def interrupted(
        self: Slot, update_id: str | None, arena_nbytes: int, header: bytes | None = None
    ) -> None:
        stamp(self, update_id, arena_nbytes, header)
        if update_id is not None:
            raise KeyboardInterrupt

    with make_weight_bridge("shared-memory", max_slots=1) as bridge:
        with monkeypatch.context() as patch:
            patch.setattr(Slot, "stamp", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bridge.publish(WEIGHTS, weight_version=1)
        manifest = bridge.publish(WEIGHTS, weight_version=1)
        assert torch.equal(bridge.import_update(manifest)["w"], WEIGHTS["w"])


def test_a_publication_that_is_interrupted_behind_the_stamp_holds_no_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    with make_weight_bridge("shared-memory", max_slots=1) as bridge:
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "SharedMemoryHandle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bridge.publish(WEIGHTS, weight_version=1)
        bridge.publish(WEIGHTS, weight_version=1)


# ---- a closed bridge ----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_a_closed_bridge_holds_nothing_and_answers_no_question_about_live_memory(
    transport: str,
) -> None:
    bridge = make_weight_bridge(transport)
    manifest = bridge.publish(WEIGHTS, weight_version=1)
    bridge.import_update(manifest)
    assert bridge.published_nbytes > 0
    bridge.close()
    assert bridge.published_nbytes == 0
    for question in (
        bridge.consumers,
        lambda: bridge.holders(manifest.update_id),
        lambda: bridge.import_update(manifest),
        lambda: bridge.publish(WEIGHTS, weight_version=2),
    ):
        with pytest.raises(BridgeClosed):
            question()


def test_a_closed_bridge_still_says_what_it_published_last() -> None:
    bridge = make_weight_bridge("shared-memory")
    manifest = bridge.publish(WEIGHTS, weight_version=1)
    bridge.close()
    assert bridge.latest_manifest == manifest


# ---- looking ------------------------------------------------------------------------------------


def test_a_look_reads_every_byte_and_leaves_no_record(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        with make_weight_bridge("shared-memory", directory=directory) as bridge:
            manifest = bridge.publish(WEIGHTS, weight_version=1)
            end = SharedMemory(directory=directory).consumer_end("looker", 0)
            assert end.look(manifest).digests() == manifest.digests
            end.close()
            assert bridge.consumers() == []


def test_the_probe_takes_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharedMemory.probe().status == "pass"
    monkeypatch.setattr(leases, "try_shared", failing(errno.ENOLCK))
    found = SharedMemory.probe()
    assert (found.status, "locks" in found.cause) == ("blocked", True)


# ---- the way back --------------------------------------------------------------------------------


def handle_of(publisher: Any) -> SharedMemoryHandle:
    """Of a publisher's end that carried nothing yet: its way back is there already."""
    ref = publisher._control.segment.ref
    return SharedMemoryHandle(slot=ref, control=ref, generation=1)


def test_a_record_is_given_back_although_an_interrupt_kept_its_writer_from_being_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: ControlWriter) -> None:
        raise KeyboardInterrupt

    before, after = (SharedMemory().publisher_end("a" * 32) for _ in range(2))  # it was restarted
    consumer: Any = SharedMemory().consumer_end("rollout", 0)
    consumer._writer("a" * 32, handle_of(before))
    monkeypatch.setattr(ControlWriter, "close", interrupted)
    with suppress(KeyboardInterrupt):
        consumer._writer("a" * 32, handle_of(after))
    monkeypatch.undo()
    seen = [record.presence for publisher in (before, after) for record in publisher.records()]
    assert seen == ["gone", "alive"]
    consumer.close()
    before.close()
    after.close()
