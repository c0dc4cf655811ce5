"""A drain has a deadline: the CUDA driver over the stand-in for libcuda, with work on the device.

Run by `test_cuda.py`, as `on_stand_in.py` is.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_bridge.cuda.libcuda import CUDADriver
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DeadlineExceeded, DriverError
from tests.cuda.on_stand_in import UNIT, Recording, bindings


@pytest.fixture
def record() -> Recording:
    return Recording()


@pytest.fixture
def work() -> Iterator[Callable[[bool], None]]:
    """Gives device 1 something to do, which ends when it is told to, and not before."""
    library = ctypes.CDLL("libcuda.so.1")
    yield lambda is_there: library.stand_in_work(1, int(is_there))
    library.stand_in_work(1, 0)
    assert library.stand_in_events() == 0


def test_a_drain_waits_for_the_device(record: Recording, work: Callable[[bool], None]) -> None:
    driver = CUDADriver(1, bindings=record, drain_timeout_s=60)
    asked = threading.Event()
    query = bindings.cuEventQuery

    def asking(event: Any) -> Any:
        asked.set()
        return query(event)

    record.cuEventQuery = asking  # type: ignore[attr-defined]
    work(True)
    over = threading.Event()

    def drain() -> None:
        driver.fence()
        over.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert asked.wait(30)
    assert not over.is_set()
    work(False)
    thread.join(30)
    assert over.is_set()


def test_a_drain_that_does_not_end_is_given_up_and_nothing_is_unmapped(
    record: Recording, work: Callable[[bool], None]
) -> None:
    driver = CUDADriver(1, bindings=record, drain_timeout_s=0.01)
    one, two = (Allocation.create(driver, UNIT) for _ in range(2))
    live = AddressRange(driver, UNIT)
    live.swap(one, writable=True)
    work(True)
    record.calls.clear()
    acts: list[Callable[[], object]] = [
        lambda: live.swap(two, writable=True),
        live.unmap,
        live.close,
    ]
    for act in acts:
        with pytest.raises(DeadlineExceeded, match=r"GPU 2021.* within 0.01 s .*nothing was unm"):
            act()
    assert "cuMemUnmap" not in record.names()
    assert live.shows(one)
    work(False)
    assert live.swap(two, writable=True) is one
    for owner in (live, one, two):
        owner.close()


def test_a_range_that_dies_while_the_device_is_busy_is_given_back_later(
    record: Recording, work: Callable[[bool], None]
) -> None:
    driver = CUDADriver(1, bindings=record, drain_timeout_s=0.01)
    one, live = Allocation.create(driver, UNIT), AddressRange(driver, UNIT)
    live.swap(one, writable=True)
    work(True)
    record.calls.clear()
    del live
    gc.collect()
    assert "cuMemUnmap" not in record.names()
    work(False)
    Allocation.create(driver, UNIT).close()  # whatever is made next
    assert record.names().count("cuMemUnmap") == 1
    one.close()


def test_a_driver_without_events_for_a_context_drains_all_the_same(
    record: Recording, work: Callable[[bool], None]
) -> None:
    def missing(*_: object) -> object:
        raise RuntimeError('Function "cuCtxRecordEvent" not found')

    record.cuCtxRecordEvent = missing  # type: ignore[attr-defined]
    work(False)
    driver = CUDADriver(1, bindings=record)
    for expected in (
        ["cuEventCreate", "cuEventDestroy", "cuCtxSynchronize"],
        ["cuCtxSynchronize"],
    ):
        record.calls.clear()
        driver.fence()
        assert record.names() == expected


def test_the_drain_reports_that_the_device_failed(record: Recording) -> None:
    driver = CUDADriver(1, bindings=record)
    lost = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    record.cuEventQuery = lambda _: (lost,)  # type: ignore[attr-defined]
    with pytest.raises(DriverError, match="an earlier kernel failed") as caught:
        driver.fence()
    assert (caught.value.call, caught.value.code) == ("cuEventQuery", lost.name)
