"""The books of a slot's pins: no living one is ever lost, and no dead one is kept."""

import pytest
import torch

from rl_bridge.errors import SlotsExhausted
from tests.memory.slots_rig import SIZE, new_ring, pin_of, tensor_of, uid, view_of, write


def test_a_tensor_that_dies_while_the_pins_are_looked_at_takes_no_other_ones_lease() -> None:
    ring = new_ring(limit=1)
    view = view_of(write(ring, 1))
    dying: list[torch.Tensor] = [tensor_of(pin_of(view, 1))]
    held = tensor_of(pin_of(view, 1))
    # Looked at before the others, and dead itself. The tensor that dies meanwhile, as one that a
    # collection finds, looks at all of them as well, inside of this look.
    view._pins.insert(0, lambda: dying.clear())  # type: ignore[arg-type]  # noqa: PLW0108 - it returns None
    assert view.is_pinned
    assert dying == []
    view.settle()
    ring.release(uid(1))
    with pytest.raises(SlotsExhausted):
        write(ring, 2)
    assert held.tolist() == [1] * SIZE
    view.retire()
    ring.close()


def test_pins_of_tensors_that_died_are_not_kept() -> None:
    ring = new_ring(limit=1)
    view = view_of(write(ring, 1))
    held = tensor_of(pin_of(view, 1))
    for _ in range(20):
        tensor_of(pin_of(view, 1))
    assert len(view._pins) <= 3
    assert held.tolist() == [1] * SIZE
    view.retire()
    ring.close()
