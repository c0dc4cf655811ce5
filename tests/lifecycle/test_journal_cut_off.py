"""The journal when its publisher is killed or interrupted, or called from many threads."""

import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import (
    VersionNotMonotonic,
)
from rl_bridge.lifecycle.journal import Journal
from rl_bridge.testing.processes import until
from tests.helpers import forking

# Each call of the operating system that `reserve` makes; the child dies just before it.
POINTS = ["open", "fsync", "replace", "fsync-directory", "return"]


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reserve_and_die(directory: Path, version: int, point: str) -> None:
    journal = Journal(directory)
    patch = pytest.MonkeyPatch()
    module = "rl_bridge.lifecycle.journal"
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
