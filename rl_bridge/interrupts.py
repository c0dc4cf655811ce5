"""Ctrl-C waits for the end of a call.

Python raises KeyboardInterrupt in the main thread, between any two instructions. Inside of a public
call, an engine's bytes, slots and records change together, so each such call is one block of
`deferred_interrupts`. The first Ctrl-C is logged, and raised when the outermost block has ended. A
second one is raised at once: what is half-way then is given back, and an engine that was being
changed is torn until ``recover()``.

In other threads Python raises no KeyboardInterrupt, and a block does nothing.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LOG = logging.getLogger(__name__)


class _Deferred:
    """The handler of SIGINT inside of a block."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self.is_held = False
        self._is_first = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_first:
            self.is_held = False  # this one stands for both
            self.before(number, frame)
            return
        self._is_first, self.is_held = False, True
        _LOG.warning("Ctrl-C: the call that is running ends first; a second one stops it at once")


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the outermost such block is over; a second one is raised at once."""
    before = signal.getsignal(signal.SIGINT)
    is_outermost = callable(before) and not isinstance(before, _Deferred)
    if not is_outermost or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred = _Deferred(before)  # type: ignore[arg-type]  # that is what was asked
    signal.signal(signal.SIGINT, deferred)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is deferred:
            signal.signal(signal.SIGINT, before)
        if deferred.is_held:
            # Without the frame that it met: an error that is kept would keep that one's tensors.
            deferred.before(signal.SIGINT, None)


def raise_held_interrupt() -> None:
    """Raise the Ctrl-C that is held back, if there is one: for where a call waits at its beginning.

    Nothing may be half-way. In other threads than the main one it does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(handler, _Deferred) and handler.is_held:
        handler.is_held = False
        handler.before(signal.SIGINT, None)
