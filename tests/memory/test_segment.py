"""Sealed segments: nobody else writes, truncates, replaces or outlives them."""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.errors import SegmentError, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.segment import (
    OwnedSegment,
    SegmentRef,
    open_segment,
    process_start_time,
)
from rl_bridge.processes import close_fd
from rl_bridge.testing.processes import Child
from tests.helpers import open_fds


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    made = OwnedSegment.make("rl_bridge-test", 3 * vm.PAGE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(Stranger) as process:
        yield process


class Stranger:
    """Another process of the same user, which got nothing but a reference."""

    def attack(self, ref: dict[str, Any]) -> dict[str, str]:
        return _attack(SegmentRef(**ref))


def ref_to(fd: int, nbytes: int = vm.PAGE) -> SegmentRef:
    """A reference to a descriptor of this process, right in all that the kernel tells."""
    status = os.fstat(fd)
    return SegmentRef(
        kind="memfd",
        device=status.st_dev,
        inode=status.st_ino,
        nbytes=nbytes,
        pid=os.getpid(),
        start_time=process_start_time(os.getpid()) or 0,
        fd=fd,
    )


def changed(ref: SegmentRef, **fields: Any) -> SegmentRef:
    return ref.model_copy(update=fields)


def refused(ref: SegmentRef, said: str, **options: Any) -> None:
    before = open_fds()
    with pytest.raises(SegmentError, match=said):
        open_segment(ref, **options)
    assert open_fds().keys() == before.keys(), "a refused segment leaves no descriptor"


# ---- what a segment is --------------------------------------------------------------------------


def test_a_segment_that_cannot_be_made_says_so_and_leaves_nothing() -> None:
    before = open_fds()
    with pytest.raises(SegmentError, match=r"shared memory 'big' needs .*Free memory"):
        OwnedSegment.make("big", 1 << 60)
    assert open_fds() == before


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_this_processs_own_shortage_is_told_from_a_segment_that_is_gone(
    code: int, segment: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.memory.segment.os.open", short)
        with pytest.raises(WeightBridgeUnavailableError, match="Free some and try again"):
            open_segment(segment.ref)
    close_fd(open_segment(segment.ref))


# ---- seals --------------------------------------------------------------------------------------


def _attack(ref: SegmentRef) -> dict[str, str]:
    """What another process of the same user gets when it tries."""
    found = {}
    fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR)
    attempts: dict[str, Callable[[], object]] = {
        "truncate": lambda: os.ftruncate(fd, 0),
        "grow": lambda: os.ftruncate(fd, 2 * ref.nbytes),
        "write": lambda: os.pwrite(fd, b"x", 0),
        "map writable": lambda: mmap.mmap(fd, ref.nbytes, mmap.MAP_SHARED),
        "punch a hole": lambda: _punch(fd, ref.nbytes),
        "unseal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
        "read": lambda: os.pread(fd, 1, 0),
        "map readable": lambda: mmap.mmap(fd, ref.nbytes, mmap.MAP_SHARED, mmap.PROT_READ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = type(error).__name__
    os.close(fd)
    return found


def _punch(fd: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    status: int = libc.fallocate(fd, 3, 0, nbytes)
    if status:  # PUNCH_HOLE | KEEP_SIZE
        raise OSError(ctypes.get_errno(), "fallocate")


def test_another_process_can_read_and_do_nothing_else(segment: OwnedSegment, child: Child) -> None:
    assert child.call("attack", ref=segment.ref.model_dump()) == {
        "truncate": "PermissionError",
        "grow": "PermissionError",
        "write": "PermissionError",
        "map writable": "PermissionError",
        "punch a hole": "PermissionError",
        "unseal": "PermissionError",
        "read": "done",
        "map readable": "done",
    }
    assert ctypes.string_at(segment.address, 1) == b"\0"


def test_a_control_segment_can_be_written_but_not_resized_by_others(child: Child) -> None:
    segment = OwnedSegment.make("rl_bridge-test", vm.PAGE, writers=True)
    found = child.call("attack", ref=segment.ref.model_dump())
    assert (found["write"], found["map writable"]) == ("done", "done")
    assert (found["truncate"], found["grow"], found["unseal"]) == ("PermissionError",) * 3
    segment.close()


# ---- opening ------------------------------------------------------------------------------------


def test_another_inode_size_or_process_is_refused(segment: OwnedSegment) -> None:
    ref = segment.ref
    other = OwnedSegment.make("rl_bridge-test", segment.nbytes)
    refused(changed(ref, fd=other.fd), r"was replaced: expected .* found .* publish again")
    refused(changed(ref, inode=ref.inode + 1), "was replaced")
    refused(changed(ref, device=ref.device + 1), "was replaced")
    refused(changed(ref, nbytes=ref.nbytes * 2), f"has {ref.nbytes} bytes, the manifest says")
    refused(changed(ref, start_time=ref.start_time + 1), r"the publisher \(pid \d+\) is gone")
    refused(changed(ref, pid=2**40), "is gone or not visible.*shared directory=")
    refused(changed(ref, fd=9999), "cannot be opened.*publish again")
    other.close()


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    if kind == "pipe":
        fds = list(os.pipe())
    elif kind == "socket":
        fds = [end.detach() for end in socket.socketpair()]
    elif kind == "directory":
        fds = [os.open(tmp_path, os.O_RDONLY)]
    else:
        fds = [os.open("/dev/null", os.O_RDONLY)]
    refused(ref_to(fds[0], 0), "was replaced")
    for fd in fds:
        os.close(fd)


def test_an_unsealed_memfd_or_a_plain_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(vm.PAGE))
    with path.open("rb") as file:
        refused(ref_to(file.fileno()), "is not sealed")
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, vm.PAGE)
    ref = ref_to(fd)
    refused(ref, "is not sealed.*its owner could change it")
    # A segment that others may write is no place for weights.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 2 | 4)
    refused(ref, "is not sealed")
    close_fd(open_segment(ref, writable=True))
    os.close(fd)


# ---- processes ----------------------------------------------------------------------------------


def test_a_command_name_with_brackets_does_not_confuse_the_start_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "7 (a) b ) c) S " + " ".join(str(field) for field in range(4, 53))
    monkeypatch.setattr(Path, "read_text", lambda *_: line)
    assert process_start_time(7) == 22


def test_an_owner_that_was_killed_and_not_waited_for_is_gone(segment: OwnedSegment) -> None:
    with subprocess.Popen(["sleep", "99"], stdin=segment.fd) as owner:
        start_time = process_start_time(owner.pid)
        ref = changed(segment.ref, pid=owner.pid, start_time=start_time, fd=0)
        close_fd(open_segment(ref))
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        refused(ref, r"the publisher \(pid \d+\) is gone")


# ---- what cannot be made, and what may not be opened --------------------------------------------


def test_more_memory_than_there_is_is_refused_before_it_is_written_to() -> None:
    # A petabyte: were it not refused, it could not even be mapped.
    expanded = torch.ones(1, dtype=torch.uint8).expand(1 << 50)
    with make_weight_bridge("shared-memory") as bridge:
        with pytest.raises(SegmentError, match=r"needs 11\d{14} bytes, and \d+ are"):
            bridge.publish({"w": expanded}, weight_version=1)
        bridge.publish({"w": expanded[:4]}, weight_version=1)


MACHINE = {"MemAvailable:": 100_000, "SwapFree:": 0}
STAT = {"anon": 7, "active_file": 20, "inactive_file": 300}


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
    ids=["v2", "v1"],
)
def test_the_limit_of_an_outer_cgroup_counts_and_its_cached_files_do_not(
    limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    monkeypatch.setattr(vm, "_memory_cgroups", lambda: [group, group.parent])
    monkeypatch.setattr(vm, "_numbers", lambda path: MACHINE if "proc" in str(path) else STAT)
    (group / limit).write_text("max\n")
    (group / used).write_text("5\n")
    assert vm.available_memory() == 1024 * 100_000
    (group.parent / limit).write_text("10000\n")
    (group.parent / used).write_text("9000\n")
    assert vm.available_memory() == 10000 - 9000 + 20 + 300


def test_without_proc_nothing_is_published_that_nobody_could_import() -> None:
    script = (
        "import torch, rl_bridge\n"
        "from rl_bridge.transports.registry import probe\n"
        "print(probe('shared-memory').cause)\n"
        "try: rl_bridge.make_weight_bridge('shared-memory').publish("
        "{'w': torch.ones(1)}, weight_version=1)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    hide = 'mount -t tmpfs none /proc && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"this machine lets nobody hide /proc: {done.stderr[-200:]}")
    cause, refusal = done.stdout.splitlines()
    assert cause.startswith("/proc does not show this process")
    assert refusal == f"SegmentError {cause}"


class OfAnotherUser:
    """A consumer that is nobody's, in a process of its own."""

    def __init__(self) -> None:
        self.bridge = make_weight_bridge("shared-memory")
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)

    def imported(self, text: str) -> str:
        try:
            self.bridge.import_update(text)
        except WeightBridgeError as error:
            return f"{type(error).__name__}: {error}"
        return "imported"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_so_and_rejects_nothing() -> None:
    with make_weight_bridge("shared-memory") as trainer, Child(OfAnotherUser) as other:
        manifest = trainer.publish({"w": torch.ones(3)}, weight_version=1)
        for _ in range(2):  # the second time as the first: it is not rejected
            said = other.call("imported", text=manifest.to_json())
            assert said.startswith("WeightBridgeUnavailableError: ")
            assert "Permission denied" in said
            assert "another user" in said
            assert "Run both sides as one user" in said
