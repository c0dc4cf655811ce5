"""What may happen to an update: one transition table, from which everything else is derived.

This file does not know how weights travel, nor what an engine is. Each side has a lifecycle of its
own: a publisher's is ``published -> released``; a consumer's goes from ``announced`` (a manifest is
here) to ``acknowledged`` and ends in ``released``. `torn` is the state of an engine that is neither
at the old version nor at the new one: it leads out by a completed undo or a full install only.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from rl_bridge.errors import IllegalTransition

__all__ = [
    "CONSUMER",
    "INITIAL",
    "OVER",
    "PUBLISHER",
    "STATUS",
    "TABLE",
    "Event",
    "Lifecycle",
    "Observer",
    "Role",
    "State",
    "Transition",
]


_LOG = logging.getLogger(__name__)


class Role(StrEnum):
    """Which side of the bridge."""

    PUBLISHER = "publisher"
    CONSUMER = "consumer"


class State(StrEnum):
    """Fine states, as `update_state` returns them."""

    PREPARING = "preparing"
    PUBLISHED = "published"
    ANNOUNCED = "announced"
    IMPORTED = "imported"
    VERIFIED = "verified"
    STAGED = "staged"
    INSTALLED = "installed"
    ACKNOWLEDGED = "acknowledged"
    REJECTED = "rejected"
    TORN = "torn"
    RELEASED = "released"


class Event(StrEnum):
    """What can happen."""

    PUBLISH = "publish"
    IMPORT = "import"
    VERIFY = "verify"
    STAGE = "stage"
    INSTALL = "install"
    ACKNOWLEDGE = "acknowledge"
    REJECT = "reject"
    TEAR = "tear"
    UNDO = "undo"
    RELEASE = "release"


_Moves = Mapping[State, Mapping[Event, State]]


def _frozen(moves: _Moves) -> _Moves:
    return MappingProxyType({state: MappingProxyType(found) for state, found in moves.items()})


PUBLISHER: Final = _frozen(
    {
        State.PREPARING: {Event.PUBLISH: State.PUBLISHED},
        State.PUBLISHED: {Event.RELEASE: State.RELEASED},
        State.RELEASED: {},
    }
)

CONSUMER: Final = _frozen(
    {
        State.ANNOUNCED: {
            Event.IMPORT: State.IMPORTED,
            Event.REJECT: State.REJECTED,
            Event.RELEASE: State.RELEASED,
        },
        State.IMPORTED: {
            Event.VERIFY: State.VERIFIED,
            Event.REJECT: State.REJECTED,
            Event.RELEASE: State.RELEASED,
        },
        State.VERIFIED: {
            Event.STAGE: State.STAGED,
            # The caller installs on his own and says so, without an executor.
            Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
            Event.REJECT: State.REJECTED,
            Event.RELEASE: State.RELEASED,
        },
        State.STAGED: {
            Event.INSTALL: State.INSTALLED,
            Event.TEAR: State.TORN,
            Event.REJECT: State.REJECTED,
            Event.RELEASE: State.RELEASED,
        },
        State.INSTALLED: {
            Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
            # This machine was only short of something: the update may come again.
            Event.UNDO: State.STAGED,
            Event.TEAR: State.TORN,
            Event.REJECT: State.REJECTED,
        },
        State.ACKNOWLEDGED: {Event.RELEASE: State.RELEASED},
        State.TORN: {Event.UNDO: State.REJECTED, Event.INSTALL: State.INSTALLED},
        State.REJECTED: {Event.RELEASE: State.RELEASED},
        State.RELEASED: {},
    }
)

TABLE: Final = MappingProxyType({Role.PUBLISHER: PUBLISHER, Role.CONSUMER: CONSUMER})

INITIAL: Final = MappingProxyType({Role.PUBLISHER: State.PREPARING, Role.CONSUMER: State.ANNOUNCED})

OVER: Final = frozenset({State.REJECTED, State.RELEASED})
"""A consumer's states behind which nothing is held of an update."""

# The five words of `update_status`, which users know, for the fine states.
STATUS: Final = MappingProxyType(
    {
        State.PREPARING: "published",
        State.PUBLISHED: "published",
        State.ANNOUNCED: "published",
        State.IMPORTED: "imported",
        State.VERIFIED: "imported",
        State.STAGED: "imported",
        State.INSTALLED: "imported",
        State.ACKNOWLEDGED: "acknowledged",
        State.REJECTED: "rejected",
        State.TORN: "rejected",
        State.RELEASED: "released",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One step that an update took.

    Attributes:
        role: which side.
        update_id: the update.
        weight_version: its version.
        event: what happened.
        source: the state before.
        target: the state after.
        at_s: monotonic clock, seconds.

    """

    role: Role
    update_id: str
    weight_version: int
    event: Event
    source: State
    target: State
    at_s: float


Observer = Callable[[Transition], None]


class Lifecycle:
    """State and history of one update on one side, changed by the table's moves and nothing else.

    One call at a time: its owner has a lock. It may be read at any time.

    Attributes:
        state: the fine state.
        moves: event -> state, of the events that are allowed now.
        reason: why it was rejected or torn.
        history: every step so far.

    """

    def __init__(
        self,
        role: Role,
        *,
        update_id: str,
        weight_version: int,
        observer: Observer | None = None,
    ) -> None:
        """Start in the role's initial state.

        Args:
            role: which side.
            update_id: the update.
            weight_version: its version.
            observer: called with every transition, after it is recorded; for logs, progress, tests.
                What it raises is logged and changes nothing.

        """
        self._role = role
        self._update_id = update_id
        self._weight_version = weight_version
        self._observer = observer
        self.state = INITIAL[role]
        self.moves = TABLE[role][self.state]
        self.reason: str | None = None
        self.history: list[Transition] = []

    def has_taken(self, event: Event) -> bool:
        """Whether one of the steps so far was `event`."""
        return any(step.event is event for step in self.history)

    def fire(self, event: Event, *, reason: str | None = None) -> State:
        """Take the step that the table has for `event`.

        Raises:
            IllegalTransition: there is none; state and history are as before.

        """
        source, target = self.state, self.moves.get(event)
        if target is None:
            raise IllegalTransition(self._refusal(event))
        step = Transition(
            role=self._role,
            update_id=self._update_id,
            weight_version=self._weight_version,
            event=event,
            source=source,
            target=target,
            at_s=time.monotonic(),
        )
        self.state, self.moves = target, TABLE[self._role][target]
        self.history.append(step)
        if reason is not None:
            self.reason = reason
        if self._observer is not None:
            try:
                self._observer(step)
            except Exception:  # noqa: BLE001 - logged in full
                # The step is taken: an observer can neither stop nor undo it.
                _LOG.exception("the observer of %s failed", step)
        return target

    def _refusal(self, event: Event) -> str:
        update = f"update {self._update_id} (version {self._weight_version})"
        if event is Event.ACKNOWLEDGE and self.state in {State.ANNOUNCED, State.IMPORTED}:
            return (
                f"cannot acknowledge update before import_update succeeds: {update} is "
                f"{self.state}. Call import_update(manifest), install the tensors, then "
                "acknowledge."
            )
        allowed = ", ".join(self.moves) or "nothing: it is over"
        because = f" ({self.reason})" if self.reason else ""
        return f"cannot {event} {update}: it is {self.state}{because}. Allowed now: {allowed}."
