"""The journal: a number is never handed out twice, whatever happens to the publisher."""

import errno
import fcntl
import gc
import json
import os
import re
import signal
import stat
import threading
from pathlib import Path

import pytest

from rl_bridge.errors import (
    BridgeClosed,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.journal import Journal
from rl_bridge.testing.processes import Child, ChildError, until
from tests.helpers import forked, forking


def test_without_a_directory_each_publisher_is_a_stream_of_its_own(tmp_path: Path) -> None:
    one, other = Journal(), Journal()
    assert one.publisher_id != other.publisher_id
    assert re.fullmatch("[0-9a-f]{32}", one.publisher_id)
    one.reserve(7)
    other.reserve(1)
    with pytest.raises(VersionNotMonotonic, match=r"ly: got 1, .* was 1\. Inc"):
        other.reserve(1)
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_publisher_goes_on_under_its_id_and_cannot_reuse_a_number(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path / "state") as first:
        assert first.last_version is None
        first.reserve(41)
        identity = first.publisher_id
    with Journal(tmp_path / "state") as second:
        assert (second.publisher_id, second.last_version) == (identity, 41)
        with pytest.raises(VersionNotMonotonic, match=f"publisher {identity} was 41"):
            second.reserve(41)
        second.reserve(42)


def test_the_record_is_on_disk_before_the_version_is_handed_out(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(3)
        assert json.loads((tmp_path / "publisher.json").read_text()) == {
            "format": "rl_bridge.journal/1",
            "last_version": 3,
            "publisher_id": journal.publisher_id,
        }
        assert {path.name for path in tmp_path.iterdir()} == {"publisher.json", "publisher.lock"}


def test_a_record_that_cannot_be_written_leaves_the_version_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with Journal(tmp_path) as journal:
        journal.reserve(1)
        with monkeypatch.context() as patch:
            patch.setattr("rl_bridge.journal.os.fsync", full)
            with pytest.raises(WeightBridgeError, match=r"version 2 was not published.*No space"):
                journal.reserve(2)
        assert journal.last_version == 1
        journal.reserve(2)


# ---- damage -------------------------------------------------------------------------------------


GOOD = {"format": "rl_bridge.journal/1", "last_version": 5, "publisher_id": "a" * 32}
DAMAGE = {
    "empty": "",
    "cut": "{",
    "list": "[]",
    "no-fields": "{}",
    "no-format": json.dumps({**GOOD, "format": None}),
    "no-ascii": "\xff",
    "deep": "[" * 99_999,
    "other-format": json.dumps({**GOOD, "format": "rl_bridge.journal/2"}),
    **{
        f"{field}={value}": json.dumps({**GOOD, field: value})
        for field, values in {
            "last_version": ["5", True, -1, 5.0, None],
            "publisher_id": ["a" * 31, "A" * 32, "aa " * 16, "g" * 32, 7],
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_record_is_never_guessed_at_and_does_not_keep_the_directory(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "publisher.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        WeightBridgeError, match=r"(?s)damaged.*Move it away.*or restore it"
    ) as caught:
        Journal(tmp_path)
    assert type(caught.value) is WeightBridgeError
    assert str(tmp_path / "publisher.json") in str(caught.value)
    (tmp_path / "publisher.json").write_text(json.dumps(GOOD))
    with Journal(tmp_path) as journal:
        assert (journal.last_version, journal.publisher_id) == (5, "a" * 32)


def test_the_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Journal(tmp_path / "state").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_directory_that_cannot_be_one_is_a_bridge_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightBridgeError, match=str(tmp_path / "file")):
        Journal(tmp_path / "file")


# ---- who owns the directory ---------------------------------------------------------------------


def test_a_second_live_publisher_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path):
        with pytest.raises(WeightBridgeUnavailableError, match=r"another live publisher.*Stop it"):
            Journal(tmp_path)
        with (
            Child(Journal, state_dir=tmp_path) as child,
            pytest.raises(ChildError, match="another live publisher") as caught,
        ):
            child.ready()
        assert caught.value.kind == WeightBridgeUnavailableError.__name__
    with Journal(tmp_path):
        pass


def test_a_journal_that_is_dropped_without_a_close_gives_directory_and_descriptor_back(
    tmp_path: Path,
) -> None:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is needed
    for version in range(3):
        Journal(tmp_path).reserve(version)
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_closed_journal_claims_nothing(tmp_path: Path) -> None:
    # Its directory may belong to another publisher by now, whose record it would overwrite.
    old = Journal(tmp_path)
    for _ in range(2):
        old.close()
    with Journal(tmp_path) as new:
        new.reserve(5)
        with pytest.raises(BridgeClosed):
            old.reserve(3)
    assert json.loads((tmp_path / "publisher.json").read_text())["last_version"] == 5


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


@forking
def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    held, release = os.pipe()
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.write(started, b"1")
        os.read(held, 1)  # until the parent has tried
        os._exit(0)
    os.close(held)
    os.close(started)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    try:
        journal.close()
        Journal(tmp_path).close()
    finally:
        os.close(release)
        os.waitpid(child, 0)


@forking
def test_a_forked_child_cannot_claim_in_its_parents_name(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.reserve(1)

        def claims() -> bool:
            with pytest.raises(BridgeClosed):
                journal.reserve(2)
            journal.close()
            return True

        assert forked(claims)
        with pytest.raises(WeightBridgeUnavailableError, match="another live publisher"):
            Journal(tmp_path)  # the parent still owns the directory
        journal.reserve(2)


@forking
def test_forking_while_a_version_is_being_claimed_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A data loader's fork, while the publishing thread waits for the disk.
    inside, go_on = threading.Event(), threading.Event()
    with Journal(tmp_path) as journal:
        fsync = os.fsync

        def slow(fd: int) -> None:
            inside.set()
            go_on.wait(30)
            fsync(fd)

        monkeypatch.setattr("rl_bridge.journal.os.fsync", slow)
        thread = threading.Thread(target=journal.reserve, args=(1,))
        thread.start()
        assert inside.wait(30)
        try:
            assert forked(lambda: True)
        finally:
            go_on.set()
            thread.join(30)
        assert journal.last_version == 1


# ---- a lock file that something removed ---------------------------------------------------------


@pytest.mark.parametrize("is_emptied", [False, True], ids=["lock-file", "everything"])
def test_a_publisher_whose_lock_file_was_removed_hands_out_nothing(
    is_emptied: bool, tmp_path: Path
) -> None:
    with Journal(tmp_path) as first:
        first.reserve(1)
        for path in list(tmp_path.iterdir()) if is_emptied else [tmp_path / "publisher.lock"]:
            path.unlink()
        for _ in range(2):
            with pytest.raises(WeightBridgeError, match=r"version 2 was not.*lock file.*removed"):
                first.reserve(2)
        assert first.last_version == 1
        with Journal(tmp_path) as second:  # goes on from what is written there
            assert second.last_version == (None if is_emptied else 1)
            second.reserve(7)
            with pytest.raises(WeightBridgeError, match="another publisher may have come"):
                first.reserve(8)


# ---- threads and kills --------------------------------------------------------------------------


# Each call of the operating system that `reserve` makes; the child dies just before it.
POINTS = ["open", "fsync", "rename", "fsync-directory", "return"]


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reserve_and_die(directory: Path, version: int, point: str) -> None:
    journal = Journal(directory)
    patch = pytest.MonkeyPatch()
    called = {
        "open": "os.open",
        "fsync": "os.fsync",
        "rename": "Path.rename",
        "fsync-directory": "sync_folder",
    }
    if point in called:
        patch.setattr(f"rl_bridge.memory.durable.{called[point]}", _die)
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


def test_a_file_system_without_locks_is_not_taken_for_another_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(WeightBridgeError, match=r"cannot be used: .*file system"):
        Journal(tmp_path)
