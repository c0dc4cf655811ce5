"""Interrupts and forks in the middle of making or opening a segment: no memory is lost.

An interrupt before any line of a first publication, or a first import: what the process holds
afterwards is what it held before. Ctrl-C while the kernel works, and forks in another thread.
"""

import gc
import linecache
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, open_segment, sweep
from tests.helpers import forking, tracing
from tests.memory.slots_rig import new_ring, view_of, write

NAME = "rlb-0123456789ab-1.seg"
WEIGHTS = {"weight": torch.ones(5000)}


class InterruptBefore:
    """Traces this thread and raises before the `number`-th line that opens or maps, once."""

    LOOKED_AT = ("/rl_bridge/memory/", "/rl_bridge/transports/")

    def __init__(self, number: int) -> None:
        self._left = number
        self.struck = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        # Whatever else is called is asked about by itself; once struck, nothing is.
        if self.struck or not is_looked_at(file):
            return None
        if event == "line" and not is_leaving(file, frame.f_lineno):
            self._left -= 1
            if self._left < 0:
                line = linecache.getline(file, frame.f_lineno).strip()
                self.struck = f"{file}:{frame.f_lineno}: {line}"
                raise KeyboardInterrupt
        return self


@cache
def is_looked_at(file: str) -> bool:
    return any(part in file for part in InterruptBefore.LOOKED_AT)


@cache
def is_leaving(file: str, number: int) -> bool:
    """Leaving a with block is traced as its line, where Python itself never interrupts."""
    return linecache.getline(file, number).strip().startswith("with ")


@pytest.fixture
def nobody_keeps_garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is there already is not collected again and again; no hook keeps exceptions."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    if was_frozen:  # as somebody wanted it for all tests
        gc.collect()
        gc.freeze()


def holdings(directory: Path | None) -> tuple[Counter[str], Counter[str], list[str]]:
    """Descriptors and mappings of segments, and names in the directory."""
    gc.collect()
    marks = ("rlb-", "memfd:", "/#") if directory is None else ("rlb-", str(directory))
    links = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with suppress(OSError):  # the descriptor of this very listing
            links.append(str(Path(f"/proc/self/fd/{entry}").readlink()))
    lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    mapped = [line.split(maxsplit=5)[-1] for line in lines if any(mark in line for mark in marks)]
    names = [] if directory is None else sorted(path.name for path in directory.iterdir())
    return (
        Counter(link for link in links if any(mark in link for mark in marks)),
        Counter(name for name in mapped if any(mark in name for mark in marks)),
        names,
    )


def interrupted(number: int, action: Callable[[], object]) -> str:
    """Do it, interrupted before a line; which one, or empty if it was over before."""
    tracer = InterruptBefore(number)
    with suppress(KeyboardInterrupt), tracing(tracer):
        action()
    return tracer.struck


@pytest.mark.usefixtures("nobody_keeps_garbage")
@pytest.mark.parametrize("is_named", [False, True], ids=["memfd", "file"])
def test_an_interrupt_before_any_line_of_a_first_publication_loses_no_memory(
    is_named: bool, tmp_path: Path
) -> None:
    directory = tmp_path if is_named else None
    before = holdings(directory)
    number, struck = 0, "begin"
    while struck:
        trainer = SharedMemoryTensorBridge(suspicious="off", directory=directory)
        struck = interrupted(number, partial(trainer.publish, WEIGHTS, weight_version=1))
        trainer.close()
        del trainer
        assert holdings(directory) == before, f"interrupted before {struck}"
        number += 1
    assert number > 200


