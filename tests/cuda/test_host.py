"""Host memory under CUDA's rules."""

import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from rl_bridge.cuda import driver as seam
from rl_bridge.cuda.driver import CAPTURING, INVALID_VALUE, NOT_INITIALIZED, driver_error
from rl_bridge.cuda.host import HostDriver, Live
from rl_bridge.errors import DriverError
from rl_bridge.memory import vm
from rl_bridge.processes import close_fd
from rl_bridge.testing.processes import Child, ChildDied
from tests.cuda.driver_suite import DriverSuite
from tests.cuda.rig import NOTHING, SMALL, peek, poke
from tests.helpers import forked, forking, open_fds
from tests.raise_sites import says_a_remedy


class TestHostDriver(DriverSuite[HostDriver]):
    def make(self) -> HostDriver:
        return HostDriver()

    def write(self, driver: HostDriver, address: int, data: bytes) -> None:
        vm.store(address, data)

    def read(self, driver: HostDriver, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver(granularity=SMALL)
    yield made
    give_back(made)


def give_back(driver: HostDriver) -> None:
    """Undo what a test left: a driver that dies leaves all of it, as CUDA's does."""
    for handle in list(driver._memory):
        driver.release(handle)
    for address, found in list(driver._reserved.items()):
        for at, nbytes in list(found.mappings.items()):
            driver.unmap(at, nbytes)
        driver.free(address, found.nbytes)
    assert driver.live() == NOTHING


def mapped(driver: HostDriver, *, writable: bool = True) -> tuple[int, int]:
    """A handle, and an address where its memory lies."""
    handle, address = driver.create(SMALL), driver.reserve(SMALL)
    driver.map(address, SMALL, handle)
    driver.set_access(address, SMALL, writable=writable)
    return handle, address


# ---- access -------------------------------------------------------------------------------------


class Toucher:
    """Touches memory in a process of its own, which may end by that."""

    def __init__(self) -> None:
        self.driver = HostDriver(granularity=SMALL)
        self.handle = self.driver.create(SMALL)
        self.address = self.driver.reserve(SMALL)

    def map(self) -> None:
        self.driver.map(self.address, SMALL, self.handle)

    def grant(self, writable: bool) -> None:
        self.driver.set_access(self.address, SMALL, writable=writable)

    def unmap(self) -> None:
        self.driver.unmap(self.address, SMALL)

    def read(self) -> list[int]:
        return sorted(peek(self.address, SMALL))

    def write(self) -> None:
        poke(self.address, 7, SMALL)


def dies(child: Child, call: str) -> bool:
    with pytest.raises(ChildDied) as caught:
        child.call(call)
    return caught.value.exitcode == -signal.SIGSEGV


@pytest.mark.parametrize("steps", [[], ["map"], ["map", "grant", "unmap"]], ids=len)
def test_memory_without_access_cannot_be_read(steps: list[str]) -> None:
    with Child(Toucher) as child:
        for step in steps:
            child.call(step, **({"writable": True} if step == "grant" else {}))
        assert dies(child, "read")


def test_a_read_only_mapping_is_read_and_a_write_to_it_is_a_fault() -> None:
    with Child(Toucher) as child:
        child.call("map")
        child.call("grant", writable=True)
        child.call("write")
        child.call("grant", writable=False)
        assert child.call("read") == [7]
        assert dies(child, "write")


# ---- refusals that CUDA leaves undefined, or that are the host's own ----------------------------


@pytest.mark.parametrize("seals", [0, 2, 4, 2 | 4, 2 | 1, 4 | 1])
def test_memory_that_could_be_cut_is_not_imported(driver: HostDriver, seals: int) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SMALL)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(DriverError, match="is not sealed") as caught:
        driver.import_fd(fd, SMALL)
    os.close(fd)
    assert caught.value.code == INVALID_VALUE
    assert driver.live() == NOTHING


@pytest.mark.parametrize("nbytes", [SMALL, 3 * SMALL])
def test_memory_of_another_size_is_not_imported(driver: HostDriver, nbytes: int) -> None:
    fd = driver.export_fd(driver.create(2 * SMALL))
    with pytest.raises(DriverError, match=rf"has {2 * SMALL} bytes, expected {nbytes}"):
        driver.import_fd(fd, nbytes)
    close_fd(fd)


def test_a_shortage_of_memory_leaves_nothing(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_fds()
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        driver.reserve(1 << 62)
    monkeypatch.setattr("rl_bridge.cuda.host.os.ftruncate", no_space)
    with pytest.raises(DriverError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(SMALL)
    assert open_fds() == before
    assert driver.live() == NOTHING


# ---- forked children ----------------------------------------------------------------------------


@forking
def test_a_forked_child_holds_no_memory_and_may_not_call(driver: HostDriver) -> None:
    before = open_fds()
    handle, address = mapped(driver)
    poke(address, 5, SMALL)
    own = {fd: target for fd, target in open_fds().items() if fd not in before}
    assert [target for target in own.values() if "rl_bridge-vmm" in target] == list(own.values())

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except DriverError as error:
            return error.code == NOT_INITIALIZED
        return False

    def in_child() -> bool:
        return (
            not any(open_fds().get(fd) == target for fd, target in own.items())
            and vm.mapped_file(address) is None
            and refused(lambda: driver.create(SMALL))
            and refused(lambda: driver.release(handle))
            and refused(lambda: driver.unmap(address, SMALL))
            and refused(lambda: driver.free(address, SMALL))
            and refused(driver.fence)
        )

    assert forked(in_child)
    assert peek(address, SMALL) == {5}
    assert driver.live() == Live(1, 1, 1)


# ---- words --------------------------------------------------------------------------------------


def test_every_code_has_a_remedy() -> None:
    assert len(seam._REMEDIES) > 15
    for code in [*seam._REMEDIES, "CUDA_ERROR_UNKNOWN"]:
        error = seam.driver_error("cuMemMap", code, "why")
        assert error.code == code
        assert str(error).startswith(f"cuMemMap failed with {code}: why. ")
        assert says_a_remedy(str(error)), str(error)


def test_codes_are_cudas_own() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    names = {result.name for result in bindings.CUresult}
    assert {INVALID_VALUE, NOT_INITIALIZED, CAPTURING} <= names
    ours = {"BINDINGS_NOT_FOUND", "LIBCUDA_NOT_FOUND"}
    assert set(seam._REMEDIES) - ours <= names


def test_a_probe_that_fails_leaves_nothing(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    for name in ("export_fd", "import_fd", "reserve", "map", "set_access"):

        def refuse(*_: object, **__: object) -> int:
            raise driver_error("cuMemMap", INVALID_VALUE, "no")

        with monkeypatch.context() as patch, ExitStack():
            patch.setattr(driver, name, refuse)
            with pytest.raises(DriverError):
                driver.probe()
        assert driver.live() == NOTHING, name
        assert open_fds() == before, name
