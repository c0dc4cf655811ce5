"""A consumer's mapped segments: mapped once, kept while their publisher keeps them."""

import os
from collections.abc import Iterator

import pytest
import torch

from rl_bridge.errors import (
    SegmentError,
)
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.memory.views import Pin, SegmentView, ViewCache, tensor_in
from tests.helpers import open_fds

SIZE = 4 * vm.PAGE
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def uid(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    made = SlotRing(
        lambda nbytes: OwnedSegment.make("rl_bridge-test", nbytes),
        limit=2,
        name_holders=lambda _: [],
    )
    yield made
    made.close()


def write(ring: SlotRing, number: int) -> Slot:
    slot = ring.acquire(SIZE)
    vm.store(slot.address, bytes([number]) * SIZE)
    ring.publish(slot, uid(number), SIZE)
    return slot


def view_of(slot: Slot) -> SegmentView:
    return SegmentView(slot.segment.ref, None)


def pin_of(view: SegmentView, number: int, generation: int = 1) -> Pin:
    return view.pin(uid(number), generation, SIZE)


def tensor_of(pin: Pin, nbytes: int = SIZE, offset: int = 0) -> torch.Tensor:
    return tensor_in(pin, offset, nbytes, "uint8", (nbytes,))


# ---- the cache ----------------------------------------------------------------------------------


def test_a_segment_is_mapped_once(ring: SlotRing) -> None:
    views = ViewCache()
    slot = write(ring, 1)
    first = views.get(slot.segment.ref)
    before = open_fds()
    assert views.get(slot.segment.ref) is first
    assert open_fds() == before
    assert len(views) == 1
    views.close()
    assert len(views) == 0


def test_the_sweep_lets_go_of_what_the_publisher_gave_back(ring: SlotRing) -> None:
    views = ViewCache()
    before = open_fds()
    slot = write(ring, 1)
    view = views.get(slot.segment.ref)
    tensor = tensor_of(pin_of(view, 1))
    ring.close()
    views.sweep()
    assert len(views) == 1, "a tensor still needs it"
    assert tensor.tolist() == [1] * SIZE
    del tensor
    views.sweep()
    assert len(views) == 0
    assert open_fds() == before


def test_a_segment_that_cannot_be_mapped_leaves_nothing(
    ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    slot = write(ring, 1)
    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.views.vm.reserve", full)
    with pytest.raises(SegmentError, match=r"cannot be mapped.*Cannot allocate"):
        ViewCache().get(slot.segment.ref)
    assert open_fds() == before


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
