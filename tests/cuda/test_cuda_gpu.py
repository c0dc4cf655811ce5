"""The CUDA driver on a GPU: its rules, the flip, descriptors between processes, no growth."""

import ctypes
from typing import Any

import pytest
import torch

from rl_bridge.cuda.broker import Broker, BrokerRef, fetch_fd
from rl_bridge.cuda.libcuda import CUDADriver
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DeadlineExceeded, DriverError
from rl_bridge.testing.processes import Child
from tests.cuda.driver_suite import DriverSuite
from tests.helpers import open_fds

pytestmark = pytest.mark.gpu


def make_driver() -> CUDADriver:
    """A driver that works, or a skip with the reason."""
    try:
        driver = CUDADriver()
        driver.probe()
    except DriverError as error:
        pytest.skip(error.cause)
    return driver


def write(driver: CUDADriver, address: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    driver._call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data))


def read(driver: CUDADriver, address: int, nbytes: int) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    driver._call("cuMemcpyDtoH", ctypes.addressof(target), address, nbytes)
    return target.raw


class TestCUDADriver(DriverSuite[CUDADriver]):
    def make(self) -> CUDADriver:
        return make_driver()

    def write(self, driver: CUDADriver, address: int, data: bytes) -> None:
        write(driver, address, data)

    def read(self, driver: CUDADriver, address: int, nbytes: int) -> bytes:
        return read(driver, address, nbytes)


@pytest.fixture
def driver() -> CUDADriver:
    return make_driver()


def filled(driver: CUDADriver, data: bytes) -> Allocation:
    allocation, window = Allocation.create(driver, 1), AddressRange(driver, 1)
    window.map(allocation, writable=True)
    write(driver, window.address, data)
    window.close()
    return allocation


def test_the_uuid_is_the_one_that_torch_prints(driver: CUDADriver) -> None:
    assert driver.device.uuid == str(torch.cuda.get_device_properties(0).uuid)


def test_a_flip_and_its_undo_keep_the_address(driver: CUDADriver) -> None:
    one, two = filled(driver, b"one"), filled(driver, b"two")
    live = AddressRange(driver, 1)
    live.swap(one, writable=True)
    assert live.swap(two, writable=False) is one
    assert read(driver, live.address, 3) == b"two"
    live.swap(one, writable=True)
    assert read(driver, live.address, 3) == b"one"
    for owner in (live, one, two):
        owner.close()


def test_a_drain_sees_every_stream_and_has_a_deadline(driver: CUDADriver) -> None:
    cuda: Any = torch.cuda  # of which torch annotates half
    driver.fence()
    if not driver._has_context_events:
        pytest.skip("this NVIDIA driver is older than CUDA 12.5: it has no event for a context")
    impatient = CUDADriver(drain_timeout_s=0.01)
    with cuda.stream(cuda.Stream()):
        cuda._sleep(2_000_000_000)  # about a second
        ended = cuda.current_stream().record_event()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        impatient.fence()
    driver.fence()
    assert ended.query()


class Exporter:
    """A publisher in a process of its own."""

    def __init__(self) -> None:
        self.driver = CUDADriver()
        self.allocation = filled(self.driver, b"trained")
        self.broker = Broker()
        self.broker.offer(1, self.allocation.export(), self.allocation.nbytes)
        self.plain = self.driver.alloc(2 << 20)
        write(self.driver, self.plain, b"legacy")
        self.driver.fence()  # a copy of few bytes returns before they are there

    def where(self) -> dict[str, Any]:
        return self.broker.ref.model_dump()

    def handle(self) -> str:
        return self.driver.ipc_handle(self.plain).hex()


def test_an_import_outlives_its_exporter(driver: CUDADriver) -> None:
    with Child(Exporter) as exporter:
        ref = BrokerRef.model_validate(exporter.call("where"))
        received = Allocation.received(driver, *fetch_fd(ref, 1, timeout_s=10))
        exporter.kill()
    window = AddressRange(driver, received.nbytes)
    window.map(received, writable=False)
    assert read(driver, window.address, 7) == b"trained"
    window.close()
    received.close()


def test_a_legacy_handle_opens_in_another_process(driver: CUDADriver) -> None:
    with Child(Exporter) as exporter:
        at = driver.open_ipc(bytes.fromhex(exporter.call("handle")))
        assert read(driver, at, 6) == b"legacy"
        driver.close_ipc(at)


def test_a_thousand_imports_leave_device_memory_and_descriptors(driver: CUDADriver) -> None:
    one, live = filled(driver, b"one"), AddressRange(driver, 1)

    def cycle() -> None:
        new = Allocation.received(driver, driver.export_fd(one.handle), one.nbytes)
        old = live.swap(new, writable=False)
        if old is not None:
            old.close()

    cycle()
    before, free = open_fds(), torch.cuda.mem_get_info()[0]
    for _ in range(1000):
        cycle()
    assert open_fds() == before
    # A leak would be a thousand allocations of 2 MiB or more.
    assert free - torch.cuda.mem_get_info()[0] < 100 * one.nbytes
    assert read(driver, live.address, 3) == b"one"