@pytest.mark.usefixtures("nobody_keeps_garbage")
@pytest.mark.parametrize("is_named", [False, True], ids=["memfd", "file"])
def test_an_interrupt_before_any_line_of_a_first_import_loses_no_memory(
    is_named: bool, tmp_path: Path
) -> None:
    directory = tmp_path if is_named else None
    with SharedMemoryTensorBridge(suspicious="off", directory=directory) as trainer:
        manifest = trainer.publish(WEIGHTS, weight_version=1)
        before = holdings(directory)
        number, struck = 0, "begin"
        while struck:
            rollout = SharedMemoryTensorBridge(source_worker="rollout", directory=directory)
            struck = interrupted(number, partial(rollout.import_update, manifest))
            rollout.close()
            del rollout
            assert holdings(directory) == before, f"interrupted before {struck}"
            number += 1
        assert number > 200


# ---- Ctrl-C while the kernel works --------------------------------------------------------------


def and_ctrl_c(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is returned does the same, and an interrupt comes when it is done for the first time."""
    left = [signal.SIGINT]

    def doing(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if left:
            os.kill(os.getpid(), left.pop())
        return found

    return doing


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where these tests were started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "call", ["os.ftruncate", "os.posix_fallocate", "os.link", "vm.map_shared", "os.fstat"]
)
def test_ctrl_c_while_a_segment_is_made_gives_everything_back_at_once(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = holdings(tmp_path)
    module, _, name = call.rpartition(".")
    real = getattr(vm if module == "vm" else os, name)
    monkeypatch.setattr(f"rl_bridge.memory.segment.{call}", and_ctrl_c(real))
    with pytest.raises(KeyboardInterrupt) as kept:
        OwnedSegment.make(NAME, 2 * vm.PAGE, directory=tmp_path)
    monkeypatch.undo()
    assert holdings(tmp_path) == before, "although the exception is kept"
    assert kept.value is not None


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_view_is_mapped_gives_everything_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = new_ring(limit=1)
    slot = write(ring, 1)
    before = holdings(None)
    monkeypatch.setattr("rl_bridge.memory.views.vm.map_fixed", and_ctrl_c(vm.map_fixed))
    with pytest.raises(KeyboardInterrupt) as kept:
        view_of(slot)
    monkeypatch.undo()
    assert holdings(None) == before
    assert kept.value is not None
    ring.close()


def test_a_view_that_nobody_got_hold_of_gives_its_mapping_back() -> None:
    ring = new_ring(limit=1)
    slot = write(ring, 1)
    before = holdings(None)
    view_of(slot)  # dropped, neither retired nor in a cache
    assert holdings(None) == before
    ring.close()


@pytest.mark.usefixtures("nobody_keeps_garbage")
def test_an_interrupt_before_any_line_of_a_sweep_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / NAME
    number, struck = 0, "begin"
    while struck:
        path.touch()
        before = holdings(tmp_path)[0]
        struck = interrupted(number, partial(sweep, tmp_path))
        assert holdings(tmp_path)[0] == before, f"interrupted before {struck}"
        number += 1
    assert not path.exists()


# ---- forks in another thread --------------------------------------------------------------------


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

    def doing(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if not children.pids:
            children.fork_elsewhere()
        return found

    return doing


@forking
@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "link", "fstat"])
def test_a_child_that_another_thread_forks_while_a_segment_is_made_has_nothing_of_it(
    call: str, tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)
    monkeypatch.setattr(f"rl_bridge.memory.segment.os.{call}", and_fork(real, children))
    segment = OwnedSegment.make(NAME, 2 * vm.PAGE, directory=tmp_path)
    monkeypatch.undo()
    assert children.pids
    assert children.holdings(str(tmp_path)) == []
    segment.close()


@forking
def test_a_child_that_another_thread_forks_while_a_segment_is_opened_has_nothing_of_it(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = OwnedSegment.make(NAME, 2 * vm.PAGE, directory=tmp_path)
    real = os.fstat
    monkeypatch.setattr("rl_bridge.memory.segment.os.fstat", and_fork(real, children))
    fd = open_segment(segment.ref, directory=tmp_path)
    monkeypatch.undo()
    assert children.pids
    assert children.holdings(str(tmp_path)) == []
    os.fstat(fd)
    segment.close()
