"""Leases that the kernel keeps: across processes, and gone with their holder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.memory import segment as leases
from rl_bridge.testing.processes import Child, until

RDONLY, RDWR = os.O_RDONLY | os.O_CLOEXEC, os.O_RDWR | os.O_CLOEXEC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "leased"
    file.write_bytes(bytes(64))
    return file


@pytest.fixture
def writer(path: Path) -> Iterator[int]:
    fd = os.open(path, RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def reader(path: Path) -> Iterator[int]:
    fd = os.open(path, RDONLY)
    yield fd
    os.close(fd)


def test_readers_and_the_writer_keep_each_other_out(writer: int, reader: int) -> None:
    for mine, take, other, take_other in (
        (reader, leases.try_shared, writer, leases.try_exclusive),
        (writer, leases.try_exclusive, reader, leases.try_shared),
    ):
        assert take(mine)
        assert take(mine), "one's own lock is no obstacle"
        assert not take_other(other)
        assert leases.is_held(other)
        assert not leases.is_held(mine)
        leases.unlock(mine)
        assert not leases.is_held(other)
        assert take_other(other)
        leases.unlock(other)


def test_readers_do_not_disturb_each_other(path: Path, reader: int, writer: int) -> None:
    other = os.open(path, RDONLY)
    assert leases.try_shared(reader)
    assert leases.try_shared(other)
    leases.unlock(reader)
    assert not leases.try_exclusive(writer)
    os.close(other)
    assert leases.try_exclusive(writer)


def test_ranges_are_leased_apart(writer: int, reader: int) -> None:
    assert leases.try_shared(reader, start=8, length=8)
    assert leases.try_exclusive(writer, start=0, length=8)
    assert leases.try_exclusive(writer, start=16, length=8)
    assert not leases.try_exclusive(writer, start=15, length=1)
    assert leases.is_held(writer, start=0, length=64)
    assert not leases.is_held(writer, start=16, length=64)
    leases.unlock(reader, start=8, length=8)
    assert leases.try_exclusive(writer, start=0, length=64)


def test_what_is_no_lock_conflict_is_an_error(reader: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        leases.try_exclusive(reader)  # a write lock needs a descriptor open for writing
    with pytest.raises(OSError, match="Bad file descriptor"):
        leases.try_shared(9999)


def test_a_lease_belongs_to_the_descriptor_and_not_to_the_process(
    path: Path, writer: int, reader: int
) -> None:
    # A classic POSIX lock would vanish when any descriptor of the file is closed.
    assert leases.try_shared(reader)
    os.close(os.open(path, RDONLY))
    assert not leases.try_exclusive(writer)


class Holder:
    """A reader in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self) -> bool:
        self.fd = os.open(self.path, RDONLY)
        return leases.try_shared(self.fd)

    def let_go(self) -> None:
        os.close(self.fd)


def test_a_lease_holds_across_processes_and_a_killed_holders_is_gone(
    path: Path, writer: int
) -> None:
    with Child(Holder, path=path) as child:
        assert child.call("hold")
        assert not leases.try_exclusive(writer)
        child.call("let_go")
        assert leases.try_exclusive(writer)
        leases.unlock(writer)
        assert child.call("hold")
        assert leases.is_held(writer)
        child.kill()
        # The kernel closes a dead process's files before anybody can wait for it.
        until(lambda: leases.try_exclusive(writer), what="the lease is free", deadline_s=5)
