"""The CUDA driver through the real cuda-bindings, over a stand-in for libcuda on host memory.

Not collected by itself: `test_cuda.py` builds the stand-in and runs this file in a process that
finds it in libcuda's place.
"""

import ctypes
import importlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from rl_bridge.cuda.driver import CAPTURING, NOT_INITIALIZED
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES
from rl_bridge.cuda.libcuda import CUDADriver, ordinal_of
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DriverError
from rl_bridge.memory import vm
from rl_bridge.processes import close_fd
from tests.cuda.driver_suite import DriverSuite
from tests.helpers import forked, forking, open_fds

bindings: Any = importlib.import_module("cuda.bindings.driver")

UUIDS = ["10111213-1415-1617-1819-1a1b1c1d1e1f", "20212223-2425-2627-2829-2a2b2c2d2e2f"]
UNIT = 2 << 20
READ, READ_WRITE = 1, 3


class Recording:
    """The bindings, with a note of every call and of the context that it was made under."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.contexts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(bindings, name)
        if not name.startswith("cu"):
            return real

        def call(*arguments: Any) -> Any:
            if name not in {"cuCtxGetCurrent", "cuCtxSetCurrent"}:
                self.calls.append((name, *arguments))
                self.contexts.append(int(bindings.cuCtxGetCurrent()[1]))
            return real(*arguments)

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def record() -> Recording:
    return Recording()


@pytest.fixture
def driver(record: Recording) -> CUDADriver:
    made = CUDADriver(1, bindings=record)
    made.granularity()
    record.calls.clear()
    record.contexts.clear()
    return made


class TestCUDADriver(DriverSuite[CUDADriver]):
    def make(self) -> CUDADriver:
        return CUDADriver(1)

    def write(self, driver: CUDADriver, address: int, data: bytes) -> None:
        vm.store(address, data)

    def read(self, driver: CUDADriver, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


def test_each_call_is_made_once_with_what_the_reference_asks_for(
    driver: CUDADriver, record: Recording
) -> None:
    handle = driver.create(2 * UNIT)
    fd = driver.export_fd(handle)
    imported = driver.import_fd(fd, 2 * UNIT)
    close_fd(fd)
    at = driver.reserve(2 * UNIT)
    driver.map(at, 2 * UNIT, imported)
    driver.set_access(at, 2 * UNIT, writable=False)
    driver.fence()
    driver.unmap(at, 2 * UNIT)
    driver.free(at, 2 * UNIT)
    driver.release(imported)
    driver.release(handle)

    fd_type = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = record.calls[0][2]
    (access,) = record.calls[5][3]
    event = record.calls[7][2]
    drain = [
        ("cuEventCreate", 2),  # without timing
        ("cuCtxRecordEvent", driver._context, event),
        ("cuEventQuery", event),
        ("cuEventDestroy", event),
        ("cuCtxSynchronize",),
    ]
    assert record.calls == [
        ("cuMemCreate", 2 * UNIT, prop, 0),
        ("cuMemExportToShareableHandle", handle, fd_type, 0),
        ("cuMemImportFromShareableHandle", fd, fd_type),
        ("cuMemAddressReserve", 2 * UNIT, 0, 0, 0),
        ("cuMemMap", at, 2 * UNIT, 0, imported, 0),
        ("cuMemSetAccess", at, 2 * UNIT, [access], 1),
        *drain,
        ("cuMemUnmap", at, 2 * UNIT),
        ("cuMemAddressFree", at, 2 * UNIT),
        ("cuMemRelease", imported),
        ("cuMemRelease", handle),
    ]
    assert isinstance(prop, bindings.CUmemAllocationProp)
    assert (prop.type, prop.location.type, prop.location.id) == (1, 1, 1)
    assert prop.requestedHandleTypes == fd_type
    assert (access.location.type, access.location.id, int(access.flags)) == (1, 1, READ)


@pytest.mark.parametrize(("writable", "flags"), [(False, READ), (True, READ_WRITE)])
def test_access_is_as_asked_for(
    driver: CUDADriver, record: Recording, writable: bool, flags: int
) -> None:
    allocation, live = Allocation.create(driver, UNIT), AddressRange(driver, UNIT)
    live.map(allocation, writable=writable)
    (access,) = record.calls[-1][3]
    assert int(access.flags) == flags
    live.close()
    allocation.close()


def test_a_flip_is_a_drain_an_unmapping_a_mapping_and_access(
    driver: CUDADriver, record: Recording
) -> None:
    one, two = (Allocation.create(driver, UNIT) for _ in range(2))
    live = AddressRange(driver, UNIT)
    live.swap(one, writable=True)
    vm.store(live.address, b"one")
    record.calls.clear()
    assert live.swap(two, writable=True) is one
    last = ["cuCtxSynchronize", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"]
    assert record.names()[-len(last) :] == last
    assert ctypes.string_at(live.address, 3) == bytes(3)
    live.swap(one, writable=True)
    assert ctypes.string_at(live.address, 3) == b"one"
    for owner in (live, one, two):
        owner.close()


def test_a_query_of_the_mapping_keeps_no_reference(driver: CUDADriver, record: Recording) -> None:
    one, live = Allocation.create(driver, UNIT), AddressRange(driver, UNIT)
    live.map(one, writable=False)
    record.calls.clear()
    assert live.shows(one)
    # The first byte and the last one; each answer is a reference.
    asked = [("cuMemRetainAllocationHandle", live.address + at) for at in (0, UNIT - 1)]
    given_back = ("cuMemRelease", one.handle)
    assert record.calls == [asked[0], given_back, asked[1], given_back]
    live.close()
    handle = one.handle
    one.close()
    with pytest.raises(DriverError):  # the stand-in counts: nothing is left of it
        driver.export_fd(handle)


# ---- contexts, threads, captures, forks ---------------------------------------------------------


def under(context: int, act: Callable[[], object]) -> int:
    """Act on a thread with this context; the context that it has afterwards."""
    found: list[int] = []

    def run() -> None:
        bindings.cuCtxSetCurrent(context)
        act()
        found.append(int(bindings.cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


def test_every_thread_calls_under_the_devices_context_and_keeps_its_own(
    driver: CUDADriver, record: Recording
) -> None:
    own = int(bindings.cuDevicePrimaryCtxRetain(bindings.cuDeviceGet(1)[1])[1])
    others = int(bindings.cuDevicePrimaryCtxRetain(bindings.cuDeviceGet(0)[1])[1])
    for before in (0, own, others):
        assert under(before, driver.probe) == before
    assert set(record.contexts) == {own}
    assert own not in {0, others}


def test_a_failed_call_leaves_the_threads_context_too(driver: CUDADriver) -> None:
    def fail() -> None:
        with pytest.raises(DriverError):
            driver.create(1)

    assert under(0, fail) == 0


def test_nothing_is_called_while_a_graph_is_captured(record: Recording) -> None:
    capturing = False
    driver = CUDADriver(1, bindings=record, is_capturing=lambda _: capturing)
    handle, at = driver.create(UNIT), driver.reserve(UNIT)
    capturing = True
    record.calls.clear()
    acts: list[Callable[[], object]] = [
        lambda: driver.create(UNIT),
        lambda: driver.release(handle),
        lambda: driver.export_fd(handle),
        lambda: driver.import_fd(0, UNIT),
        lambda: driver.reserve(UNIT),
        lambda: driver.free(at, UNIT),
        lambda: driver.map(at, UNIT, handle),
        lambda: driver.set_access(at, UNIT, writable=True),
        lambda: driver.unmap(at, UNIT),
        lambda: driver.shows(at, UNIT, handle),
        driver.fence,
        driver.probe,
        lambda: driver.alloc(UNIT),
        lambda: driver.dealloc(at),
        lambda: driver.ipc_handle(at),
        lambda: driver.open_ipc(bytes(IPC_HANDLE_NBYTES)),
        lambda: driver.close_ipc(at),
    ]
    for act in acts:
        with pytest.raises(DriverError, match="captures a CUDA graph") as caught:
            act()
        assert caught.value.code == CAPTURING
    assert record.calls == []
    capturing = False
    driver.release(handle)
    driver.free(at, UNIT)


@forking
def test_a_forked_child_calls_nothing(driver: CUDADriver, record: Recording) -> None:
    record.calls.clear()

    def in_child() -> bool:
        try:
            driver.create(UNIT)
        except DriverError as error:
            return error.code == NOT_INITIALIZED and record.calls == []
        return False

    assert forked(in_child)


# ---- which device -------------------------------------------------------------------------------


def test_a_device_is_known_by_its_uuid() -> None:
    assert [CUDADriver(n).device.uuid for n in (0, 1)] == UUIDS
    assert [CUDADriver(n).device.ordinal for n in (0, 1)] == [0, 1]
    assert [ordinal_of(uuid) for uuid in UUIDS] == [0, 1]
    with pytest.raises(DriverError, match=r"is not visible to this process, which sees \['1011"):
        ordinal_of("00000000-0000-0000-0000-000000000000")


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_device_that_is_not_there_is_refused(ordinal: int) -> None:
    with pytest.raises(DriverError, match=f"device {ordinal} of this process") as caught:
        CUDADriver(ordinal)
    assert (caught.value.call, caught.value.code) == ("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")


@pytest.mark.parametrize(
    ("number", "name"), [(102, "VIRTUAL_MEMORY_MANAGEMENT"), (103, "POSIX_FILE_DESCRIPTOR")]
)
def test_a_probe_names_the_attribute_that_is_missing(number: int, name: str) -> None:
    class Lacking(Recording):
        def __getattr__(self, name: str) -> Any:
            if name != "cuDeviceGetAttribute":
                return super().__getattr__(name)
            return lambda which, _: (bindings.CUresult.CUDA_SUCCESS, int(int(which) != number))

    driver = CUDADriver(bindings=Lacking())
    with pytest.raises(DriverError, match=name) as caught:
        driver.probe()
    assert caught.value.code == "CUDA_ERROR_NOT_SUPPORTED"


def test_a_probe_believes_no_attribute() -> None:
    class Sandboxed(Recording):
        def __getattr__(self, name: str) -> Any:
            if name != "cuMemExportToShareableHandle":
                return super().__getattr__(name)
            return lambda *_: (bindings.CUresult.CUDA_ERROR_NOT_PERMITTED, 0)

    record = Sandboxed()
    with pytest.raises(DriverError, match="Let the sandbox or container pass") as caught:
        CUDADriver(bindings=record).probe()
    assert caught.value.call == "cuMemExportToShareableHandle"
    assert record.names()[-1] == "cuMemRelease"


def test_a_probe_maps_as_a_publisher_does_and_as_a_consumer(
    driver: CUDADriver, record: Recording
) -> None:
    driver.probe()
    granted = [int(call[3][0].flags) for call in record.calls if call[0] == "cuMemSetAccess"]
    assert granted == [READ_WRITE, READ]


def test_nothing_is_left_open(driver: CUDADriver) -> None:
    before = open_fds()
    with ExitStack() as stack:
        allocation = Allocation.create(driver, UNIT)
        stack.callback(allocation.close)
        received = Allocation.received(driver, driver.export_fd(allocation.handle), UNIT)
        stack.callback(received.close)
        live = AddressRange(driver, UNIT)
        stack.callback(live.close)
        live.swap(received, writable=False)
    assert open_fds() == before
