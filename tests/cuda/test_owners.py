"""Owners of device memory: one call undoes each; exchanges leave the old bytes or the new ones."""

import gc
import os

import pytest

from rl_bridge.cuda.driver import CAPTURING
from rl_bridge.cuda.host import HostDriver, Live
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DriverError, SegmentError, TornEngine
from rl_bridge.testing.leaks import assert_nothing_leaks
from tests.cuda.rig import NBYTES, NOTHING, SMALL, Scripted, filled, peek, poke
from tests.helpers import forked, forking, open_fds

# ---- memory and descriptors ---------------------------------------------------------------------


def test_an_allocation_is_released_once(driver: Scripted) -> None:
    one = Allocation.create(driver, 1)
    assert one.nbytes == SMALL
    assert driver.live() == Live(1, 0, 0)
    one.close()
    assert driver.live() == NOTHING
    one.close()
    assert driver.calls == ["create", "release"]
    assert one.is_closed
    for act in (lambda: one.handle, one.export):
        with pytest.raises(SegmentError, match="was closed already"):
            act()


def test_an_allocation_that_dies_is_released(driver: Scripted) -> None:
    one = Allocation.create(driver, NBYTES)
    del one
    assert driver.live() == NOTHING


def test_a_release_that_is_refused_can_be_tried_again(driver: Scripted) -> None:
    one = Allocation.create(driver, NBYTES)
    driver.fail("release")
    with pytest.raises(DriverError):
        one.close()
    assert driver.live() == Live(1, 0, 0)
    one.close()
    assert driver.live() == NOTHING


def test_received_memory_is_the_same_and_the_descriptor_is_gone(driver: Scripted) -> None:
    one = filled(driver, 3)
    before = open_fds()
    two = Allocation.received(driver, driver.export_fd(one.handle), NBYTES)
    one.close()
    assert len(open_fds()) == len(before)
    window = AddressRange(driver, NBYTES)
    window.map(two, writable=False)
    assert peek(window.address) == {3}
    window.close()
    two.close()


def test_a_refused_import_closes_the_descriptor_too(driver: Scripted) -> None:
    fd = os.memfd_create("stranger")
    with pytest.raises(DriverError):
        Allocation.received(driver, fd, NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_is_closed_once(driver: Scripted) -> None:
    one = Allocation.create(driver, NBYTES)
    descriptor = one.export()
    fd = descriptor.fd
    descriptor.close()
    reused = os.open("/dev/null", os.O_RDONLY)
    assert reused == fd
    descriptor.close()
    del descriptor
    os.fstat(reused)
    os.close(reused)
    one.close()


def test_a_closed_descriptor_is_refused_and_a_dropped_one_is_closed(driver: Scripted) -> None:
    one = Allocation.create(driver, NBYTES)
    first, second = one.export(), one.export()
    fd = second.fd
    del second
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    first.close()
    with pytest.raises(SegmentError, match="Export the allocation again"):
        _ = first.fd
    one.close()


# ---- ranges -------------------------------------------------------------------------------------


def test_a_range_shows_one_allocation_after_another(driver: Scripted) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES - 5)
    address = live.address
    assert (live.nbytes, live.content) == (NBYTES, None)
    driver.calls.clear()
    assert live.swap(one, writable=True) is None
    assert driver.calls == ["fence", "map", "set_access"]
    assert peek(address) == {1}
    driver.calls.clear()
    assert live.swap(two, writable=True) is one
    assert driver.calls == ["fence", "unmap", "map", "set_access"]
    assert peek(address) == {2}
    assert live.content is two
    poke(address, 9, 1)
    assert live.swap(one, writable=False) is two
    assert peek(address) == {1}
    assert live.address == address
    live.swap(two, writable=False)
    assert peek(address) == {2, 9}
    live.close()


def test_swapping_in_the_content_keeps_it(driver: Scripted) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=False)
    assert live.swap(one, writable=True) is one
    poke(live.address, 4)
    assert peek(live.address) == {4}
    one.close()
    assert peek(live.address) == {4}
    live.close()


def test_a_close_drains_unmaps_and_frees_in_this_order(driver: Scripted) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    live.map(one, writable=True)
    one.close()
    driver.calls.clear()
    live.close()
    assert driver.calls == ["fence", "unmap", "release", "free"]
    live.close()
    assert len(driver.calls) == 4
    with pytest.raises(SegmentError, match=r"the range .* was closed"):
        live.map(filled(driver, 1), writable=True)


