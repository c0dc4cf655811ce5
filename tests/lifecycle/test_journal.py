"""The journal: a number is never handed out twice, whatever happens to the publisher."""

import fcntl
import gc
import json
import os
import re
import signal
import stat
import threading
from pathlib import Path
from typing import Any

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


def record(directory: Path, **fields: object) -> dict[str, Any]:
    known = {"format": "rl_bridge.journal/1", "last_version": 5, "publisher_id": "a" * 32}
    found: dict[str, Any] = {**known, **fields}
    (directory / "publisher.json").write_text(json.dumps(found))
    return found


def test_versions_only_grow() -> None:
    journal = Journal()
    assert journal.last_version is None
    journal.reserve(0)
    journal.reserve(5)
    for version in (5, 4, 0):
        with pytest.raises(VersionNotMonotonic, match=f"ly: got {version}, .* was 5. Inc"):
            journal.reserve(version)
    assert journal.last_version == 5


def test_without_a_directory_each_publisher_is_a_stream_of_its_own(tmp_path: Path) -> None:
    one, other = Journal(), Journal()
    assert one.publisher_id != other.publisher_id
    assert re.fullmatch("[0-9a-f]{32}", one.publisher_id)
    one.reserve(7)
    other.reserve(1)
    one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_publisher_goes_on_under_its_id_and_cannot_reuse_a_number(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path / "state") as first:
        first.reserve(41)
        identity = first.publisher_id
    with Journal(tmp_path / "state") as second:
        assert (second.publisher_id, second.last_version) == (identity, 41)
        with pytest.raises(VersionNotMonotonic, match=f"publisher {identity} was 41"):
            second.reserve(41)
        second.reserve(42)


def test_a_publisher_that_claimed_nothing_leaves_no_record(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    assert not (tmp_path / "publisher.json").exists()


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format":"rl_bridge.journal/1"}',
        f'{{"last_version":5,"publisher_id":"{"a" * 32}"}}',
        "\xff",
        "[" * 99_999,
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "null",
        "no-fields",
        "format-only",
        "no-format",
        "no-ascii",
        "deep",
    ],
)
def test_a_damaged_record_is_never_guessed_at(text: str, tmp_path: Path) -> None:
    (tmp_path / "publisher.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        WeightBridgeError, match=r"(?s)damaged.*Move it away.*or restore it"
    ) as caught:
        Journal(tmp_path)
    assert type(caught.value) is WeightBridgeError
    assert str(tmp_path / "publisher.json") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "rl_bridge.journal/2"),
        ("last_version", "5"),
        ("last_version", True),
        ("last_version", -1),
        ("last_version", 5.0),
        ("last_version", None),
        ("publisher_id", "a" * 31),
        ("publisher_id", "A" * 32),
        ("publisher_id", "aa " * 16),
        ("publisher_id", "g" * 32),
        ("publisher_id", 7),
    ],
    ids=str,
)
def test_a_record_with_a_wrong_field_is_damaged(field: str, value: object, tmp_path: Path) -> None:
    record(tmp_path, **{field: value})
    with pytest.raises(WeightBridgeError, match="damaged"):
        Journal(tmp_path)


def test_a_damaged_record_does_not_keep_the_directory(tmp_path: Path) -> None:
    (tmp_path / "publisher.json").write_text("{")
    with pytest.raises(WeightBridgeError, match="damaged"):
        Journal(tmp_path)
    (tmp_path / "publisher.json").unlink()
    Journal(tmp_path).close()


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


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.close()
    journal.close()


def test_a_closed_journal_claims_nothing(tmp_path: Path) -> None:
    # Its directory may belong to another publisher by now, whose record it would overwrite.
    old = Journal(tmp_path)
    old.close()
    with Journal(tmp_path) as new:
        new.reserve(5)
        with pytest.raises(BridgeClosed):
            old.reserve(3)
    assert json.loads((tmp_path / "publisher.json").read_text())["last_version"] == 5


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
        with Journal(tmp_path) as second:  # goes on behind what is written there
            assert second.last_version == (None if is_emptied else 1)
            second.reserve(7)
            with pytest.raises(WeightBridgeError, match="another publisher may have come"):
                first.reserve(8)


# ---- threads and kills --------------------------------------------------------------------------


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
