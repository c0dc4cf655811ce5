"""Memory that may be taken back, and memory that somebody locked."""

import ctypes

import pytest
import torch

from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.memory.vm import spare_pages


def test_locked_memory_is_kept_and_used_again() -> None:
    model = torch.nn.Linear(4096, 1, bias=False)
    snapshot = Snapshot(model)
    pin = snapshot._pin
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(pin.address), ctypes.c_size_t(pin.nbytes)):
        pytest.skip("this process may lock no memory")  # pragma: no cover - in some containers
    room = snapshot.give_room()
    expected = model.weight.detach().clone()
    again = Snapshot(model, room=room)
    torch.nn.init.zeros_(model.weight)
    again.restore()
    assert torch.equal(model.weight, expected)
    assert again.give_room() is room


def test_what_is_not_mapped_cannot_be_spared() -> None:
    top_of_addresses = (1 << 47) - (1 << 20)
    with pytest.raises(OSError, match=r"madvise\(FREE\) of 4096 bytes"):
        spare_pages(top_of_addresses, 4096)