def test_a_range_that_dies_gives_everything_back(driver: Scripted) -> None:
    live = AddressRange(driver, NBYTES)
    live.map(filled(driver, 1), writable=True)
    del live
    assert driver.live() == NOTHING
    assert driver.calls[-4:] == ["fence", "unmap", "release", "free"]


@pytest.mark.parametrize("fence", [True, False])
def test_an_unmapped_allocation_can_be_mapped_again(driver: Scripted, fence: bool) -> None:
    one = filled(driver, 1)
    window = AddressRange(driver, NBYTES)
    window.map(one, writable=False)
    driver.calls.clear()
    assert window.unmap(fence=fence) is one
    assert driver.calls == ["fence", "unmap"][not fence :]
    assert window.content is None
    assert window.unmap() is None
    window.map(one, writable=False)
    assert peek(window.address) == {1}
    window.close()


def test_an_allocation_closed_while_mapped_is_released_when_it_is_unmapped(
    driver: Scripted,
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    one.close()
    assert peek(live.address) == {1}
    driver.fail("map")
    with pytest.raises(DriverError):
        live.swap(two, writable=True)
    assert peek(live.address) == {1}
    driver.calls.clear()
    live.swap(two, writable=True)
    assert driver.calls == ["fence", "unmap", "map", "set_access", "release"]
    live.close()


def test_a_release_that_fails_behind_a_swap_does_not_fail_the_swap(
    driver: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    one.close()
    driver.fail("release")
    assert live.swap(two, writable=True) is one
    assert "could not be given back" in caplog.text
    one.close()
    live.close()


def test_one_allocation_lies_in_two_ranges(driver: Scripted) -> None:
    one = Allocation.create(driver, NBYTES)
    here, there = AddressRange(driver, NBYTES), AddressRange(driver, NBYTES)
    here.map(one, writable=True)
    there.map(one, writable=False)
    poke(here.address, 6)
    one.close()
    here.close()
    assert peek(there.address) == {6}
    assert "release" not in driver.calls
    there.close()
    assert driver.calls[-2:] == ["release", "free"]


def test_an_allocation_that_does_not_fit_is_refused_before_any_call(driver: Scripted) -> None:
    live = AddressRange(driver, NBYTES)
    one = filled(driver, 1)
    live.swap(one, writable=True)
    closed = filled(driver, 2)
    closed.close()
    others = HostDriver(granularity=SMALL)
    foreign = Allocation.create(others, NBYTES)
    small = Allocation.create(driver, SMALL)
    driver.calls.clear()
    for stranger in (foreign, small, closed):
        with pytest.raises(SegmentError, match=r"does not fit|was closed"):
            live.swap(stranger, writable=True)
    with pytest.raises(SegmentError, match="Use swap, or unmap it first"):
        live.map(one, writable=True)
    assert driver.calls == []
    assert peek(live.address) == {1}
    foreign.close()
    live.close()


# ---- refusals half-way --------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fence", "unmap", "map", "set_access"])
def test_a_swap_that_is_refused_leaves_the_old_bytes(driver: Scripted, failing: str) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    poke(live.address, 7, 1)
    driver.fail(failing)
    with pytest.raises(DriverError, match=f"{failing} failed with CUDA_ERROR_OUT_OF_MEMORY"):
        live.swap(two, writable=False)
    assert live.content is one
    assert peek(live.address) == {7, 1}
    poke(live.address, 8, 1)  # still writable
    assert live.swap(two, writable=False) is one
    assert peek(live.address) == {2}
    live.close()


@pytest.mark.parametrize("failing", ["map", "set_access"])
def test_a_mapping_that_is_refused_leaves_an_empty_range(driver: Scripted, failing: str) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    driver.fail(failing)
    with pytest.raises(DriverError, match=failing):
        live.map(one, writable=True)
    assert live.content is None
    assert driver.live().mappings == 0
    live.map(one, writable=True)
    assert peek(live.address) == {1}
    live.close()


@pytest.mark.parametrize(
    "failing",
    [
        ("map", "map"),
        ("map", "set_access"),
        ("set_access", "unmap"),
        ("set_access", "map"),
        ("set_access", "set_access"),
    ],
    ids="-".join,
)
def test_a_way_back_that_is_refused_too_is_torn_and_can_be_mended(
    driver: Scripted, failing: tuple[str, str]
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    one.close()  # only the range keeps it
    driver.fail(*failing)
    with pytest.raises(TornEngine, match="and so did the way back") as caught:
        live.swap(two, writable=True)
    assert isinstance(caught.value.__cause__, DriverError)
    assert live.content is None
    mender = live.displaced
    assert mender is one
    live.swap(two, writable=True)
    assert peek(live.address) == {2}
    assert live.displaced is None
    assert driver.calls[-1] == "release", "nobody needs the old one any more"
    live.close()


def test_displaced_content_can_be_swapped_in_again(driver: Scripted) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    driver.fail("map", "map")
    with pytest.raises(TornEngine):
        live.swap(two, writable=True)
    assert live.displaced is one
    assert live.swap(live.displaced, writable=True) is None
    assert peek(live.address) == {1}
    live.close()


def test_a_torn_range_is_closed_like_any_other(driver: Scripted) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    driver.fail("set_access", "unmap")
    with pytest.raises(TornEngine):
        live.swap(two, writable=True)
    one.close()
    two.close()
    live.close()
    assert driver.live() == NOTHING


@pytest.mark.parametrize("failing", ["fence", "unmap", "free"])
def test_a_close_that_is_refused_can_be_tried_again(driver: Scripted, failing: str) -> None:
    live = AddressRange(driver, NBYTES)
    live.map(filled(driver, 1), writable=True)
    driver.fail(failing)
    with pytest.raises(DriverError, match=failing):
        live.close()
    live.close()
    assert driver.live() == NOTHING


def test_an_unmapping_that_is_refused_changes_nothing(driver: Scripted) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    live.map(one, writable=True)
    driver.fail("unmap")
    with pytest.raises(DriverError):
        live.unmap()
    assert live.content is one
    assert peek(live.address) == {1}
    live.close()


# ---- a second Ctrl-C, which is not deferred ----------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_interrupt_at_any_call_of_a_swap_leaves_the_old_bytes(
    driver: Scripted, number: int
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    poke(live.address, 7, 1)
    driver.interrupt(number)
    with pytest.raises(KeyboardInterrupt):
        live.swap(two, writable=True)
    driver.calm()
    assert live.content is one
    assert peek(live.address) == {7, 1}
    assert live.swap(two, writable=True) is one
    assert peek(live.address) == {2}
    live.close()


# ---- finalizers and forks -----------------------------------------------------------------------


def test_a_range_that_dies_while_a_graph_is_captured_is_given_back_later(driver: Scripted) -> None:
    live = AddressRange(driver, NBYTES)
    one = filled(driver, 1)
    live.map(one, writable=True)
    driver.fail("fence", code=CAPTURING)
    del live
    assert driver.live() == Live(1, 1, 1)
    driver.calm()
    Allocation.create(driver, NBYTES).close()
    assert driver.live() == Live(1, 0, 0)
    one.close()


def test_a_finalizer_logs_memory_that_it_cannot_give_back(
    driver: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    one = Allocation.create(driver, NBYTES)
    handle = one.handle
    driver.fail("release", code="CUDA_ERROR_ILLEGAL_ADDRESS")
    del one
    assert "lost: release failed with CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text
    HostDriver.release(driver, handle)


@forking
def test_a_forked_child_gives_nothing_back(driver: Scripted) -> None:
    one, spare = filled(driver, 1), Allocation.create(driver, NBYTES)
    descriptor = one.export()
    live = AddressRange(driver, NBYTES)
    live.map(one, writable=True)
    number = descriptor.fd
    driver.calls.clear()

    def in_child() -> bool:
        nonlocal live, one, spare, descriptor
        own: list[int] = []
        while not own or own[-1] < number:  # the number belongs to the child's own file now
            own.append(os.open("/dev/null", os.O_RDONLY))
        for owner in (spare, live, one, descriptor):
            owner.close()
        del live, one, spare, descriptor, owner
        gc.collect()
        os.fstat(number)
        return driver.calls == []

    assert forked(in_child)
    assert peek(live.address) == {1}
    assert driver.calls == []
    os.fstat(descriptor.fd)
    live.close()
    one.close()
    spare.close()
    descriptor.close()


def test_steady_exchanges_grow_nothing() -> None:
    driver = HostDriver(granularity=SMALL)
    live = AddressRange(driver, NBYTES)
    version = filled(driver, 1)

    def cycle() -> None:
        fresh = Allocation.received(driver, driver.export_fd(version.handle), NBYTES)
        window = AddressRange(driver, NBYTES)
        window.map(fresh, writable=False)
        window.unmap(fence=False)
        window.close()
        old = live.swap(fresh, writable=True)
        if old is not None:
            old.close()

    assert_nothing_leaks(cycle, num_cycles=1000)
    live.close()
    version.close()
    assert driver.live() == NOTHING
