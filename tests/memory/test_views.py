"""The consumer's side of a slot: tensors that keep their version's bytes, private when written."""

import ctypes
import gc
import os
import threading
from typing import Any

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.errors import (
    SegmentError,
    StaleUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.slots import Slot, SlotRing, read_stamp
from rl_bridge.memory.views import ImportedTensors, ViewCache, anonymous_pin, tensor_in
from tests.helpers import forked, forking, make_table, open_fds
from tests.memory.slots_rig import SIZE, pin_of, tensor_of, uid, view_of, write

# ---- tensors ------------------------------------------------------------------------------------


def test_each_tensor_has_a_storage_of_its_own_size(ring: SlotRing) -> None:
    pin = pin_of(view_of(write(ring, 5)), 5)
    tensor = tensor_in(pin, 256, 24, "float32", (2, 3))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (2, 3))
    assert tensor.untyped_storage().nbytes() == 24
    assert tensor.storage_offset() == 0


def test_with_the_garbage_collector_switched_off_nothing_grows() -> None:
    anonymous_pin(7000)
    gc.collect()
    gc.disable()
    try:
        before = len(ctypes.Array.__subclasses__())
        for _ in range(50):
            tensor_of(anonymous_pin(7000), 5)
        assert len(ctypes.Array.__subclasses__()) == before
    finally:
        gc.enable()


def test_an_imported_mapping_makes_tensors_when_they_are_asked_for() -> None:
    table = make_table(ties={"head": "weight"})
    tensors = ImportedTensors(table, anonymous_pin(table.arena_nbytes))
    assert repr(tensors) == "<3 imported tensors, 50 bytes>"
    assert list(tensors) == ["bias", "weight", "head"]
    assert tensors["head"] is tensors["weight"]
    assert tensors["weight"].data_ptr() == int(tensors.addresses[1])
    with pytest.raises(KeyError):
        tensors["nothing"]


def test_a_forgotten_mapping_gives_its_memory_back_and_tensors_keep_theirs(ring: SlotRing) -> None:
    slot = write(ring, 5)
    table = make_table({"t": ("uint8", (SIZE,))})
    tensors = ImportedTensors(table, pin_of(view_of(slot), 5))
    kept = tensors["t"]
    tensors.forget()
    assert tensors.held is None
    assert is_leased(slot)
    assert kept.tolist() == [5] * SIZE
    del kept
    assert not is_leased(slot)
    with pytest.raises(WeightUpdateRejectedError, match="they are gone"):
        tensors["t"]


# ---- leases -------------------------------------------------------------------------------------


def is_leased(slot: Slot) -> bool:
    return leases.is_held(slot.segment.fd)


def test_a_lease_lasts_until_the_last_tensor_dies(ring: SlotRing) -> None:
    slot = write(ring, 5)
    view = view_of(slot)
    pinned = [view.is_pinned]
    pin = pin_of(view, 5)
    pinned.append(view.is_pinned)
    one, other = tensor_of(pin, 10), tensor_of(pin, 10, vm.PAGE)
    part = one.view(2, 5)[1]
    del pin, one
    assert is_leased(slot)
    del other
    assert is_leased(slot), "a view of a view holds it too"
    del part
    assert not is_leased(slot)
    assert [*pinned, view.is_pinned] == [False, True, False]


@forking
def test_a_tensor_in_a_forked_child_neither_holds_nor_frees_the_lease(ring: SlotRing) -> None:
    slot = write(ring, 5)
    view = view_of(slot)
    kept = {"tensor": tensor_of(pin_of(view, 5))}

    def child() -> bool:
        readable = bool((kept["tensor"] == 5).all())
        del kept["tensor"]
        return readable

    assert forked(child)
    assert is_leased(slot)
    del kept["tensor"]
    assert not is_leased(slot)


