"""The books of a slot's pins: no living one is ever lost, no dead one is kept, none dies locked."""

import pytest
import torch

from rl_bridge.errors import SlotsExhausted
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
