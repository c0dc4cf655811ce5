"""Exchanges refused or interrupted half-way: the old bytes, the new ones, or a way to mend."""

import itertools
from types import FrameType
from typing import Any

import pytest

from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DriverError, TornEngine
from tests.cuda.rig import NBYTES, NOTHING, Scripted, filled, peek, poke
from tests.helpers import tracing

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


def test_what_was_displaced_is_swapped_in_again(driver: Scripted) -> None:
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


# ---- interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_interrupt_at_any_call_of_a_swap_leaves_one_of_both(
    driver: Scripted, number: int, behind: bool
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    poke(live.address, 7, 1)
    driver.interrupt(number, behind=behind)
    with pytest.raises(KeyboardInterrupt):
        live.swap(two, writable=True)
    driver.calm()
    assert live.content is one
    assert peek(live.address) == {7, 1}
    assert live.swap(two, writable=True) is one
    assert peek(live.address) == {2}
    live.close()


@pytest.mark.parametrize("then", ["look", "swap", "close", "die"])
def test_a_second_interrupt_on_the_way_back_is_cleaned_up_too(driver: Scripted, then: str) -> None:
    cut_twice = 0
    for number, second, behind in itertools.product(range(1, 5), range(1, 8), (False, True)):
        one, two = filled(driver, 1), filled(driver, 2)
        live = AddressRange(driver, NBYTES)
        live.swap(one, writable=True)
        one.close()
        driver.interrupt(number, number + second, behind=behind)
        with pytest.raises(KeyboardInterrupt):
            live.swap(two, writable=True)
        cut_twice += len(driver.calls) == number + second
        driver.calm()
        if then == "look":
            assert live.content is one
            assert peek(live.address) == {1}
        if then == "swap":
            assert live.swap(two, writable=True) is one
            assert peek(live.address) == {2}
        if then != "die":
            live.close()
        del live
        two.close()
        assert driver.live() == NOTHING, (number, second, behind)
    assert cut_twice > 10


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_in_a_mapping_leaves_an_empty_range(
    driver: Scripted, number: int, behind: bool
) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    driver.interrupt(number, behind=behind)
    with pytest.raises(KeyboardInterrupt):
        live.map(one, writable=True)
    driver.calm()
    assert live.content is None
    assert driver.live().mappings == 0
    live.map(one, writable=True)
    assert peek(live.address) == {1}
    live.close()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_in_an_unmapping_leaves_what_was_there(
    driver: Scripted, number: int, behind: bool
) -> None:
    one = filled(driver, 1)
    live = AddressRange(driver, NBYTES)
    live.map(one, writable=True)
    driver.interrupt(number, behind=behind)
    with pytest.raises(KeyboardInterrupt):
        live.unmap()
    driver.calm()
    assert live.content is one
    assert peek(live.address) == {1}
    live.close()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_before_any_call_of_a_close_leaves_it_to_be_closed(
    driver: Scripted, number: int
) -> None:
    live = AddressRange(driver, NBYTES)
    one = filled(driver, 1)
    live.map(one, writable=True)
    one.close()
    driver.interrupt(number, behind=True)
    with pytest.raises(KeyboardInterrupt):
        live.close()
    driver.calm()
    live.close()
    assert driver.live() == NOTHING


def test_what_may_have_been_given_back_is_not_given_back_twice(driver: Scripted) -> None:
    live = AddressRange(driver, NBYTES)
    one = Allocation.create(driver, NBYTES)
    for owner in (live, one):
        driver.interrupt(1, behind=True)
        with pytest.raises(KeyboardInterrupt):
            owner.close()
        driver.calm()
        driver.calls.clear()
        owner.close()
        assert driver.calls == []


def test_an_interrupt_whose_way_back_is_refused_says_so_and_can_be_mended(
    driver: Scripted,
) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    driver.fail("map")
    refuse = driver.before

    def both(name: str, number: int) -> None:
        if name == "map" and driver.calls.count("map") == 1:
            raise KeyboardInterrupt
        refuse(name, number)

    driver.calls.clear()
    driver.before = both
    with pytest.raises(KeyboardInterrupt) as caught:
        live.swap(two, writable=True)
    assert "cannot be put back" in caught.value.__notes__[0]
    assert live.content is None
    assert live.displaced is one
    live.swap(one, writable=True)
    assert peek(live.address) == {1}
    live.close()


class _InterruptAt:
    """Raises KeyboardInterrupt before the `number`-th instruction of the owners' own code."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("cuda/owners.py",)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return self


def _swap_until(number: int, live: AddressRange, new: Allocation) -> bool:
    """Swap, interrupted at an instruction; False if the swap ended before."""
    try:
        with tracing(_InterruptAt(number)):
            live.swap(new, writable=True)
    except KeyboardInterrupt:
        return True
    return False


def test_an_interrupt_at_any_instruction_of_a_swap_can_be_undone(driver: Scripted) -> None:
    one, two = filled(driver, 1), filled(driver, 2)
    live = AddressRange(driver, NBYTES)
    live.swap(one, writable=True)
    seen, number = set(), 0
    while _swap_until(number, live, two):
        content = live.content
        seen.add(content)
        assert content is not None
        assert peek(live.address) == {1 if content is one else 2}, number
        if content is two:
            live.swap(one, writable=True)
        number += 1
    assert seen == {one, two}, "interrupts came before the exchange and behind it"
    assert number > 100
    live.close()
    one.close()
    two.close()
    assert driver.live() == NOTHING, "an interrupt left a reference"
