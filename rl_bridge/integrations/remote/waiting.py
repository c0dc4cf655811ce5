"""The deadline of an update that waits for its next step."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError

__all__ = ["Waiting"]

_LOG = logging.getLogger(__name__)


class Waiting:
    """Gives an update up when nobody has asked for its next step in time. For one event loop."""

    def __init__(self, hold_s: float, expire: Callable[[str, float], Awaitable[None]]) -> None:
        """Begin with none.

        Args:
            hold_s: how long an update may wait.
            expire: gives it up.

        """
        self._hold_s, self._expire = hold_s, expire
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, update_id: str | None) -> None:
        """An update begins to wait, in place of whichever waited before."""
        self.stop()
        if update_id is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._hold_s, self._start, update_id)

    def stop(self) -> None:
        """Nothing waits any more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _start(self, update_id: str) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(update_id))

    async def _run(self, update_id: str) -> None:
        try:
            await self._expire(update_id, self._hold_s)
            _LOG.warning("update %s waited for %g s and is given up", update_id, self._hold_s)
        except WeightBridgeUnavailableError:
            self.begin(update_id)  # something is done to it right now, whose end nobody may await
        except WeightBridgeError as error:
            _LOG.info("update %s did not expire: %s", update_id, error)
