"""A ring of slots with whole pages of one byte, and the views that a consumer has of them."""

import torch

from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot, SlotRing, slot_segment_nbytes
from rl_bridge.memory.views import Pin, SegmentView, tensor_in

__all__ = ["SIZE", "new_ring", "pin_of", "tensor_of", "uid", "view_of", "write"]

SIZE = 4 * vm.PAGE


def uid(number: int) -> str:
    """An update's id."""
    return f"{number:032x}"


def new_ring(limit: int, holders: dict[str, list[str]] | None = None) -> SlotRing:
    """A ring of anonymous segments; `holders` are told as the readers of updates."""
    return SlotRing(
        lambda nbytes: Slot(OwnedSegment.make("rl_bridge-test", slot_segment_nbytes(nbytes))),
        limit=limit,
        name_holders=lambda update_id: (holders or {}).get(update_id, []),
    )


def write(ring: SlotRing, number: int, nbytes: int = SIZE) -> Slot:
    """Publish an update whose every byte is its number."""
    slot = ring.acquire(nbytes)
    vm.store(slot.address, bytes([number]) * nbytes)
    ring.publish(slot, uid(number), nbytes)
    return slot


def view_of(slot: Slot) -> SegmentView:
    """A consumer's mapping of a slot."""
    return SegmentView(slot.segment.ref, None)


def pin_of(view: SegmentView, number: int, generation: int = 1) -> Pin:
    """A lease on an update of `write`."""
    return view.pin(uid(number), generation, SIZE)


def tensor_of(pin: Pin, nbytes: int = SIZE, offset: int = 0) -> torch.Tensor:
    """Bytes of a pinned update."""
    return tensor_in(pin, offset, nbytes, "uint8", (nbytes,))
