"""The memory of a snapshot is used again for the next one; the kernel may have it in between."""

from pathlib import Path

import torch

from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.memory.views import Pin

ELEMENTS = 1 << 20


def engine(elements: int = ELEMENTS) -> torch.nn.Linear:
    model = torch.nn.Linear(elements, 1, bias=False)
    torch.nn.init.normal_(model.weight)
    return model


def told(room: Pin) -> dict[str, list[str]]:
    """What the kernel tells of the mapping that this memory is in."""
    inside = False
    facts: dict[str, list[str]] = {}
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= room.address < end
        elif inside:
            facts[first] = rest
    return facts


def kept_nbytes(room: Pin) -> int:
    """What the kernel may not take of it."""
    facts = told(room)
    return (int(facts["Rss:"][0]) - int(facts["LazyFree:"][0])) << 10


def test_a_snapshot_in_the_room_of_another_brings_its_own_bytes_back() -> None:
    model = engine()
    room = Snapshot(model).give_room()
    torch.nn.init.normal_(model.weight)
    expected = model.weight.detach().clone()
    second = Snapshot(model, room=room)
    assert second.give_room() is room
    second = Snapshot(model, room=room)
    torch.nn.init.zeros_(model.weight)
    second.restore()
    assert torch.equal(model.weight, expected)


def test_room_that_was_given_is_the_kernels_until_it_is_used_again() -> None:
    model = engine()
    snapshot = Snapshot(model)
    pin = snapshot._pin
    used = kept_nbytes(pin)
    room = snapshot.give_room()
    given = kept_nbytes(room)
    Snapshot(model, room=room)
    # Not to the page: the kernel goes about it in batches.
    assert used - given > room.nbytes * 3 // 4
    assert kept_nbytes(room) - given > room.nbytes * 3 // 4


def test_room_of_another_size_is_not_used() -> None:
    room = Snapshot(engine(ELEMENTS // 2)).give_room()
    model = engine()
    expected = model.weight.detach().clone()
    snapshot = Snapshot(model, room=room)
    torch.nn.init.zeros_(model.weight)
    snapshot.restore()
    assert torch.equal(model.weight, expected)
    assert snapshot.give_room() is not room
