"""The ring of slots: reuse, growth by one for each laggard, a limit that names the holders."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_bridge.errors import SegmentError, SlotsExhausted, WeightBridgeError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, open_segment
from rl_bridge.memory.slots import Slot, SlotRing, Stamp, read_stamp, slot_segment_nbytes
from rl_bridge.processes import close_fd
from tests.helpers import open_fds
from tests.memory.slots_rig import SIZE, new_ring, uid, write

MakeRing = Callable[..., SlotRing]


@pytest.fixture
def make_ring() -> Iterator[MakeRing]:
    rings = []

    def make(limit: int = 3, holders: dict[str, list[str]] | None = None) -> SlotRing:
        ring = new_ring(limit, holders)
        rings.append(ring)
        return ring

    yield make
    for ring in rings:
        ring.close()


def read_lease(slot: Slot) -> int:
    fd = open_segment(slot.segment.ref)
    assert leases.try_shared(fd)
    return fd


def stamp_of(slot: Slot) -> Stamp:
    return read_stamp(slot.segment.fd, slot.segment.ref)


# ---- stamps -------------------------------------------------------------------------------------


def test_a_stamp_says_which_update_a_slot_holds(make_ring: MakeRing) -> None:
    ring = make_ring()
    slot = ring.acquire(SIZE - 5)
    assert stamp_of(slot) == Stamp("0" * 32, 1, 0)
    ring.publish(slot, uid(7), SIZE - 5)
    assert stamp_of(slot) == Stamp(uid(7), 1, SIZE - 5)
    ring.release(uid(7))
    assert ring.acquire(SIZE) is slot
    assert stamp_of(slot) == Stamp("0" * 32, 2, 0)


def test_a_stamp_of_the_form_that_had_no_header_is_refused(make_ring: MakeRing) -> None:
    slot = write(make_ring(), 1)
    vm.store(slot.segment.address + slot.capacity, b"rl_brdg1")
    with pytest.raises(SegmentError, match="holds no stamp"):
        stamp_of(slot)


def test_a_segment_without_a_stamp_is_no_slot() -> None:
    for nbytes in (vm.PAGE, 2 * vm.PAGE):
        segment = OwnedSegment.make("rl_bridge-test", nbytes)
        with pytest.raises(SegmentError, match="holds no stamp"):
            read_stamp(segment.fd, segment.ref)
        segment.close()


# ---- reuse --------------------------------------------------------------------------------------


def test_an_abandoned_slot_holds_nothing_and_is_used_again(make_ring: MakeRing) -> None:
    ring = make_ring(limit=1)
    slot = ring.acquire(SIZE)
    slot.layout_digest = "half written"
    ring.abandon(slot)
    assert stamp_of(slot).update_id == "0" * 32
    assert not slot.layout_digest
    assert not leases.is_held(slot.segment.fd)
    assert write(ring, 1) is slot


def test_the_slot_that_was_used_last_is_taken_first(make_ring: MakeRing) -> None:
    ring = make_ring()
    first, second = write(ring, 1), write(ring, 2)
    ring.release(uid(1))
    ring.release(uid(2))
    assert write(ring, 3) is second
    assert first.update_id is None


# ---- sizes --------------------------------------------------------------------------------------


def test_a_larger_update_replaces_slots_that_are_too_small(make_ring: MakeRing) -> None:
    ring = make_ring()
    for number in (1, 2):
        write(ring, number)
        ring.release(uid(number))
    large = write(ring, 3, nbytes=4 * SIZE)
    assert large.capacity == 4 * SIZE
    assert len(ring) == 1


@pytest.mark.parametrize(("pages", "capacity"), [(1, 1), (20, 20), (60, 100)])
def test_a_smaller_update_reuses_a_slot_unless_that_is_more_than_twice_as_large(
    pages: int, capacity: int, make_ring: MakeRing
) -> None:
    ring = make_ring()
    write(ring, 1, nbytes=100 * vm.PAGE)
    ring.release(uid(1))
    assert write(ring, 2, nbytes=pages * vm.PAGE).capacity == capacity * vm.PAGE
    assert len(ring) == 1


# ---- laggards -----------------------------------------------------------------------------------


def test_each_laggard_costs_one_slot_and_surplus_is_given_back(make_ring: MakeRing) -> None:
    ring = make_ring(limit=5)
    held = []
    for number in range(1, 5):
        slot = write(ring, number)
        if number <= 3:
            held.append(read_lease(slot))
        ring.release(uid(number))
    assert len(ring) == 4
    for fd in held:
        close_fd(fd)
    for number in range(5, 20):
        write(ring, number)
        ring.release(uid(number - 1))
    assert len(ring) <= 2


def test_the_limit_ends_in_an_error_that_names_the_holders(make_ring: MakeRing) -> None:
    ring = make_ring(limit=3, holders={uid(1): ["worker 'rollout' rank 3 (pid 42, imported)"]})
    held = [read_lease(write(ring, number)) for number in (1, 2)]
    for number in (1, 2):
        ring.release(uid(number))
    write(ring, 3)
    with pytest.raises(SlotsExhausted) as caught:
        ring.acquire(SIZE)
    text = str(caught.value)
    assert "all 3 slots are held, so nothing can be published" in text
    assert f"update {uid(1)}: still read by worker 'rollout' rank 3 (pid 42, imported)" in text
    assert f"update {uid(2)}: still read by a reader that left no record" in text
    assert f"update {uid(3)}: the publisher has not released it (call release)" in text
    assert "raise max_slots" in text
    for fd in held:
        close_fd(fd)
    assert write(ring, 4) is not None


@pytest.mark.parametrize(
    ("is_released", "said"),
    [
        (False, r"the publisher has not released it \(call release\), worker 'r' \(pid 9\)"),
        (True, r"released, worker 'r' \(pid 9\)"),
    ],
)
def test_an_update_that_keeps_its_slot_names_its_readers_too(is_released: bool, said: str) -> None:
    ring = SlotRing(
        lambda nbytes: Slot(OwnedSegment.make("released", slot_segment_nbytes(nbytes))),
        limit=1,
        name_holders=lambda _: ["worker 'r' (pid 9)"],
        is_released=lambda _: is_released,
    )
    write(ring, 1)
    with pytest.raises(SlotsExhausted, match=f"{uid(1)}: {said}"):
        ring.acquire(SIZE)
    ring.close()


def test_a_new_slot_that_somebody_locked_first_is_refused(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.slots.leases.try_exclusive", lambda *_: False)
    with pytest.raises(WeightBridgeError, match="locked by somebody else"):
        make_ring().acquire(SIZE)
    assert open_fds() == before


def test_a_slot_whose_file_was_cut_off_is_given_up_instead_of_written(tmp_path: Path) -> None:
    names = iter(f"rlb-000000000000-{number}.seg" for number in range(9))
    ring = SlotRing(
        lambda nbytes: Slot(
            OwnedSegment.make(next(names), slot_segment_nbytes(nbytes), directory=tmp_path)
        ),
        limit=2,
        name_holders=lambda _: [],
    )
    slot = write(ring, 1)
    ring.release(uid(1))
    os.truncate(tmp_path / "rlb-000000000000-0.seg", 0)
    other = write(ring, 2)
    assert other is not slot
    vm.store(other.address, bytes(SIZE))
    assert len(ring) == 1
    ring.close()
    assert list(tmp_path.iterdir()) == []
