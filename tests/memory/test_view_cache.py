"""A consumer's mapped segments: mapped once, kept while their publisher keeps them."""

import os

import pytest

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory.slots import SlotRing
from rl_bridge.memory.views import ViewCache
from tests.helpers import open_fds
from tests.memory.slots_rig import SIZE, pin_of, tensor_of, write

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
    with pytest.raises(WeightBridgeUnavailableError, match="Cannot allocate memory"):
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
