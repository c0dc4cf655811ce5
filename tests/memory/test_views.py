"""The consumer's side of a slot: tensors that keep their version's bytes, private when written."""

import ctypes
import gc
import os
import threading

import pytest
import torch

from rl_bridge.errors import (
    SegmentError,
    SlotsExhausted,
    StaleUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.memory.views import ImportedTensors, anonymous_pin, tensor_in
from tests.helpers import forked, forking, make_table, open_fds
from tests.memory.slots_rig import SIZE, pin_of, tensor_of, uid, view_of, write

# ---- tensors ------------------------------------------------------------------------------------


def test_a_tensor_aliases_the_published_pages(ring: SlotRing) -> None:
    slot = write(ring, 5)
    view = view_of(slot)
    tensor = tensor_of(pin_of(view, 5), 100, vm.PAGE)
    assert tensor.data_ptr() == view.address + vm.PAGE
    assert tensor.tolist() == [5] * 100
    vm.store(slot.address + vm.PAGE, b"\7")
    assert tensor[0] == 7, "no copy was made"


def test_each_tensor_has_a_storage_of_its_own_size(ring: SlotRing) -> None:
    pin = pin_of(view_of(write(ring, 5)), 5)
    tensor = tensor_in(pin, 256, 24, "float32", (2, 3))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (2, 3))
    assert tensor.untyped_storage().nbytes() == 24
    assert tensor.storage_offset() == 0


def test_an_empty_tensor_needs_no_memory() -> None:
    pin = anonymous_pin(10)
    tensor = tensor_in(pin, 0, 0, "bfloat16", (0, 3))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (0, 3))


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


def test_anonymous_memory_lives_as_long_as_a_tensor_of_it() -> None:
    pin = anonymous_pin(5)
    address = pin.address
    assert pin.nbytes == vm.PAGE
    assert pin.view is None
    tensor = tensor_of(pin, 5)
    del pin
    gc.collect()
    tensor.fill_(3)
    assert tensor.tolist() == [3] * 5
    del tensor
    with pytest.raises(OSError, match="DONTNEED"):
        vm.drop_pages(address, vm.PAGE)


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
    assert tensors.is_forgotten
    assert is_leased(slot)
    assert kept.tolist() == [5] * SIZE
    del kept
    assert not is_leased(slot)
    with pytest.raises(WeightUpdateRejectedError, match="they are gone"):
        tensors["t"]


def test_writing_to_a_tensor_is_private(ring: SlotRing) -> None:
    slot = write(ring, 5)
    mine, theirs = view_of(slot), view_of(slot)
    tensor, other = tensor_of(pin_of(mine, 5)), tensor_of(pin_of(theirs, 5))
    tensor.fill_(9)
    assert other.tolist() == [5] * SIZE
    assert os.pread(slot.segment.fd, 4, 0) == b"\5\5\5\5"


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


def test_two_pins_of_one_version_share_a_lease(ring: SlotRing) -> None:
    slot = write(ring, 5)
    view = view_of(slot)
    one, other = pin_of(view, 5), pin_of(view, 5)
    del one
    assert is_leased(slot)
    assert tensor_of(other).tolist() == [5] * SIZE
    del other
    assert not is_leased(slot)


def test_a_held_tensor_keeps_its_bytes_while_the_publisher_goes_on(ring: SlotRing) -> None:
    first = write(ring, 1)
    tensor = tensor_of(pin_of(view_of(first), 1))
    ring.release(uid(1))
    for number in range(2, 8):
        write(ring, number)
        ring.release(uid(number))
    assert tensor.tolist() == [1] * SIZE
    write(ring, 8)
    with pytest.raises(SlotsExhausted):
        write(ring, 9)
    del tensor
    assert write(ring, 10) is first


def test_a_held_tensor_outlives_view_ring_and_publisher(ring: SlotRing) -> None:
    view = view_of(write(ring, 5))
    tensor = tensor_of(pin_of(view, 5))
    address, fd = view.address, view.fd
    view.retire()
    view.retire()
    ring.close()
    del view
    gc.collect()
    assert tensor.tolist() == [5] * SIZE
    tensor.add_(1)
    assert tensor.sum() == 6 * SIZE
    del tensor
    assert vm.mapped_file(address) is None
    assert fd not in open_fds()


def test_a_view_without_tensors_is_closed_when_it_retires(ring: SlotRing) -> None:
    view = view_of(write(ring, 5))
    view.retire()
    assert view.fd not in open_fds()
    assert vm.mapped_file(view.address) is None


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


def test_a_slot_that_is_being_written_is_stale(ring: SlotRing) -> None:
    slot = write(ring, 1)
    view = view_of(slot)
    ring.release(uid(1))
    assert ring.acquire(SIZE) is slot
    with pytest.raises(StaleUpdate, match=r"is being overwritten.*Import the publisher's latest"):
        pin_of(view, 1)
    ring.abandon(slot)
    with pytest.raises(StaleUpdate):
        pin_of(view, 1)


def test_a_manifest_that_states_another_size_is_refused(ring: SlotRing) -> None:
    slot = write(ring, 1)
    view = view_of(slot)
    for nbytes in (SIZE - 1, SIZE + 1, SIZE + vm.PAGE, 2**60):
        with pytest.raises(SegmentError, match=f"holds {SIZE} bytes, the manifest says {nbytes}"):
            view.pin(uid(1), 1, nbytes)
    assert not is_leased(slot)


# ---- stale private pages ------------------------------------------------------------------------


def test_pages_written_under_an_earlier_version_are_dropped_for_the_next(ring: SlotRing) -> None:
    slot = write(ring, 1)
    view = view_of(slot)
    tensor = tensor_of(pin_of(view, 1))
    tensor[vm.PAGE] = 99
    del tensor
    ring.release(uid(1))
    assert write(ring, 2) is slot
    tensor = tensor_of(pin_of(view, 2, generation=2))
    assert tensor[vm.PAGE] == 99, "the stale page still shows"
    assert view.refresh(view.address + vm.PAGE, 1)
    assert tensor.tolist() == [2] * SIZE
    assert not view.refresh(view.address, SIZE)


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
