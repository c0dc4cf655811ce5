"""Forks: a forked child keeps no descriptor that holds a lease, a lock or shared memory.

A fork may come in any thread at any moment. A descriptor is therefore opened and noted in one block
of `no_fork`, for whose end a fork waits, and each child closes what is noted before it does
anything else. The whole library has one such lock, and in a block nothing is waited for but the
kernel: a thread that forks holds the lock too, and would wait with it for a second one.

A finalizer must not wait for the lock. It runs in the middle of anything, perhaps under a lock of
logging's for which the thread that forks is waiting. `close_fd` therefore only notes what is to be
closed if the lock is taken; the thread that has the lock closes it after its block.
"""

import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FORKS = threading.RLock()
_PRIVATE: set[int] = set()
_TO_CLOSE: deque[int] = deque()
_IN_CHILD: list[Callable[[], object]] = []


@contextmanager
def no_fork() -> Iterator[None]:
    """Have forks of other threads wait for the end of the block."""
    try:
        with _FORKS:
            yield
    finally:
        _close_noted()


def process_name() -> str:
    """What this process is called in the errors of others."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{program} (process {os.getpid()} on {socket.gethostname()})"


def forget_fd_in_children(fd: int) -> int:
    """Have `fd` closed in forked children; returns it. Close it with `close_fd`."""
    _PRIVATE.add(fd)
    return fd


def open_fd(function: Callable[..., int], *arguments: object) -> int:
    """Open a descriptor, with a function of `os`, that forked children do not keep.

    Raises:
        OSError: the function's own.

    """
    with no_fork():
        return forget_fd_in_children(function(*arguments))


def close_fd(fd: int) -> None:
    """Close a descriptor that is noted; a no-op in a forked child. Never waits."""
    _TO_CLOSE.append(fd)
    _close_noted()


def _close_noted() -> None:
    if _is_mine():
        return  # a finalizer inside a block, at whose end it is closed
    try:
        while _TO_CLOSE and _FORKS.acquire(blocking=False):
            with suppress(IndexError):  # a finalizer inside of this loop was faster
                while True:
                    _close(_TO_CLOSE.popleft())
            _FORKS.release()
    finally:
        # Nothing defers a Ctrl-C that comes in a finalizer, and a lock that it leaves taken would
        # have every other thread wait for good.
        if _is_mine():
            _FORKS.release()


def _is_mine() -> bool:
    # `threading.Condition` asks its lock the same; there is no public name for it.
    mine: bool = _FORKS._is_owned()  # type: ignore[attr-defined] # noqa: SLF001
    return mine


def _close(fd: int) -> None:
    if fd in _PRIVATE:
        _PRIVATE.discard(fd)
        with suppress(OSError):  # somebody closed it by its number
            os.close(fd)


def in_forked_children(clean_up: Callable[[], object]) -> None:
    """Have `clean_up` called in each forked child, after the end of what is noted."""
    _IN_CHILD.append(clean_up)


def _begin_child() -> None:
    # If one of them fails, the rest is done all the same. (Python prints what is raised here.)
    with ExitStack() as steps:
        steps.callback(_FORKS.release)
        for clean_up in reversed(_IN_CHILD):
            steps.callback(clean_up)
        _TO_CLOSE.clear()
        while _PRIVATE:
            _close(next(iter(_PRIVATE)))


os.register_at_fork(
    before=_FORKS.acquire, after_in_parent=_FORKS.release, after_in_child=_begin_child
)
# On its own: nothing that it does must keep the lock from being given back.
os.register_at_fork(after_in_parent=_close_noted)
