"""What every `VMMDriver` does, whatever memory it is on."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Generic, TypeVar

import pytest

from rl_bridge.cuda.driver import INVALID_VALUE, VMMDriver
from rl_bridge.errors import DriverError
from rl_bridge.processes import close_fd
from tests.helpers import forked, forking, open_fds

__all__ = ["DriverSuite"]

D = TypeVar("D", bound=VMMDriver)


class DriverSuite(ABC, Generic[D]):
    """Subclass it with `make` and with how bytes are written and read from the host."""

    @abstractmethod
    def make(self) -> D:
        """A driver, or a skip with the reason."""

    @abstractmethod
    def write(self, driver: D, address: int, data: bytes) -> None:
        """Write to a mapping."""

    @abstractmethod
    def read(self, driver: D, address: int, nbytes: int) -> bytes:
        """Read from a mapping."""

    @pytest.fixture
    def driver(self) -> D:
        return self.make()

    @pytest.fixture
    def undo(self) -> Iterator[ExitStack]:
        with ExitStack() as stack:
            yield stack

    def memory(self, driver: D, undo: ExitStack, units: int = 1) -> tuple[int, int]:
        """A handle and its size."""
        nbytes = units * driver.granularity()
        handle = driver.create(nbytes)
        undo.callback(driver.release, handle)
        return handle, nbytes

    def room(self, driver: D, undo: ExitStack, nbytes: int) -> int:
        address = driver.reserve(nbytes)
        undo.callback(driver.free, address, nbytes)
        return address

    def show(self, driver: D, undo: ExitStack, address: int, nbytes: int, handle: int) -> None:
        driver.map(address, nbytes, handle)
        undo.callback(driver.unmap, address, nbytes)
        driver.set_access(address, nbytes, writable=True)

    def refused(self, call: str) -> "pytest.RaisesExc[DriverError]":
        return pytest.RaisesExc(
            DriverError, check=lambda error: (error.call, error.code) == (call, INVALID_VALUE)
        )

    # ---- what it gives ----------------------------------------------------------------------

    def test_the_driver_names_its_device_and_granularity(self, driver: D) -> None:
        assert driver.name in {"cuda", "host"}
        assert (driver.device.uuid == "host") == (driver.name == "host")
        unit = driver.granularity()
        assert unit > 0
        assert [driver.round_up(n) for n in (0, 1, unit, unit + 1)] == [unit, unit, unit, 2 * unit]

    def test_the_probe_passes_and_leaves_nothing(self, driver: D) -> None:
        before = open_fds()
        driver.probe()
        assert open_fds() == before

    def test_memory_shows_the_same_bytes_at_two_addresses(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo)
        here, there = (self.room(driver, undo, nbytes) for _ in range(2))
        for address in (here, there):
            self.show(driver, undo, address, nbytes, handle)
        self.write(driver, here + nbytes - 3, b"abc")
        driver.fence()
        assert self.read(driver, there + nbytes - 3, 3) == b"abc"

    def test_memory_lives_in_its_mapping_without_its_handle(
        self, driver: D, undo: ExitStack
    ) -> None:
        nbytes = driver.granularity()
        address = self.room(driver, undo, nbytes)
        handle = driver.create(nbytes)
        self.show(driver, undo, address, nbytes, handle)
        driver.release(handle)
        self.write(driver, address, b"still")
        assert self.read(driver, address, 5) == b"still"

    def test_memory_lives_in_its_descriptor_without_handle_and_mapping(
        self, driver: D, undo: ExitStack
    ) -> None:
        nbytes = driver.granularity()
        address = self.room(driver, undo, nbytes)
        handle = driver.create(nbytes)
        with ExitStack() as first:
            self.show(driver, first, address, nbytes, handle)
            self.write(driver, address, b"kept")
            driver.fence()
        fd = driver.export_fd(handle)
        driver.release(handle)
        imported = driver.import_fd(fd, nbytes)
        undo.callback(driver.release, imported)
        close_fd(fd)  # the import is a reference of its own
        with ExitStack() as second:
            self.show(driver, second, address, nbytes, imported)
            assert self.read(driver, address, 4) == b"kept"

    def test_a_descriptor_is_not_inherited(self, driver: D, undo: ExitStack) -> None:
        handle, _ = self.memory(driver, undo)
        fd = driver.export_fd(handle)
        undo.callback(close_fd, fd)
        assert os.get_inheritable(fd) is False

    @forking
    def test_a_forked_child_does_not_keep_a_descriptor(self, driver: D, undo: ExitStack) -> None:
        handle, _ = self.memory(driver, undo)
        fd = driver.export_fd(handle)
        undo.callback(close_fd, fd)

        def is_gone() -> bool:
            try:
                os.fstat(fd)
            except OSError:
                return True
            return False

        assert forked(is_gone)

    def test_an_import_does_not_take_the_descriptor(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo)
        fd = driver.export_fd(handle)
        for _ in range(2):
            undo.callback(driver.release, driver.import_fd(fd, nbytes))
        close_fd(fd)

    def test_other_memory_can_be_mapped_at_the_same_address(
        self, driver: D, undo: ExitStack
    ) -> None:
        one, nbytes = self.memory(driver, undo)
        two, _ = self.memory(driver, undo)
        address = self.room(driver, undo, nbytes)
        for handle, data in ((one, b"1"), (two, b"2")):
            with ExitStack() as stack:
                self.show(driver, stack, address, nbytes, handle)
                self.write(driver, address, data)
                driver.fence()
        for handle, data in ((one, b"1"), (two, b"2")):
            with ExitStack() as stack:
                self.show(driver, stack, address, nbytes, handle)
                assert self.read(driver, address, 1) == data

    def test_one_grant_of_access_covers_several_mappings(self, driver: D, undo: ExitStack) -> None:
        one, nbytes = self.memory(driver, undo)
        two, _ = self.memory(driver, undo)
        address = self.room(driver, undo, 2 * nbytes)
        for at, handle in ((address, one), (address + nbytes, two)):
            driver.map(at, nbytes, handle)
            undo.callback(driver.unmap, at, nbytes)
        driver.set_access(address, 2 * nbytes, writable=True)
        self.write(driver, address + nbytes - 1, b"xy")
        assert self.read(driver, address + nbytes - 1, 2) == b"xy"

    def test_it_says_itself_which_memory_lies_at_an_address(
        self, driver: D, undo: ExitStack
    ) -> None:
        (one, nbytes), (two, _) = (self.memory(driver, undo) for _ in range(2))
        address = self.room(driver, undo, nbytes)
        before = open_fds()
        assert not driver.shows(address, nbytes, one)
        for handle, other in ((one, two), (two, one)):
            with ExitStack() as stack:
                self.show(driver, stack, address, nbytes, handle)
                assert driver.shows(address, nbytes, handle)
                assert not driver.shows(address, nbytes, other)
        assert open_fds() == before

    def test_two_allocations_side_by_side_are_not_one(self, driver: D, undo: ExitStack) -> None:
        one, nbytes = self.memory(driver, undo)
        two, _ = self.memory(driver, undo)
        both, _ = self.memory(driver, undo, units=2)
        address = self.room(driver, undo, 2 * nbytes)
        self.show(driver, undo, address, nbytes, one)
        self.show(driver, undo, address + nbytes, nbytes, two)
        for handle in (one, two, both):
            assert not driver.shows(address, 2 * nbytes, handle)

    # ---- what it refuses --------------------------------------------------------------------

    def test_odd_sizes_are_refused(self, driver: D) -> None:
        unit = driver.granularity()
        for nbytes in (0, unit + 1, unit // 2):
            with self.refused("cuMemCreate"):
                driver.create(nbytes)

    def test_a_range_that_is_in_use_is_not_mapped_again(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo)
        address = self.room(driver, undo, nbytes)
        self.show(driver, undo, address, nbytes, handle)
        with self.refused("cuMemMap"):
            driver.map(address, nbytes, handle)

    def test_memory_of_another_size_is_not_mapped(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo)
        address = self.room(driver, undo, 2 * nbytes)
        with self.refused("cuMemMap"):
            driver.map(address, 2 * nbytes, handle)

    def test_a_part_of_a_mapping_is_not_unmapped(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo, units=2)
        address = self.room(driver, undo, nbytes)
        self.show(driver, undo, address, nbytes, handle)
        with self.refused("cuMemUnmap"):
            driver.unmap(address, nbytes // 2)

    def test_an_empty_range_cannot_be_unmapped(self, driver: D, undo: ExitStack) -> None:
        # An exchange that an interrupt cut off relies on this answer.
        nbytes = driver.granularity()
        address = self.room(driver, undo, nbytes)
        with self.refused("cuMemUnmap"):
            driver.unmap(address, nbytes)

    def test_access_to_a_range_with_a_hole_is_refused(self, driver: D, undo: ExitStack) -> None:
        handle, nbytes = self.memory(driver, undo)
        address = self.room(driver, undo, 2 * nbytes)
        driver.map(address, nbytes, handle)
        undo.callback(driver.unmap, address, nbytes)
        with self.refused("cuMemSetAccess"):
            driver.set_access(address, 2 * nbytes, writable=True)

    def test_a_descriptor_of_something_else_is_not_imported(
        self, driver: D, undo: ExitStack
    ) -> None:
        for fd in os.pipe():
            undo.callback(os.close, fd)
            with pytest.raises(DriverError, match="cuMemImportFromShareableHandle"):
                driver.import_fd(fd, driver.granularity())

    def test_no_descriptor_is_not_imported(self, driver: D) -> None:
        with self.refused("cuMemImportFromShareableHandle"):
            driver.import_fd(-1, driver.granularity())
