"""No deadlock through the garbage collector: whoever waits for a fork holds no other lock.

A collection may run in the middle of anything, also where a thread holds `FORKS`; what dies there
takes the lock of its slot, or of its publisher's control segment.
"""

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import processes as forks
from rl_bridge.cuda.host import HostDriver
from rl_bridge.cuda.owners import Allocation
from rl_bridge.journal import Journal
from rl_bridge.memory import holding
from rl_bridge.memory.control import ControlReader, ControlWriter, UpdateReport, control_nbytes
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import SlotRing
from rl_bridge.processes import FORKS, SETTLING
from tests.helpers import forked, forking, open_fds
from tests.memory.slots_rig import new_ring, view_of, write

LONG_S = 30.0


@pytest.fixture
def ring() -> Iterator[SlotRing]:
    made = new_ring(2)
    yield made
    made.close()


@pytest.fixture
def disposing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as something begins to give its descriptors back."""
    begun, dispose = threading.Event(), Holding.dispose

    def telling(self: Holding) -> None:
        begun.set()
        dispose(self)

    monkeypatch.setattr(Holding, "dispose", telling)
    return begun


def gets_through(
    dies: Callable[[], object], *, beside: Callable[[], object], until: threading.Event
) -> bool:
    """Whether `dies` comes back while `beside` waits, in another thread, for a fork to be over."""
    through = threading.Event()

    def dying() -> None:
        dies()
        through.set()

    threads = [threading.Thread(target=beside), threading.Thread(target=dying)]
    with FORKS:
        threads[0].start()
        assert until.wait(LONG_S)
        threads[1].start()
        got_through = through.wait(5.0)
    for thread in threads:
        thread.join(LONG_S)
    return got_through


def test_a_tensor_may_die_while_its_slots_end_waits_for_a_fork(
    ring: SlotRing, disposing: threading.Event
) -> None:
    view = view_of(write(ring, 1))
    assert gets_through(view.settle, beside=view.retire, until=disposing)


def test_a_tensor_may_report_while_the_way_backs_end_waits_for_a_fork(
    disposing: threading.Event,
) -> None:
    segment = OwnedSegment.make("rl_bridge-test", control_nbytes(2), writers=True)
    reader = ControlReader(segment, "c" * 32)
    writer = ControlWriter(segment.ref, "c" * 32, worker="r", rank=0, directory=None)
    news = UpdateReport(update_id="1" * 32, weight_version=1, state="released")
    assert gets_through(lambda: writer.report(news), beside=writer.close, until=disposing)
    reader.close()


def test_journals_and_segments_wait_for_the_same_lock(tmp_path: Path) -> None:
    before = open_fds()
    journal = Journal(tmp_path)
    ended = threading.Event()

    def end() -> None:
        journal.close()
        ended.set()

    with FORKS:
        thread = threading.Thread(target=end)
        thread.start()
        assert not ended.wait(0.1)
    thread.join(LONG_S)
    assert ended.is_set()
    assert open_fds() == before


# ---- a finalizer waits for nothing ---------------------------------------------------------------


class Garbage:
    """What only the collector finds, wherever it happens to run."""

    def __init__(self, held: object) -> None:
        self.me = self
        self.held = held


def collects_while_forking(held: list[object]) -> bool:
    """Whether a thread that collects `held` comes back while another one holds `FORKS`."""
    Garbage(held.pop())
    collected = threading.Event()

    def collect() -> None:
        gc.collect()
        collected.set()

    thread = threading.Thread(target=collect)
    with SETTLING, FORKS:
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


@pytest.mark.usefixtures("no_collections")
def test_memory_and_descriptors_of_a_driver_are_collected_while_another_thread_forks() -> None:
    before, driver = open_fds(), HostDriver()
    allocation = Allocation.create(driver, driver.granularity())
    held: list[object] = [[allocation.export(), allocation]]
    del allocation
    assert collects_while_forking(held)
    assert open_fds() == before
    assert driver.live().handles == 0


@forking
@pytest.mark.usefixtures("no_collections")
def test_a_fork_waits_for_a_lock_whose_holder_collects(tmp_path: Path, ring: SlotRing) -> None:
    # As logging's and the importer's: taken by a hook of the fork, with `FORKS` held already.
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
    with SETTLING, FORKS:
        forking_now.set()
        assert other.acquire(timeout=5.0)
        other.release()
        # A child that is forked now keeps nothing of it, and the parent gives it back.
        assert forked(lambda: not any(str(tmp_path) in path for path in open_fds().values()))
    thread.join(LONG_S)
    Journal(tmp_path).close()


def test_whoever_exports_memory_does_not_keep_forks_waiting_for_the_drivers_lock() -> None:
    driver = HostDriver()
    allocation = Allocation.create(driver, driver.granularity())
    exported = threading.Event()

    def export() -> None:
        allocation.export().close()
        exported.set()

    thread = threading.Thread(target=export)
    with driver._lock:  # a collection in here may come to close_fd
        thread.start()
        assert not exported.wait(0.1)
        is_free = FORKS.acquire(timeout=5.0)
        if is_free:
            FORKS.release()
    thread.join(LONG_S)
    assert is_free
    assert exported.is_set()
    allocation.close()


# ---- what a forked child does first -------------------------------------------------------------


@forking
def test_a_descriptor_that_somebody_closed_does_not_leave_the_rest_to_a_child(
    monkeypatch: pytest.MonkeyPatch, ring: SlotRing, tmp_path: Path
) -> None:
    ours = {write(ring, 1).segment.fd, write(ring, 2).segment.fd}
    # Numbers that are not open, and some that a set goes over first: it goes by the lowest bits.
    closed = set(range(512_000, 512_064))
    # Put into the child's set alone: what this test closes has to leave the real one, whose numbers
    # later children close.
    private = holding._PRIVATE_FDS
    monkeypatch.setattr(forks, "_IN_CHILD", [lambda: private.update(closed), *forks._IN_CHILD])

    def is_clean() -> bool:
        taken = threading.Event()

        def take() -> None:
            with FORKS:
                taken.set()

        threading.Thread(target=take, daemon=True).start()
        return taken.wait(LONG_S) and not open_fds().keys() & ours

    with Journal(tmp_path):
        assert forked(is_clean)


@forking
def test_a_clean_up_that_fails_does_not_keep_the_next_one_from_a_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def failing() -> None:
        raise RuntimeError

    monkeypatch.setattr(forks, "_IN_CHILD", [failing, lambda: done.append("second")])
    assert forked(lambda: done == ["second"])


class _Growing(deque[Callable[[], object]]):
    """Another thread adds something whenever somebody has just looked at it, for a while."""

    left = 3

    def _grow(self) -> None:
        if self.left:
            self.left -= 1
            self.append(lambda: None)

    def __iter__(self) -> Iterator[Callable[[], object]]:
        found = super().__iter__()
        self._grow()
        return found

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self._grow()
        return found


def test_what_another_thread_adds_meanwhile_is_done_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, done = _Growing(), list[int]()
    monkeypatch.setattr(forks, "_LATE", late)
    forks.undisturbed(lambda: done.append(1))
    assert done == [1]
    assert len(late) == 0


class _Emptied(list[int]):
    """A finalizer takes the last one whenever somebody has just seen that there is one."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        self.clear()
        return found


def test_a_holding_that_a_finalizer_closes_meanwhile_is_closed() -> None:
    held = Holding()
    fd = held.open(os.memfd_create, "closed in between")
    held.fds = _Emptied(held.fds)
    held.dispose()
    assert not held.fds
    os.close(fd)  # the finalizer would have
