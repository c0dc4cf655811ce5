"""The books of a slot's pins: no living one is ever lost, no dead one is kept, none dies locked."""

import gc
import sys
import threading
from typing import Any

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.errors import SlotsExhausted
from rl_bridge.memory.control import ControlWriter, UpdateReport
from rl_bridge.memory.views import ImportedTensors, LeasedView
from tests.helpers import tracing
from tests.memory.slots_rig import SIZE, new_ring, pin_of, tensor_of, uid, view_of, write


def test_a_tensor_that_dies_takes_no_other_ones_lease() -> None:
    ring = new_ring(limit=1)
    view = view_of(write(ring, 1))
    dying = tensor_of(pin_of(view, 1))
    held = tensor_of(pin_of(view, 1))
    del dying
    view.settle()
    pinned = [view.is_pinned]
    ring.release(uid(1))
    with pytest.raises(SlotsExhausted):
        write(ring, 2)
    assert held.tolist() == [1] * SIZE
    del held
    pinned.append(view.is_pinned)
    assert pinned == [True, False]
    write(ring, 2)
    view.retire()
    ring.close()


def test_pins_of_tensors_that_died_are_not_kept() -> None:
    ring = new_ring(limit=1)
    view = view_of(write(ring, 1))
    held = tensor_of(pin_of(view, 1))
    for _ in range(20):
        tensor_of(pin_of(view, 1))
    assert len(view._pins) == 1
    assert held.tolist() == [1] * SIZE
    view.retire()
    ring.close()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: torch.Tensor) -> None:
        self.me = self
        self.held = held


def test_a_report_that_comes_to_the_books_and_books_that_have_to_report_wait_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One thread reports, and a collection leads it to the books of a slot. Another one is at the
    # books when the last tensor of an update dies, which has to be reported.
    in_report, at_the_books = threading.Event(), threading.Event()
    text_of = ControlWriter._text

    def text(writer: ControlWriter) -> bytes:
        if threading.current_thread().name == "reporting":
            in_report.set()
            at_the_books.wait(30)
            gc.collect()
        return text_of(writer)

    def watching(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.endswith("leased.py"):
            frame.f_trace_opcodes = True
            if event == "opcode" and held and sys.getrefcount(held[0]) > usual:
                in_report.wait(30)
                at_the_books.set()
                held.clear()  # what took the look has the last reference now
        return watching

    def look() -> None:
        with tracing(watching):
            view.settle()
        at_the_books.set()

    with (
        SharedMemoryTensorBridge(suspicious="off") as trainer,
        SharedMemoryTensorBridge(source_worker="rollout") as rollout,
    ):
        manifest = trainer.publish({"weight": torch.ones(8)}, weight_version=1)
        tensors = rollout.import_update(manifest)
        assert isinstance(tensors, ImportedTensors)
        found, held = tensors.pin.view, [tensors.pin.buffer]
        assert isinstance(found, LeasedView)
        view: LeasedView = found
        del tensors
        rollout.release(manifest.update_id)
        usual = sys.getrefcount(held[0])
        gc.disable()
        try:
            Cycle(rollout.import_update(manifest)["weight"])
            rollout.release(manifest.update_id)
            monkeypatch.setattr(ControlWriter, "_text", text)
            report = UpdateReport(update_id=manifest.update_id, weight_version=1, state="released")
            end = rollout.consumer.end
            threads = [
                threading.Thread(target=look, daemon=True),
                threading.Thread(
                    target=end.report, args=(manifest, report), name="reporting", daemon=True
                ),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert [thread.is_alive() for thread in threads] == [False, False]
        finally:
            gc.enable()
