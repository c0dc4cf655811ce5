"""Virtual memory by hand: reserve, map, move, drop, inspect."""

import ctypes
import errno
import os
from collections.abc import Iterator

import pytest

from rl_bridge.memory import vm

NBYTES = 64 * vm.PAGE


@pytest.fixture
def file() -> Iterator[int]:
    """A memfd whose page i is full of byte i + 1."""
    fd = os.memfd_create("rl_bridge-test")
    os.write(fd, b"".join(bytes([page + 1]) * vm.PAGE for page in range(64)))
    yield fd
    os.close(fd)


def read(address: int, nbytes: int = 1) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_populating_beyond_a_truncated_file_is_an_error_and_no_signal(file: int) -> None:
    address = vm.reserve(NBYTES)
    vm.map_fixed(address, NBYTES, file)
    vm.populate(address, NBYTES)
    os.ftruncate(file, vm.PAGE)
    with pytest.raises(OSError, match="POPULATE_READ"):
        vm.populate(address, NBYTES)
    vm.unmap(address, NBYTES)


# ---- reading files ------------------------------------------------------------------------------


def test_reading_into_memory_says_how_much_there_was(file: int) -> None:
    address = vm.map_anonymous(2 * NBYTES)
    assert vm.read_into(file, address, NBYTES) == NBYTES
    assert read(address + vm.PAGE) == b"\2"
    os.ftruncate(file, 100)
    assert vm.read_into(file, address, NBYTES) == 100
    assert vm.read_into(file, address, 0) == 0
    vm.unmap(address, 2 * NBYTES)


def test_short_reads_go_on_where_they_stopped(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = vm.map_anonymous(NBYTES)
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr("rl_bridge.memory.vm.os.preadv", short)
    assert vm.read_into(file, address, NBYTES) == NBYTES
    assert read(address, NBYTES) == os.pread(file, NBYTES, 0)
    vm.unmap(address, NBYTES)


# ---- inspecting ---------------------------------------------------------------------------------


def test_private_ranges_are_exactly_the_pages_that_were_written(file: int) -> None:
    address = vm.reserve(NBYTES)
    vm.map_fixed(address, NBYTES, file)
    vm.populate(address, NBYTES)
    if vm.private_ranges(address, NBYTES) is None:  # pragma: no cover - before Linux 6.7
        pytest.skip("this kernel cannot tell")
    assert vm.private_ranges(address, NBYTES) == []
    for page in (0, 7, 8, 63):
        vm.store(address + page * vm.PAGE + 9, b"x")
    assert vm.private_ranges(address, NBYTES) == [
        (address, vm.PAGE),
        (address + 7 * vm.PAGE, 2 * vm.PAGE),
        (address + 63 * vm.PAGE, vm.PAGE),
    ]
    assert vm.private_ranges(address + vm.PAGE, 7 * vm.PAGE) == [(address + 7 * vm.PAGE, vm.PAGE)]
    vm.drop_pages(address, NBYTES)
    assert vm.private_ranges(address, NBYTES) == []
    vm.unmap(address, NBYTES)


def test_more_private_ranges_than_fit_one_question_are_all_found() -> None:
    pages = 1500
    fd = os.memfd_create("rl_bridge-test")
    os.ftruncate(fd, pages * vm.PAGE)
    address = vm.reserve(pages * vm.PAGE)
    vm.map_fixed(address, pages * vm.PAGE, fd)
    for page in range(0, pages, 2):
        vm.store(address + page * vm.PAGE, b"x")
    found = vm.private_ranges(address, pages * vm.PAGE)
    assert found in (
        None,
        [(address + page * vm.PAGE, vm.PAGE) for page in range(0, pages, 2)],
    )
    vm.unmap(address, pages * vm.PAGE)
    os.close(fd)


@pytest.mark.parametrize("is_known", [False, True], ids=["no-such-call", "looks-at-a-part"])
def test_a_kernel_that_cannot_tell_says_none(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ioctl(*_: object) -> int:
        if not is_known:
            raise OSError(errno.ENOTTY, "no such ioctl")
        return 0  # and the argument is not written to: the look went no further than its beginning

    monkeypatch.setattr("rl_bridge.memory.vm.fcntl.ioctl", ioctl)
    assert vm.private_ranges(vm.PAGE, vm.PAGE) is None
