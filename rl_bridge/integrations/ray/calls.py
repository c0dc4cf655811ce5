"""Calls to actors: with a deadline, and with an error of ours for each way in which they fail."""

import logging
import time
from typing import Any

from rl_bridge.errors import DeadlineExceeded, EngineLost, WeightBridgeError
from rl_bridge.integrations.ray.library import require

__all__ = ["Deadline", "result_of"]

_LOG = logging.getLogger(__name__)


class Deadline:
    """A point in time that several calls share."""

    def __init__(self, timeout_s: float) -> None:
        """Begin now."""
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end - time.monotonic())


def result_of(name: str, what: str, reference: Any, deadline: Deadline) -> Any:
    """Wait for an actor's answer.

    What the actor's method itself raises comes out as it is.

    Args:
        name: the actor's, for the message.
        what: what it was asked to do, such as ``install version 3``.
        reference: what Ray gave for the call.
        deadline: until when.

    Raises:
        EngineLost: the actor died, cannot be reached, or cannot be started or placed by Ray.
        DeadlineExceeded: no answer in time; it may still come.

    """
    ray = require()
    gone = require("ray.exceptions")
    try:
        return ray.get(reference, timeout=deadline.left_s)
    except gone.GetTimeoutError as error:
        raise DeadlineExceeded(
            f"actor {name!r} did not {what} within {deadline.timeout_s:g} s. It may still do it: "
            "ask its status before you let it serve, or replace it."
        ) from error
    except gone.RayError as error:
        # (Of these kinds is also what the actor's method raised: its own, whatever it is.)
        if isinstance(error, (gone.RayTaskError, WeightBridgeError)):
            raise
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        raise EngineLost(
            f"actor {name!r} is lost and did not {what}: {cause}. Start another one and join it: "
            "RolloutFleet.join(name, actor)."
        ) from error
