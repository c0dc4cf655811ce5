"""Groups that broke off, until nothing of theirs reads or writes memory any more."""

import logging
import threading
import time
from collections.abc import Callable

from rl_bridge.transports.broadcast.group import Group

__all__ = ["Wrecks"]

_LOG = logging.getLogger(__name__)


class Wrecks:
    """Waits for them in threads of their own: whoever is left goes on at once."""

    def __init__(self) -> None:
        """Start without any."""
        self._threads: list[threading.Thread] = []

    def leave(self, group: Group, then: Callable[[], object]) -> None:
        """End a group, and call `then` when its memory may be used again.

        That may be at once, in this thread. It never is where the backend does not end what it
        began: then the memory is kept.
        """
        if group.is_idle:
            group.close()
            then()
            return
        thread = threading.Thread(
            target=_settle, args=(group, then), name="rlb-broadcast-wreck", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, for so long; returns whether they have."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _settle(group: Group, then: Callable[[], object]) -> None:
    if group.settle():
        then()
    else:
        _LOG.error("a broadcast that broke off does not end; the memory of its version is kept")
