"""The journal when its publisher is killed or interrupted, or called from many threads."""

import fcntl
import linecache
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rl_bridge.errors import (
    VersionNotMonotonic,
)
from rl_bridge.journal import Journal
from rl_bridge.testing.processes import until
from tests.helpers import forking, tracing

# Each call of the operating system that `reserve` makes; the child dies just before it.
POINTS = ["open", "fsync", "replace", "fsync-directory", "return"]


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reserve_and_die(directory: Path, version: int, point: str) -> None:
    journal = Journal(directory)
    patch = pytest.MonkeyPatch()
    module = "rl_bridge.journal"
    if point == "open":
        patch.setattr(f"{module}.Path.open", _die)
    elif point == "fsync":
        patch.setattr(f"{module}.os.fsync", _die)
    elif point == "replace":
        patch.setattr(f"{module}.Path.replace", _die)
    elif point == "fsync-directory":
        patch.setattr(f"{module}.os.open", _die)
    journal.reserve(version)
    _die()


@forking
@pytest.mark.parametrize("point", POINTS)
def test_a_publisher_killed_while_it_claims_leaves_old_or_new_and_nothing_else(
    point: str, tmp_path: Path
) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(5)
        identity = journal.publisher_id
    child = os.fork()
    if child == 0:
        _reserve_and_die(tmp_path, 6, point)
    status = [0]

    def ended() -> bool:
        pid, status[0] = os.waitpid(child, os.WNOHANG)
        return pid == child

    until(ended, what="the child dies")
    assert os.WTERMSIG(status[0]) == signal.SIGKILL
    with Journal(tmp_path) as again:
        assert again.publisher_id == identity
        assert again.last_version == (6 if point in {"fsync-directory", "return"} else 5)
        again.reserve(7)


def _reserve_forever(directory: Path, progress: Any) -> None:
    journal = Journal(directory)
    version = journal.last_version or 0
    while True:
        version += 1
        journal.reserve(version)
        os.write(progress, f"{version}\n".encode())


@forking
def test_a_publisher_killed_at_any_moment_never_forgets_a_version_that_it_handed_out(
    tmp_path: Path,
) -> None:
    handed_out = 0
    for round_number in range(8):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _reserve_forever(tmp_path, write)
        os.close(write)
        # Kill it after a few more versions than last time: somewhere in the middle of the next.
        with os.fdopen(read) as lines:
            for _ in range(round_number + 1):
                handed_out = int(lines.readline())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            handed_out = max([handed_out, *(int(line) for line in lines if line.endswith("\n"))])
        with Journal(tmp_path) as journal:
            assert journal.last_version is not None
            assert journal.last_version >= handed_out
            with pytest.raises(VersionNotMonotonic):
                journal.check(handed_out)


def test_four_threads_that_claim_at_once_stay_monotonic(tmp_path: Path) -> None:
    taken: list[int] = []
    lock = threading.Lock()
    start = threading.Barrier(4)
    with Journal(tmp_path) as journal:

        def work() -> None:
            start.wait(30)
            for version in range(1, 13):
                try:
                    journal.reserve(version)
                except VersionNotMonotonic:
                    continue
                with lock:
                    taken.append(version)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(taken) == len(set(taken)), "a number was handed out twice"
        assert journal.last_version == max(taken) == 12


def test_an_interrupt_while_the_lock_is_taken_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fd: int, how: int) -> None:
        take(fd, how)
        raise KeyboardInterrupt

    take = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Journal(tmp_path)
    monkeypatch.undo()
    with Journal(tmp_path) as journal:
        journal.reserve(1)


class InterruptBehindTheLock:
    """Traces this thread; raises before the `number`-th line of the journal behind the lock's."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = number
        self.is_locked = self.struck = False
        self._take = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", self._locked)

    def _locked(self, fd: int, how: int) -> None:
        self._take(fd, how)
        self.is_locked = True

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("journal.py"):
            return None
        if self.is_locked and not self.struck and event == "line":
            # Leaving a with block is traced as its line, where Python itself never interrupts.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith("with "):
                self._left -= 1
                if self._left < 0:
                    self.struck = True
                    raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("has_lost_its_lock", [False, True])
def test_an_interrupt_anywhere_behind_the_lock_leaves_the_directory_to_the_next_claim(
    has_lost_its_lock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, struck = 0, True
    while struck:
        directory = tmp_path / str(number)
        journal = Journal(directory) if has_lost_its_lock else None
        if journal is not None:
            journal.reserve(1)
            (directory / "publisher.lock").unlink()
        tracer = InterruptBehindTheLock(number, monkeypatch)
        try:
            with tracing(tracer):
                if journal is None:
                    journal = Journal(directory)
                else:
                    journal.reserve(2)
        except KeyboardInterrupt:
            assert tracer.struck
        struck = tracer.struck
        with journal or Journal(directory) as again:
            again.reserve(3)
        with Journal(directory) as other:
            assert other.last_version == 3
        number += 1
    assert number > 5
