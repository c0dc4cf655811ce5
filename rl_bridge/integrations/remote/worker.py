"""One step of the engine at a time, in a thread of its own, each with a deadline."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError

__all__ = ["Worker"]

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Worker:
    """Takes steps, always in the same thread: engines mind in which one they are called.

    Attributes:
        busy: the step that is under way; None if there is none.

    """

    def __init__(self, *, timeout_s: float, took: Callable[[str, float, str], None]) -> None:
        """Start without a thread; the first step makes it.

        Args:
            timeout_s: deadline of a step.
            took: told of each step, the seconds that it took, and what came of it.

        """
        self.busy: str | None = None
        self._timeout_s, self._took = timeout_s, took
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rl-bridge-sidecar")

    async def do(self, name: str, step: Callable[[], T]) -> T:
        """Take a step, or say within the deadline that it is not over.

        Raises:
            WeightBridgeUnavailableError: another one is under way.
            DeadlineExceeded: it is still under way.
            Exception: the step's own.

        """
        if self.busy is not None:
            msg = (
                f"cannot {name} now: the side-car is busy with {self.busy}. Wait until GET /status "
                "says that it is not, and send it again."
            )
            raise WeightBridgeUnavailableError(msg)
        self.busy = name
        start = time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._pool, step)
        future.add_done_callback(lambda done: self._over(name, start, done))
        await asyncio.wait([future], timeout=self._timeout_s)
        if not future.done():
            msg = (
                f"the engine did not {name} within {self._timeout_s:g} s, and may still do it. "
                "Ask GET /status, which says when it is over."
            )
            raise DeadlineExceeded(msg)
        return future.result()

    def close(self) -> None:
        """Take no more steps; one that hangs is left to hang."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _over(self, name: str, start: float, done: "asyncio.Future[T]") -> None:
        self.busy = None
        if done.cancelled():
            return
        error = done.exception()  # read here, so that one that comes too late is not lost
        if error is not None:
            _LOG.warning("could not %s: %s: %s", name, type(error).__name__, error)
        outcome = "ok" if error is None else type(error).__name__
        self._took(name.split(maxsplit=1)[0], time.monotonic() - start, outcome)
