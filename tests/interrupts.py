"""An interrupt between two lines of the library, as Python raises it anywhere."""

import gc
import linecache
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rl_bridge import TensorBridge
from tests.helpers import tracing

__all__ = ["InterruptBefore", "cut_closes_off"]


class InterruptBefore:
    """Traces this thread and raises before the `number`-th line of the library, once.

    Counted are lines of files with `within` in their path.
    """

    def __init__(self, number: int, *, within: str = "/rl_bridge/") -> None:
        self._left = number
        self._within = within
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._within not in frame.f_code.co_filename:
            return None
        if event == "line" and not self.struck:
            # Leaving a with block is traced as its line, where Python itself never interrupts; nor
            # does it between the end of a call and the `release` of a `finally` behind it.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if not line.startswith(("with ", "if taken and taken[0]:", "FORKS.release()")):
                self._left -= 1
                if self._left < 0:
                    self.struck = True
                    raise KeyboardInterrupt
        return self


def cut_closes_off(make: Callable[[], Sequence[TensorBridge]], *, stride: int) -> int:
    """Cut the close of bridges off before every `stride`-th line; the next call ends it.

    Returns how many lines a close has.
    """
    _close_all(make())  # what the library and torch keep for good is there behind it
    number, struck = 0, True
    while struck:
        gc.collect()  # else an earlier turn's remains would seem to be there still
        before = _held()
        ends = make()
        tracer = InterruptBefore(number)
        with suppress(KeyboardInterrupt), tracing(tracer):
            _close_all(ends)
        struck = tracer.struck
        _close_all(ends)
        # Although all of them live: no finalizer did it.
        assert not _held() - before, f"interrupted before line number {number}"
        number += stride
    return number


def _close_all(ends: Sequence[TensorBridge]) -> None:
    for end in ends:
        end.close()


def _held() -> set[str]:
    """What this process holds: sockets, descriptors to wake threads, segments, our threads."""
    found = [one.name for one in threading.enumerate() if one.name.startswith("rlb-")]
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with suppress(OSError):  # the descriptor of this very listing
            found.append(str(Path(f"/proc/self/fd/{entry}").readlink()))
    lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    found += [line.split(maxsplit=5)[-1] for line in lines]
    return {name for name in found if any(mark in name for mark in ("rlb-", "socket", "eventfd"))}
