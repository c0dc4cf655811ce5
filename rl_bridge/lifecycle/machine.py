"""The machine: the life of one update on one side, walked by the table and nothing else."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rl_bridge.errors import IllegalTransition
from rl_bridge.lifecycle.table import INITIAL, STATUS, TABLE, Event, Role, State

__all__ = ["Lifecycle", "Observer", "Transition"]


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


_LOG = logging.getLogger(__name__)

Observer = Callable[[Transition], None]


class Lifecycle:
    """State and history of one update on one side. Safe to use from several threads."""

    def __init__(
        self,
        role: Role,
        *,
        update_id: str,
        weight_version: int,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start in the role's initial state.

        Args:
            role: which side.
            update_id: the update.
            weight_version: its version.
            observer: called with every transition, after it is recorded; for logs, progress, tests.
                What it raises is logged and changes nothing.
            clock: seconds, monotonic.

        """
        self._role = role
        self._update_id = update_id
        self._weight_version = weight_version
        self._observer = observer
        self._clock = clock
        # Reentrant, and a step is taken by its number, all at once: a collection may run code of
        # the user's in the middle of `fire`, which takes a step of its own.
        self._lock = threading.RLock()
        self._steps: dict[int, Transition] = {}
        self.reason: str | None = None
        """Why it was rejected or torn."""

    @property
    def state(self) -> State:
        """The fine state."""
        return self._behind(len(self._steps))

    @property
    def status(self) -> str:
        """One of the five words: published, imported, acknowledged, rejected, released."""
        return STATUS[self.state]

    @property
    def history(self) -> tuple[Transition, ...]:
        """Every step so far."""
        return tuple(self._steps[number] for number in range(len(self._steps)))

    def has_taken(self, event: Event) -> bool:
        """Whether one of the steps so far was `event`."""
        return any(step.event is event for step in self.history)

    def allows(self, event: Event) -> bool:
        """Tell whether the table has a move for `event` from here."""
        return event in TABLE[self._role][self.state]

    def fire(self, event: Event, *, reason: str | None = None) -> State:
        """Take the step that the table has for `event`.

        Raises:
            IllegalTransition: there is none; state and history are as before.

        """
        with self._lock:
            step = self._take(event)
            if reason is not None:
                self.reason = reason
        if self._observer is not None:
            try:
                self._observer(step)
            except Exception:  # noqa: BLE001 - logged in full
                # The step is taken: whoever only watches can neither stop nor undo it.
                _LOG.exception("the observer of %s failed", step)
        return step.target

    def _behind(self, number: int) -> State:
        """The state behind so many steps."""
        return self._steps[number - 1].target if number else INITIAL[self._role]

    def _take(self, event: Event) -> Transition:
        while True:
            number = len(self._steps)
            source = self._behind(number)
            moves = TABLE[self._role][source]
            if event not in moves:
                raise IllegalTransition(self._refusal(event, source, tuple(moves)))
            step = Transition(
                role=self._role,
                update_id=self._update_id,
                weight_version=self._weight_version,
                event=event,
                source=source,
                target=moves[event],
                at_s=self._clock(),
            )
            if self._steps.setdefault(number, step) is step:
                return step
            # Another one was taken inside of this call: where that led, counts.

    def _refusal(self, event: Event, source: State, moves: tuple[Event, ...]) -> str:
        update = f"update {self._update_id} (version {self._weight_version})"
        if event is Event.ACKNOWLEDGE and source in {State.ANNOUNCED, State.IMPORTED}:
            return (
                f"cannot acknowledge update before import_update succeeds: {update} is {source}. "
                "Call import_update(manifest), install the tensors, then acknowledge."
            )
        allowed = ", ".join(moves) or "nothing: it is over"
        because = f" ({self.reason})" if self.reason else ""
        return f"cannot {event} {update}: it is {source}{because}. Allowed now: {allowed}."
