"""Legacy IPC on host memory keeps CUDA's rules; what only host memory can show."""

import ctypes
import os
import struct
from typing import Any

import pytest

from rl_bridge.cuda.host import FREED, HostIPCDriver
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES, IPC_UNIT, IPCDriver, Opening
from rl_bridge.errors import DriverError
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.testing.processes import Child
from tests.cuda.ipc_suite import TRAINED, Exporter, Importer, IPCSuite
from tests.helpers import open_fds


class HostExporter(Exporter):
    def make(self) -> IPCDriver:
        return HostIPCDriver()


class HostImporter(Importer):
    def make(self) -> IPCDriver:
        return HostIPCDriver()


class TestHostIPC(IPCSuite):
    exporter = HostExporter
    importer = HostImporter

    def make(self) -> IPCDriver:
        return HostIPCDriver()


def test_memory_that_is_freed_too_early_shows_it() -> None:
    driver = HostIPCDriver()
    with Child(HostExporter) as owner:
        at = driver.open_ipc(bytes.fromhex(owner.call("where")["handle"]))
        assert ctypes.string_at(at, len(TRAINED)) == TRAINED
        owner.call("give_up")  # nobody said that it is open
        assert ctypes.string_at(at, 3) == bytes([FREED]) * 3
        driver.close_ipc(at)
    assert driver.num_plain() == (0, 0)


def test_an_opening_is_closed_behind_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy out of it may have been given up at its deadline, and go on.
    driver = HostIPCDriver()
    asked: list[str] = []
    for name in ("fence", "close_ipc"):
        inner = getattr(HostIPCDriver, name)

        def call(*args: Any, _name: str = name, _inner: Any = inner) -> Any:
            asked.append(_name)
            return _inner(*args)

        monkeypatch.setattr(HostIPCDriver, name, call)
    with Child(HostExporter) as owner:
        where = owner.call("where")
        segment = SegmentRef.model_validate(where["segment"])
        opening = Opening(driver, bytes.fromhex(where["handle"]), segment)
        assert (asked, opening.is_pointer) == ([], False)
        opening.close()
        assert asked == ["fence", "close_ipc"]


@pytest.mark.parametrize("word", range(7))
def test_a_handle_that_was_changed_opens_nothing(word: int) -> None:
    driver = HostIPCDriver()
    with Child(HostExporter) as owner:
        raw = bytearray.fromhex(owner.call("where")["handle"])
        before = open_fds()
        for change in (1, 1 << 40, -(1 << 62)):
            told = bytearray(raw)
            (value,) = struct.unpack_from("<q", raw, 8 * word)
            struct.pack_into("<q", told, 8 * word, value ^ change)
            with pytest.raises(DriverError) as caught:
                driver.open_ipc(bytes(told))
            assert caught.value.code == "CUDA_ERROR_INVALID_HANDLE"
        assert open_fds() == before


@pytest.mark.parametrize("nbytes", [0, -IPC_UNIT, IPC_UNIT + 1])
def test_an_odd_size_is_refused(nbytes: int) -> None:
    with pytest.raises(DriverError, match="expected a multiple of"):
        HostIPCDriver().alloc(nbytes)


def test_a_handle_carries_only_the_place_of_the_memory() -> None:
    driver = HostIPCDriver()
    at = driver.alloc(IPC_UNIT)
    raw = driver.ipc_handle(at)
    assert (len(raw), raw) == (IPC_HANDLE_NBYTES, driver.ipc_handle(at))
    assert struct.unpack_from("<q", raw, 8)[0] == os.getpid()
    driver.dealloc(at)
