"""Trying again where that may help: a version that was written to, a connection that broke."""

import logging
import select
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rl_bridge.errors import StaleUpdate, WeightBridgeUnavailableError
from rl_bridge.transports.nixl.agent import AgentError, MemoryRefused
from rl_bridge.transports.nixl.fetch import Torn

__all__ = ["tried"]

_LOG = logging.getLogger(__name__)
_PAUSE_MS = 5
_LONGEST_PAUSE_MS = 500
_Made = TypeVar("_Made")


def _pauses() -> Iterator[None]:
    """Each one is made before it is given, and longer than the last."""
    pause_ms = _PAUSE_MS
    while True:
        select.poll().poll(pause_ms)
        yield
        pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)


def tried(
    update_id: str, once: Callable[[], _Made], *, timeout_s: float, reconnect: Callable[[], None]
) -> _Made:
    """Try until it works or the deadline is over, at least twice where a connection broke.

    Args:
        update_id: what is read, for messages.
        once: one attempt.
        timeout_s: for how long to try.
        reconnect: have the next attempt begin with new connections.

    Raises:
        StaleUpdate: the publisher wrote to it, again and again.
        WeightBridgeUnavailableError: reads fail, which says nothing against the update.

    """
    until = time.monotonic() + timeout_s
    num_broken = 0
    pauses = _pauses()
    while True:
        try:
            return once()
        except Torn as error:
            # Its publisher wrote meanwhile: this side's lease was lost, or never counted.
            if time.monotonic() >= until:
                raise StaleUpdate(str(error)) from error
            next(pauses)  # whoever writes wants the memory
        except AgentError as error:
            # The connection broke, which may mean no more than that: again, on a new one. The
            # process that serves there may die under one reader after the other.
            num_broken += 1
            is_hopeless = isinstance(error, MemoryRefused) or time.monotonic() >= until
            if num_broken > 1 and is_hopeless:
                reason = str(error).removesuffix(".")
                remedy = "See that its publisher runs and can be reached"
                if isinstance(error, MemoryRefused):
                    remedy = "See how much memory this process may lock and register"
                msg = (
                    f"update {update_id} cannot be read: {reason}. {remedy}, then import it again."
                )
                raise WeightBridgeUnavailableError(msg) from error
            reconnect()
            _LOG.warning("%s Again, on a new connection.", error)
            if num_broken > 1:
                next(pauses)
