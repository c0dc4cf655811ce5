"""What ends a thread's `poll`: an eventfd that is never written to once it is closed."""

import os
import threading
import weakref
from contextlib import suppress

from rl_bridge.memory.holding import Holding

__all__ = ["Wake"]


class Wake:
    """Wakes a thread that polls `fd`. From any thread, and from finalizers; closed in children.

    The number of a closed descriptor is soon another file's: eight bytes written there would be
    damage in what is none of ours.
    """

    def __init__(self) -> None:
        """Open the descriptor."""
        self._held = Holding()
        self._finalizer = weakref.finalize(self, self._held.dispose)
        self._finalizer.atexit = False
        self._held.open(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = self._held.pid
        # Reentrant: a finalizer may come in the middle of any of these, in this very thread.
        self._lock = threading.RLock()

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed."""
        return next(iter(self._held.fds), -1)

    def poke(self) -> None:
        """Wake; a no-op once it is closed, and in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self.fd >= 0:
                with suppress(BlockingIOError):  # it is awake already
                    os.eventfd_write(self.fd, 1)

    def settle(self) -> None:
        """Take note of all pokes so far."""
        with self._lock:
            if self.fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(self.fd)

    def close(self) -> None:
        """Give the descriptor back. Idempotent; in a forked child a no-op."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._held.dispose()
            self._finalizer.detach()
