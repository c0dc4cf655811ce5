"""The journal's lock file: whoever loses it lets go of it, and no forked child has it."""

import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.journal import Journal
from tests.helpers import forking, tracing


def locks_held(directory: Path) -> int:
    """Open descriptors of lock files in there, also of removed ones. Nothing is collected first."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue  # the descriptor of this very listing
    return sum(link.startswith(str(directory / "publisher.lock")) for link in links)


@forking
@pytest.mark.parametrize("moment", ["opened", "locked"])
def test_a_child_that_another_thread_forks_meanwhile_does_not_keep_the_directory(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, release = os.pipe()
    ready, begun = os.pipe()
    children: list[int] = []
    take = fcntl.flock

    def fork() -> None:
        children.append(os.fork())
        if children[0] == 0:
            os.close(release)
            os.write(begun, b"1")  # what has to be closed is closed
            os.read(held, 1)  # until the parent has tried
            os._exit(0)
        os.read(ready, 1)

    def locking(fd: int, how: int) -> None:
        if moment == "locked":
            take(fd, how)
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(30)
        if moment == "opened":
            take(fd, how)

    monkeypatch.setattr(fcntl, "flock", locking)
    try:
        with Journal(tmp_path) as journal:
            monkeypatch.undo()
            journal.reserve(1)
        assert children, "nothing was forked"
        with Journal(tmp_path) as again:
            assert again.last_version == 1
    finally:
        for end in (release, held, ready, begun):
            os.close(end)
        for child in children:
            os.waitpid(child, 0)


def test_a_lock_that_is_refused_is_let_go_of_whoever_keeps_the_refusal(tmp_path: Path) -> None:
    with Journal(tmp_path):
        with pytest.raises(WeightBridgeUnavailableError) as kept:
            Journal(tmp_path)
        assert locks_held(tmp_path) == 1
    assert "another live publisher" in str(kept.value)


def test_a_claim_that_finds_another_publishers_record_lets_go_of_the_lock_at_once(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path) as first:
        first.reserve(1)
        (tmp_path / "publisher.lock").unlink()
        with Journal(tmp_path) as second:
            second.reserve(7)
        with pytest.raises(WeightBridgeError, match="another publisher wrote there") as kept:
            first.reserve(8)
        assert locks_held(tmp_path) == 1, "the lost one's"
        with Journal(tmp_path) as third:  # although the refusal is still there to be read
            third.reserve(8)
    assert "expected" in str(kept.value)


def test_a_lock_that_was_taken_again_is_the_one_that_is_held_from_then_on(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(1)
        for version in (2, 3):
            (tmp_path / "publisher.lock").unlink()
            journal.reserve(version)
            assert locks_held(tmp_path) == 1
            with pytest.raises(WeightBridgeUnavailableError, match="another live publisher"):
                Journal(tmp_path)
    assert locks_held(tmp_path) == 0
    Journal(tmp_path).close()


def test_an_interrupt_between_two_locks_leaves_one_of_them_with_the_journal(
    tmp_path: Path,
) -> None:
    def tracer(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("journal.py"):
            return None
        if event == "return" and frame.f_code.co_name == "_acquire":
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    with Journal(tmp_path) as journal:
        journal.reserve(1)
        (tmp_path / "publisher.lock").unlink()
        with pytest.raises(KeyboardInterrupt), tracing(tracer):
            journal.reserve(2)
        # The new one, of the file that everybody sees.
        with pytest.raises(WeightBridgeUnavailableError, match="another live publisher"):
            Journal(tmp_path)
        journal.reserve(2)
    with Journal(tmp_path) as again:
        assert again.last_version == 2
