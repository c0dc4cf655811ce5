"""Calls to actors, with a deadline, and with an error of ours for each way in which they fail.

A call goes out at once, and its answer is taken later, so that calls to many actors run side by
side (`side_by_side`). Ray is imported when something of it is needed (`require`). The answers of
actors are JSON (`Announcement`, `RolloutAnswer`), checked when they come.
"""

import logging
import time
from collections.abc import Collection, Generator, Mapping
from importlib import import_module
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, StrictFloat, StrictInt, StrictStr

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.ray.pairing import Said

INSTALL = "pip install 'rl-bridge[ray]'"


def require(module: str = "ray") -> Any:
    """Import a module of Ray.

    Raises:
        WeightBridgeUnavailableError: it is not installed, or has no such part.

    """
    try:
        return import_module(module)
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            f"{module} cannot be imported ({error}). Install Ray in this environment: {INSTALL}"
        ) from error


def here() -> tuple[str, str]:
    """Ray's id of the node that this process runs on, and the address that Ray has for it."""
    node: str = require().get_runtime_context().get_node_id()
    address: str = require("ray.util").get_node_ip_address()
    return node, address


_LOG = logging.getLogger(__name__)
T = TypeVar("T")

Steps = Generator[Any, None, T]
"""Calls that depend on one another: yields the reference of each before it takes the answer."""


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
    """Wait for an actor's answer. An exception of the actor's method comes out as it is.

    `name` and `what` it was asked to do, such as ``install version 3``, are for the message.

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
        # Ray derives the actor's own exceptions from these kinds, too: they are raised as they are.
        if isinstance(error, (gone.RayTaskError, WeightBridgeError)):
            raise
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        raise EngineLost(
            f"actor {name!r} is lost and did not {what}: {cause}. Start another rollout and join "
            "it: RolloutFleet.join(name, actor). For another trainer make another fleet, but where "
            "Ray starts it anew: then try again."
        ) from error


def awaited(name: str, what: str, reference: Any, deadline: Deadline) -> Steps[Any]:
    """`result_of` as one of several steps: other rollouts' steps go on until the answer comes."""
    yield reference
    return result_of(name, what, reference, deadline)


def ended(name: str, what: str, reference: Any) -> Steps[None]:
    """Have an actor's earlier call answered, with a result or an error, as the first of its steps.

    Raises:
        DeadlineExceeded: there is no answer yet; it may still come.

    """
    yield reference
    found, _ = require().wait([reference], timeout=0)
    if not found:
        raise DeadlineExceeded(
            f"actor {name!r} did not {what}: it has not answered the call before, so it was not "
            "waited for. It may still come back, and is asked again with the next version; or "
            "replace it: RolloutFleet.join(name, actor)."
        )


def _no_answer(name: str, what: str, deadline: Deadline) -> str:
    return (
        f"actor {name!r} did not {what} within {deadline.timeout_s:g} s. It may still do it: ask a "
        "rollout's status before you let it serve, or replace it; have a trainer publish a later "
        "version."
    )


def side_by_side(
    steps: Mapping[str, Steps[T]], deadline: Deadline, *, late: Collection[str] = ()
) -> tuple[dict[str, T], dict[str, Exception]]:
    """Take the steps of several actors; each goes on when its own answer is there.

    When the time is over, steps whose answer is missing raise. Those of `late` actors, which missed
    an earlier deadline, have as long as the others take.

    Returns:
        Name -> the result of its steps, and name -> their error; in the order of `steps`.

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
            except Exception as error:  # noqa: BLE001 - returned for this one; the others go on
                raised[name] = error
        found: list[Any] = []
        if waiting:
            is_waited_for = any(name not in late for name in waiting.values())
            left_s = deadline.left_s if is_waited_for else 0
            found, _ = ray.wait(list(waiting), timeout=left_s)
        turns = [waiting.pop(one) for one in found or list(waiting)]
    return _in_order(steps, given), _in_order(steps, raised)


def _in_order(names: Mapping[str, object], found: Mapping[str, T]) -> dict[str, T]:
    return {name: found[name] for name in names if name in found}


Text = Annotated[StrictStr, Field(max_length=1 << 16)]
Version = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class Announcement(Said):
    """The last publication of a trainer.

    Attributes:
        weight_version: its version; None before the first.
        root: its root; a rollout that acknowledges it holds exactly these bytes.
        channels: on which it was published, in order.

    """

    weight_version: Version | None = None
    root: Text = ""
    channels: Annotated[tuple[Text, ...], Field(max_length=1024)] = ()


class RolloutAnswer(Said):
    """The result of one call to a rollout, and what it holds now.

    Attributes:
        worker: the rollout's name.
        rank: its rank.
        pid: its process.
        node: the cluster's name of its machine.
        outcome: ``acknowledged``; ``refused``: the version before is active, byte for byte;
            ``torn``: the engine must not serve; ``unjoined``: it has no transport yet, as after a
            restart; ``status``: it was only asked.
        active_version: what the engine holds; None before the first version and while it is torn.
        active_root: the root of that; of a group's version, the whole one's.
        proof: what was found in the engine after the install.
        timings_ms: phase -> milliseconds.
        error: type of what was raised; empty if nothing was.
        message: its text.

    """

    worker: Text
    rank: Annotated[StrictInt, Field(ge=0)]
    pid: Annotated[StrictInt, Field(ge=0)]
    node: Text = ""
    outcome: Literal["acknowledged", "refused", "torn", "unjoined", "status"]
    active_version: Version | None = None
    active_root: Text = ""
    proof: dict[Text, Any] = Field(default_factory=dict)
    timings_ms: dict[Text, StrictFloat | StrictInt] = Field(default_factory=dict)
    error: Text = ""
    message: Text = ""

    def of(self, executor: RolloutExecutor, groups: Mapping[str, str]) -> Self:
        """The same, with the version that `executor` holds.

        `groups` has the root of the whole group's version, by updates that are a share of one.
        """
        version = executor.active_weight_version
        last = executor.last_ack
        if version is None or last is None or last.weight_version != version:
            return self.model_copy(update={"active_version": version})
        return self.model_copy(
            update={
                "active_version": version,
                "active_root": groups.get(last.update_id, last.root),
                "proof": last.proof.to_dict(),
                "timings_ms": dict(last.timings_ms),
            }
        )
