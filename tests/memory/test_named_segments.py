"""Named segments, the explicit second way: checked when opened, swept when their owner is dead."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.errors import BadSegmentName, SegmentError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.control import RECORD_NBYTES
from rl_bridge.memory.segment import OwnedSegment, open_segment, still_there, sweep
from rl_bridge.testing.processes import Child, until
from tests.helpers import open_fds

NAME = "rlb-0123456789ab-1.seg"


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[OwnedSegment]:
    made = OwnedSegment.make(NAME, 2 * vm.PAGE, directory=tmp_path)
    yield made
    made.close()


def test_a_named_segment_is_a_private_file_that_goes_with_its_owner(
    segment: OwnedSegment, tmp_path: Path
) -> None:
    path = tmp_path / NAME
    assert segment.ref.kind == "file"
    assert (segment.ref.name, segment.ref.fd) == (NAME, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    vm.store(segment.address, b"bytes")
    assert path.read_bytes()[:5] == b"bytes"
    assert still_there(segment.ref, directory=tmp_path)
    segment.close()
    assert not path.exists()
    assert not still_there(segment.ref, directory=tmp_path)
    assert not still_there(segment.ref)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "passwd",
        "../" + NAME,
        "/etc/passwd",
        "sub/" + NAME,
        NAME + "/",
        NAME + "\n",
        NAME + "\0",
        "rlb-0123456789AB-1.seg",
        "rlb-0123456789ab-1.seg.bak",
        "rlb-0123456789ab-x.seg",
        "rlb-0123456789ab-\u0661.seg",
        "rlb-0123456789abc-control",
    ],
)
def test_a_name_that_is_no_plain_segment_name_is_refused(
    name: str, segment: OwnedSegment, tmp_path: Path
) -> None:
    ref = segment.ref.model_copy(update={"name": name})
    with pytest.raises(BadSegmentName, match="no plain segment name"):
        open_segment(ref, directory=tmp_path)


def test_a_full_file_system_says_so_before_any_byte_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.segment.os.posix_fallocate", full)
    with pytest.raises(SegmentError, match="No space left"):
        OwnedSegment.make(NAME, vm.PAGE, directory=tmp_path)
    assert open_fds() == before
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_not_overwritten(segment: OwnedSegment, tmp_path: Path) -> None:
    before = (tmp_path / NAME).stat().st_ino
    with pytest.raises(SegmentError, match="exists"):
        OwnedSegment.make(NAME, vm.PAGE, directory=tmp_path)
    assert (tmp_path / NAME).stat().st_ino == before


# ---- the sweep ----------------------------------------------------------------------------------


class Owner:
    """The owner of named segments, in a process of its own."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.segments = [
            OwnedSegment.make(name, vm.PAGE, directory=directory, writers="control" in name)
            for name in names
        ]


def test_the_sweep_removes_what_a_killed_owner_left_and_spares_the_living(
    segment: OwnedSegment, tmp_path: Path
) -> None:
    left = ["rlb-aaaaaaaaaaaa-1.seg", "rlb-aaaaaaaaaaaa-control"]
    with Child(Owner, directory=tmp_path, names=left) as owner:
        owner.ready()
        assert sweep(tmp_path) == []
        owner.kill()
    expected = [(name, vm.PAGE) for name in left]
    until(lambda: sweep(tmp_path, dry_run=True) == expected, what="the dead owner is noticed")
    assert all((tmp_path / name).exists() for name in left)
    assert sweep(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert sweep(tmp_path) == []


def test_an_owner_that_ends_without_closing_leaves_no_file(tmp_path: Path) -> None:
    with Child(Owner, directory=tmp_path, names=[NAME]) as owner:
        owner.ready()
        assert (tmp_path / NAME).exists()
        assert owner.stop() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "somebody else's"], ids=["removed", "replaced"])
def test_closing_leaves_what_others_put_in_its_place(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / NAME
    made = OwnedSegment.make(NAME, vm.PAGE, directory=tmp_path)
    path.unlink()
    if content is not None:
        path.write_text(content)
    made.close()
    assert (path.read_text() if path.exists() else None) == content


def test_a_closed_segment_that_dies_late_does_not_take_its_successors_name(tmp_path: Path) -> None:
    # A publisher that restarts in this process: the same name, and the same descriptor number.
    old = OwnedSegment.make(NAME, vm.PAGE, directory=tmp_path)
    number = old.fd
    old.close()
    new = OwnedSegment.make(NAME, vm.PAGE, directory=tmp_path)
    assert new.fd == number
    del old
    gc.collect()
    assert (tmp_path / NAME).exists()
    new.close()
    assert not (tmp_path / NAME).exists()


def test_the_sweep_leaves_everything_else_alone(tmp_path: Path) -> None:
    others = ["notes.txt", "rlb-notes", "rlb-0123456789ab-1.seg.bak", "rlb-XXXXXXXXXXXX-1.seg"]
    for name in others:
        (tmp_path / name).write_text("x")
    (tmp_path / "rlb-000000000000-1.seg").symlink_to(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "rlb-000000000000-2.seg")  # nobody's: it must not be waited for
    assert sweep(tmp_path) == [("rlb-000000000000-2.seg", 0)]
    assert {path.name for path in tmp_path.iterdir()} == {*others, "rlb-000000000000-1.seg"}


def test_a_control_segments_readers_do_not_make_its_owner_look_alive(tmp_path: Path) -> None:
    name = "rlb-aaaaaaaaaaaa-control"
    with Child(Owner, directory=tmp_path, names=[name]) as owner:
        owner.ready()
        owner.kill()
    path = tmp_path / name
    with path.open("r+b") as file:
        assert leases.try_exclusive(file.fileno(), start=RECORD_NBYTES, length=RECORD_NBYTES)
        until(lambda: sweep(tmp_path, dry_run=True), what="the dead owner is noticed")
