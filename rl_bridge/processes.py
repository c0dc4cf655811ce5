"""The one lock that no fork comes in between, and what a forked child does before anything else.

One for the whole library: a thread that forks holds it, and would wait with it for a second one,
whose holder may be collecting garbage that waits for the first.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

__all__ = [
    "FORKS",
    "SETTLING",
    "in_forked_children",
    "undisturbed",
]

FORKS = threading.RLock()
"""Held where a fork must not come in between: the child would keep what is not noted yet.

Under it nothing is waited for but the kernel, and it is taken under any other lock: as
``with SETTLING, FORKS``. A finalizer never waits for it, see `undisturbed`.
"""

_LATE: deque[Callable[[], object]] = deque()


def undisturbed(undo: Callable[[], object]) -> None:
    """Have `undo` called where no fork comes in between, and wait for nothing.

    A finalizer runs in the middle of anything, also under a lock of logging's or the importer's,
    for which a thread that forks waits with `FORKS` in its hand. Where that is taken, whoever has
    it calls `undo` once he has given it back.

    Args:
        undo: gives something back; does not raise, and may be called again.

    """
    _LATE.append(undo)
    _settle()


def _settle() -> None:
    while _LATE and _call_late():
        pass  # else whoever has the lock comes here once he has given it back


def _call_late() -> bool:
    taken: list[bool] = []
    try:
        # One step of the interpreter: no interrupt comes in between taking and noting.
        taken.extend(map(FORKS.acquire, (False,)))
        while taken[0] and (undo := _first_late()) is not None:
            undo()
            with suppress(ValueError):  # a finalizer in the middle of it was faster
                _LATE.remove(undo)  # only now: an interrupt must not lose it
        return taken[0]
    finally:
        if taken and taken[0]:
            FORKS.release()


def _first_late() -> Callable[[], object] | None:
    # By index: an iterator raises where another thread adds one before it is used.
    try:
        return _LATE[0]
    except IndexError:
        return None


class _Settling:
    """Behind it `FORKS` is free again: what had to wait for that is done."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _settle()


SETTLING = _Settling()

_IN_CHILD: list[Callable[[], object]] = []


def in_forked_children(clean_up: Callable[[], object]) -> None:
    """Have `clean_up` called in each forked child, under `FORKS`."""
    _IN_CHILD.append(clean_up)


def _begin_child() -> None:
    try:
        _settle()  # what it would have closed in the parent is open here as well
        _clean_up(list(_IN_CHILD))
    finally:
        FORKS.release()


def _clean_up(left: list[Callable[[], object]]) -> None:
    # Whatever becomes of one, the next has its turn. (Python prints what a child raises here.)
    if left:
        try:
            left[0]()
        finally:
            _clean_up(left[1:])


os.register_at_fork(
    before=FORKS.acquire, after_in_parent=FORKS.release, after_in_child=_begin_child
)
# Apart: no interrupt must keep the lock from being given back.
os.register_at_fork(after_in_parent=_settle)
