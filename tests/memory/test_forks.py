"""Forks: a child keeps no lease, lock or memory, and no finalizer waits for a fork."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import processes
from rl_bridge.journal import Journal
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, open_segment
from rl_bridge.memory.slots import SlotRing
from rl_bridge.processes import close_fd, no_fork, open_fd
from tests.helpers import forked, forking, open_fds
from tests.memory.slots_rig import new_ring, view_of, write

LONG_S = 30.0
NAME = "rlb-0123456789ab-1.seg"


# ---- what a forked child has --------------------------------------------------------------------


class Children:
    """Forks in another thread; the children live until they are let go of."""

    def __init__(self) -> None:
        self._held, self._release = os.pipe()
        self._ready, self._begun = os.pipe()
        self.pids: list[int] = []

    def fork(self) -> None:
        pid = os.fork()
        if pid == 0:
            os.close(self._release)
            os.write(self._begun, b"1")  # what has to be closed is closed
            os.read(self._held, 1)
            os._exit(0)
        self.pids.append(pid)
        os.read(self._ready, 1)

    def fork_elsewhere(self) -> None:
        thread = threading.Thread(target=self.fork)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    def holdings(self, mark: str) -> list[str]:
        """Descriptors and mappings of theirs whose file has this in its name."""
        found = []
        for pid in self.pids:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                found += [str(entry.readlink())]
            found += Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
        return [text for text in found if mark in text]

    def let_go(self) -> None:
        for fd in (self._release, self._held, self._ready, self._begun):
            os.close(fd)
        for pid in self.pids:
            os.waitpid(pid, 0)


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.let_go()


def and_fork(function: Callable[..., Any], children: Children) -> Callable[..., Any]:
    """What is returned does the same; another thread forks when it is done for the first time."""

    before = len(children.pids)

    def doing(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if len(children.pids) == before:
            children.fork_elsewhere()
        return found

    return doing


@forking
@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "link", "fstat"])
def test_a_child_forked_while_a_segment_is_made_or_opened_has_nothing_of_it(
    call: str, tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, and_fork(getattr(os, call), children))
        segment = OwnedSegment.make(NAME, 2 * vm.PAGE, directory=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", and_fork(os.fstat, children))
        fd = open_segment(segment.ref, directory=tmp_path)
    assert len(children.pids) == 2
    assert children.holdings(str(tmp_path)) == []
    os.fstat(fd)
    segment.close()


@forking
def test_a_descriptor_that_somebody_closed_does_not_leave_the_rest_to_a_child(
    monkeypatch: pytest.MonkeyPatch, ring: SlotRing, tmp_path: Path
) -> None:
    ours = {write(ring, 1).segment.fd, write(ring, 2).segment.fd}
    # Numbers that are not open, and some that a set goes over first: it goes by the lowest bits.
    closed = set(range(512_000, 512_064))

    def is_clean() -> bool:
        taken = threading.Event()

        def take() -> None:
            with no_fork():
                taken.set()

        threading.Thread(target=take, daemon=True).start()
        return taken.wait(LONG_S) and not open_fds().keys() & ours

    with Journal(tmp_path), monkeypatch.context() as patch:
        # For the fork alone: what is closed later has to leave the real set.
        patch.setattr(processes, "_PRIVATE", processes._PRIVATE | closed)
        assert forked(is_clean)


# ---- a finalizer waits for nothing ---------------------------------------------------------------


class Garbage:
    """What only the collector finds, wherever it happens to run."""

    def __init__(self, held: object) -> None:
        self.me = self
        self.held = held


def collects_while_forking(held: list[object]) -> bool:
    """Whether a thread that collects `held` comes back while another one holds off forks."""
    Garbage(held.pop())
    collected = threading.Event()

    def collect() -> None:
        gc.collect()
        collected.set()

    thread = threading.Thread(target=collect)
    with no_fork():
        thread.start()
        came_back = collected.wait(5.0)
    thread.join(LONG_S)
    return came_back


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_views_segments_and_journals_are_collected_while_another_thread_forks(
    tmp_path: Path,
) -> None:
    before = open_fds()
    ring = new_ring(1)
    held: list[object] = [[view_of(write(ring, 1)), ring, Journal(tmp_path)]]
    del ring
    assert collects_while_forking(held)
    assert open_fds() == before  # as soon as the fork is over
    Journal(tmp_path).close()


@forking
@pytest.mark.usefixtures("no_collections")
def test_a_fork_waits_for_a_lock_whose_holder_collects(tmp_path: Path, ring: SlotRing) -> None:
    # As logging's and the importer's: taken by a hook of the fork, which has the lock already.
    other = threading.Lock()
    held, forking_now = threading.Event(), threading.Event()
    Garbage([view_of(write(ring, 1)), Journal(tmp_path)])

    def collect() -> None:
        with other:
            held.set()
            assert forking_now.wait(LONG_S)
            gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    assert held.wait(LONG_S)
    with no_fork():
        forking_now.set()
        assert other.acquire(timeout=5.0)
        other.release()
        # A child that is forked now keeps nothing of it, and the parent gives it back.
        assert forked(lambda: not any(str(tmp_path) in path for path in open_fds().values()))
    thread.join(LONG_S)
    Journal(tmp_path).close()


def test_a_ctrl_c_while_a_finalizer_closes_leaves_the_lock_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted:
        """The lock, at the moment at which Ctrl-C is heard."""

        def acquire(self, *, blocking: bool) -> bool:
            lock.acquire(blocking)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

    lock = processes._FORKS
    fd = open_fd(os.memfd_create, "rl_bridge-test")
    monkeypatch.setattr(processes, "_FORKS", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        close_fd(fd)
    monkeypatch.undo()

    def open_and_close() -> None:
        close_fd(open_fd(os.open, os.devnull, os.O_RDONLY))

    thread = threading.Thread(target=open_and_close, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert fd not in open_fds(), "the next block closes it"
