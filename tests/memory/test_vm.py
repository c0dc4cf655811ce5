"""Virtual memory by hand: reserve, map, move, drop, inspect."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.memory import vm
from tests.helpers import forked, forking

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


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize(
    ("nbytes", "alignment"),
    [(vm.PAGE, 2 << 20), (5 << 20, 2 << 20), (1 << 30, 1 << 30), ((1 << 30) + vm.PAGE, 1 << 30)],
)
def test_a_reserved_range_is_aligned_and_nothing_around_it_stays(
    nbytes: int, alignment: int
) -> None:
    before = num_mappings()
    address = vm.reserve(nbytes)
    assert address % alignment == 0
    assert num_mappings() <= before + 1
    vm.unmap(address, nbytes)
    assert num_mappings() <= before


def test_an_impossible_reservation_is_an_os_error() -> None:
    with pytest.raises(OSError, match="mmap of") as caught:
        vm.reserve(1 << 62)
    assert caught.value.errno == errno.ENOMEM


def test_moving_keeps_bytes_and_private_pages_and_leaves_the_source_mapped(file: int) -> None:
    source, target = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_fixed(source, NBYTES, file)
    vm.store(source + 3 * vm.PAGE, b"own")
    vm.move(source, NBYTES, target)
    assert read(target + 3 * vm.PAGE, 4) == b"own\4"
    assert read(target + 4 * vm.PAGE) == b"\5"
    # The source shows the file again, without the page that moved along.
    assert is_mapped(source)
    assert read(source + 3 * vm.PAGE, 3) == b"\4\4\4"
    assert vm.private_ranges(source, NBYTES) in ([], None)
    vm.unmap(source, NBYTES)
    vm.unmap(target, NBYTES)


def test_moving_what_is_not_mapped_is_an_os_error_and_changes_nothing(file: int) -> None:
    target = vm.reserve(NBYTES)
    vm.map_fixed(target, NBYTES, file)
    hole = vm.reserve(NBYTES)
    vm.unmap(hole, NBYTES)
    with pytest.raises(OSError, match="mremap of"):
        vm.move(hole, NBYTES, target)
    assert read(target) == b"\1"
    vm.unmap(target, NBYTES)


def test_advice_about_what_is_not_mapped_is_an_os_error() -> None:
    hole = vm.reserve(NBYTES)
    vm.unmap(hole, NBYTES)
    with pytest.raises(OSError, match="DONTNEED"):
        vm.drop_pages(hole, NBYTES)
    with pytest.raises(OSError, match="DONTFORK"):
        vm.guard_from_fork(hole, NBYTES)
    vm.drop_pages(hole, 0)


def test_populating_beyond_a_truncated_file_is_an_error_and_no_signal(file: int) -> None:
    address = vm.reserve(NBYTES)
    vm.map_fixed(address, NBYTES, file)
    vm.populate(address, NBYTES)
    os.ftruncate(file, vm.PAGE)
    with pytest.raises(OSError, match="POPULATE_READ"):
        vm.populate(address, NBYTES)
    vm.unmap(address, NBYTES)


@forking
def test_a_guarded_mapping_is_not_there_in_a_forked_child(file: int) -> None:
    guarded, plain = vm.reserve(NBYTES), vm.reserve(NBYTES)
    for address in (guarded, plain):
        vm.map_shared(address, NBYTES, file)
    vm.guard_from_fork(guarded, NBYTES)
    assert forked(lambda: is_mapped(plain) and not is_mapped(guarded))
    vm.unmap(guarded, NBYTES)
    vm.unmap(plain, NBYTES)


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


def test_the_kernel_tells_which_file_lies_where(file: int) -> None:
    address = vm.reserve(NBYTES)
    vm.map_fixed(address, NBYTES, file)
    status = os.fstat(file)
    found = vm.mapped_file(address + 3 * vm.PAGE)
    assert found is not None
    assert (found.device, found.inode) == (status.st_dev, status.st_ino)
    assert found.offset == 3 * vm.PAGE
    assert found.nbytes == NBYTES - 3 * vm.PAGE
    vm.unmap(address, NBYTES)


def test_no_file_lies_in_anonymous_memory_or_in_a_hole() -> None:
    address = vm.map_anonymous(NBYTES)
    assert vm.mapped_file(address) is None
    vm.unmap(address, NBYTES)
    assert vm.mapped_file(address) is None
    assert vm.mapped_file(2**47 - vm.PAGE) is None
    assert vm.mapped_file(2**63) is None


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


def test_what_is_not_mapped_cannot_be_spared() -> None:
    top_of_addresses = (1 << 47) - (1 << 20)
    with pytest.raises(OSError, match=r"madvise\(FREE\) of 4096 bytes"):
        vm.spare_pages(top_of_addresses, 4096)


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
