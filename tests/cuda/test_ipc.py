"""Legacy IPC on host memory keeps CUDA's rules; what only host memory can show."""

import itertools
import struct
from typing import Any

import pytest

from rl_bridge.cuda.host import HostIPCDriver
from rl_bridge.cuda.ipc import IPCDriver, Opening
from rl_bridge.errors import DriverError
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.testing.processes import Child
from tests.cuda.ipc_suite import Exporter, Importer, IPCSuite
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


def test_a_handle_that_was_changed_opens_nothing() -> None:
    driver = HostIPCDriver()
    with Child(HostExporter) as owner:
        raw = bytearray.fromhex(owner.call("where")["handle"])
        before = open_fds()
        for word, change in itertools.product(range(7), (1, 1 << 40, -(1 << 62))):
            told = bytearray(raw)
            (value,) = struct.unpack_from("<q", raw, 8 * word)
            struct.pack_into("<q", told, 8 * word, value ^ change)
            with pytest.raises(DriverError) as caught:
                driver.open_ipc(bytes(told))
            assert caught.value.code == "CUDA_ERROR_INVALID_HANDLE"
        assert open_fds() == before
