"""Exchanges that are refused half-way: the old bytes, the new ones, or a way to mend."""

import pytest

from rl_bridge.cuda.owners import AddressRange
from rl_bridge.errors import DriverError, TornEngine
from tests.cuda.rig import NBYTES, NOTHING, Scripted, filled, peek, poke

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
