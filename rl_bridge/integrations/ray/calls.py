"""Calls to actors: with a deadline, and with an error of ours for each way in which they fail."""

import logging
import time
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from rl_bridge.errors import DeadlineExceeded, EngineLost, WeightBridgeError
from rl_bridge.integrations.ray.library import require

__all__ = ["Deadline", "Steps", "awaited", "ended", "result_of", "side_by_side"]

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

Steps = Generator[Any, None, T]
"""Calls that follow from one another: each one's reference, before its answer is taken."""


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
        raise DeadlineExceeded(_no_answer(name, what, deadline)) from error
    except gone.RayError as error:
        # (Of these kinds is also what the actor's method raised: its own, whatever it is.)
        if isinstance(error, (gone.RayTaskError, WeightBridgeError)):
            raise
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        raise EngineLost(
            f"actor {name!r} is lost and did not {what}: {cause}. Start another rollout and join "
            "it: RolloutFleet.join(name, actor). For another trainer make another fleet, but where "
            "Ray starts it anew: then try again."
        ) from error


def awaited(name: str, what: str, reference: Any, deadline: Deadline) -> Steps[Any]:
    """`result_of` as one of several steps: others go on while this one's answer is due."""
    yield reference
    return result_of(name, what, reference, deadline)


def ended(name: str, what: str, reference: Any, deadline: Deadline) -> Steps[None]:
    """Wait until an actor has answered, whatever it is, as one of several steps.

    Raises:
        DeadlineExceeded: no answer in time; it may still come.

    """
    yield reference
    found, _ = require().wait([reference], timeout=deadline.left_s)
    if not found:
        raise DeadlineExceeded(_no_answer(name, what, deadline))


def _no_answer(name: str, what: str, deadline: Deadline) -> str:
    return (
        f"actor {name!r} did not {what} within {deadline.timeout_s:g} s. It may still do it: ask a "
        "rollout's status before you let it serve, or replace it; have a trainer publish a later "
        "version."
    )


def side_by_side(
    steps: Mapping[str, Steps[T]], deadline: Deadline
) -> tuple[dict[str, T], dict[str, Exception]]:
    """Take the steps of several; each goes on when its own answer is there.

    When the time is over, each takes what it has: what has no answer then raises.

    Args:
        steps: name -> its steps.
        deadline: until when, for all of them.

    Returns:
        Name -> what its steps gave, and name -> what they raised; in the order of `steps`.

    """
    ray = require()
    given: dict[str, T] = {}
    raised: dict[str, Exception] = {}
    waiting: dict[Any, str] = {}
    turns = list(steps)
    while turns:
        for name in turns:
            try:
                waiting[next(steps[name])] = name
            except StopIteration as end:
                given[name] = end.value
            except Exception as error:  # noqa: BLE001 - told of this one; the others go on
                raised[name] = error
        found: list[Any] = []
        if waiting:
            found, _ = ray.wait(list(waiting), timeout=deadline.left_s)
        turns = [waiting.pop(one) for one in found or list(waiting)]
    return _in_order(steps, given), _in_order(steps, raised)


def _in_order(names: Mapping[str, object], found: Mapping[str, T]) -> dict[str, T]:
    return {name: found[name] for name in names if name in found}