@forking
def test_a_tensor_that_dies_in_a_child_forked_at_any_moment_does_not_hang(ring: SlotRing) -> None:
    # Another thread of the parent held the view's lock at the time of the fork.
    view = view_of(write(ring, 5))
    kept = {"tensor": tensor_of(pin_of(view, 5))}
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with view._lock:
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)

    def child() -> bool:
        del kept["tensor"]
        return True

    try:
        assert forked(child)
    finally:
        go_on.set()
        thread.join(30)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, held: torch.Tensor) -> None:
        self.me = self
        self.held = held


def test_a_collection_inside_a_second_import_does_not_take_its_lease_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = read_stamp

    def collecting(*arguments: Any) -> Any:
        gc.collect()
        return read(*arguments)

    with (
        SharedMemoryTensorBridge(suspicious="off", max_slots=2) as trainer,
        SharedMemoryTensorBridge(source_worker="rollout") as rollout,
    ):
        first = trainer.publish({"weight": torch.full((4096,), 1.0)}, weight_version=1)
        gc.disable()
        try:
            Cycle(rollout.import_update(first)["weight"])
            rollout.release(first.update_id)
            monkeypatch.setattr("rl_bridge.memory.views.read_stamp", collecting)
            held = rollout.import_update(first)["weight"]
            monkeypatch.undo()
        finally:
            gc.enable()
        trainer.release(first.update_id)
        for version in (2, 3, 4):
            manifest = trainer.publish(
                {"weight": torch.full((4096,), float(version))}, weight_version=version
            )
            trainer.release(manifest.update_id)
        assert set(held.tolist()) == {1.0}


# ---- the wrong version --------------------------------------------------------------------------


def test_a_slot_that_holds_another_version_by_now_is_stale(ring: SlotRing) -> None:
    slot = write(ring, 1)
    view = view_of(slot)
    ring.release(uid(1))
    assert write(ring, 2) is slot
    with pytest.raises(StaleUpdate, match=f"{uid(1)} is gone: its slot holds update {uid(2)}.*lat"):
        pin_of(view, 1)
    assert not is_leased(slot)
    assert pin_of(view, 2, generation=2)


def test_the_same_update_id_of_another_write_is_stale(ring: SlotRing) -> None:
    view = view_of(write(ring, 1))
    with pytest.raises(StaleUpdate):
        pin_of(view, 1, generation=2)


# ---- stale private pages ------------------------------------------------------------------------


def test_refreshing_touches_only_pages_of_the_range(ring: SlotRing) -> None:
    view = view_of(write(ring, 1))
    tensor = tensor_of(pin_of(view, 1))
    tensor[0] = tensor[2 * vm.PAGE] = 99
    assert view.refresh(view.address + vm.PAGE + 7, vm.PAGE)
    assert tensor[0] == 99
    assert tensor[2 * vm.PAGE] == 1


def test_where_the_kernel_cannot_tell_everything_is_refreshed(
    ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_bridge.memory.views.vm.private_ranges", lambda *_: None)
    view = view_of(write(ring, 1))
    tensor = tensor_of(pin_of(view, 1))
    tensor[5] = 99
    assert view.refresh(view.address, 10)
    assert tensor[5] == 1


# ---- the cache ----------------------------------------------------------------------------------


def test_another_reference_to_a_known_segment_replaces_its_mapping(ring: SlotRing) -> None:
    # A publisher that duplicated its descriptor, or a manifest that says so again and again.
    slot = write(ring, 1)
    views = ViewCache()
    view = views.get(slot.segment.ref)
    before = open_fds()
    duplicate = os.dup(slot.segment.fd)
    other = views.get(slot.segment.ref.model_copy(update={"fd": duplicate}))
    assert other is not view
    views.get(slot.segment.ref)
    os.close(duplicate)
    assert len(open_fds()) == len(before)
    assert len(views) == 1
    views.close()


def test_a_refused_reference_keeps_the_known_mapping(ring: SlotRing) -> None:
    slot = write(ring, 1)
    views = ViewCache()
    view = views.get(slot.segment.ref)
    with pytest.raises(SegmentError):
        views.get(slot.segment.ref.model_copy(update={"nbytes": 3}))
    assert views.get(slot.segment.ref) is view
    assert tensor_of(pin_of(view, 1)).tolist() == [1] * SIZE
    views.close()
