"""Legacy IPC through the real bindings, over the stand-in for libcuda; run by `test_cuda`."""

import ctypes
from typing import Any

import pytest

from rl_bridge.cuda.driver import INVALID_VALUE
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES, IPC_UNIT, IPCDriver
from rl_bridge.cuda.libcuda import CUDADriver
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.errors import DriverError
from rl_bridge.testing.processes import Child
from tests.cuda.ipc_suite import Exporter, Importer, IPCSuite
from tests.cuda.on_stand_in import Recording, bindings


class CUDAExporter(Exporter):
    def make(self) -> IPCDriver:
        return CUDADriver(1)


class CUDAImporter(Importer):
    def make(self) -> IPCDriver:
        return CUDADriver(1)


class TestCUDAIPC(IPCSuite):
    exporter = CUDAExporter
    importer = CUDAImporter

    def make(self) -> IPCDriver:
        return CUDADriver(1)


def test_the_raw_bytes_and_the_flag_are_passed() -> None:
    record = Recording()
    driver = CUDADriver(1, bindings=record)
    with Child(CUDAExporter) as owner:
        raw = bytes.fromhex(owner.call("where")["handle"])
        at = driver.open_ipc(raw)
        _, passed, flags = record.calls[-1]
        assert isinstance(passed, bindings.CUipcMemHandle)
        assert ctypes.string_at(int(passed.getPtr()), IPC_HANDLE_NBYTES) == raw
        assert flags == 1
        driver.close_ipc(at)


def test_a_handle_of_another_gpu_is_invalid() -> None:
    with Child(CUDAExporter) as owner:
        raw = bytes.fromhex(owner.call("where")["handle"])
        with pytest.raises(DriverError, match="the GPU") as caught:
            CUDADriver(0).open_ipc(raw)
    assert caught.value.code == "CUDA_ERROR_INVALID_HANDLE"


def test_memory_that_is_exported_as_a_descriptor_has_no_legacy_handle() -> None:
    driver = CUDADriver(1)
    allocation, live = Allocation.create(driver, IPC_UNIT), AddressRange(driver, IPC_UNIT)
    live.map(allocation, writable=True)
    with pytest.raises(DriverError) as caught:
        driver.ipc_handle(live.address)
    assert (caught.value.call, caught.value.code) == ("cuIpcGetMemHandle", INVALID_VALUE)
    live.close()
    allocation.close()


def test_a_probe_names_the_attribute_that_is_missing() -> None:
    class Lacking(Recording):
        def __getattr__(self, name: str) -> Any:
            if name != "cuDeviceGetAttribute":
                return super().__getattr__(name)
            return lambda which, _: (bindings.CUresult.CUDA_SUCCESS, int(int(which) != 125))

    record = Lacking()
    with pytest.raises(DriverError, match="IPC_EVENT_SUPPORTED is 0") as caught:
        CUDADriver(1, bindings=record).probe_ipc()
    assert caught.value.code == "CUDA_ERROR_NOT_SUPPORTED"
    assert "cuMemAlloc" not in record.names()


def test_a_probe_that_cannot_name_memory_frees_it() -> None:
    class Sandboxed(Recording):
        def __getattr__(self, name: str) -> Any:
            if name != "cuIpcGetMemHandle":
                return super().__getattr__(name)
            return lambda *_: (bindings.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)

    record = Sandboxed()
    with pytest.raises(DriverError, match="cuIpcGetMemHandle"):
        CUDADriver(1, bindings=record).probe_ipc()
    assert record.names()[-1] == "cuMemFree"
