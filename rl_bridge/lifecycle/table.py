"""What may happen to an update: one transition table, from which everything else is derived.

This file does not know how weights travel, nor what an engine is. Each side has its own life cycle:
a publisher's is ``published -> released``; a consumer walks from ``announced`` (a manifest is here)
to ``acknowledged`` and lets go in ``released``. `torn` is the state of an engine that is neither
the old version nor the new one: its only exits are a completed undo and a full reinstall.
"""

from enum import StrEnum
from types import MappingProxyType
from typing import Final

__all__ = [
    "CONSUMER",
    "INITIAL",
    "PUBLISHER",
    "STATUS",
    "TABLE",
    "Event",
    "Role",
    "State",
    "shortest_path",
]


class Role(StrEnum):
    """Which side of the bridge."""

    PUBLISHER = "publisher"
    CONSUMER = "consumer"


class State(StrEnum):
    """Fine states, as `update_state` tells them."""

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


PUBLISHER: Final = MappingProxyType(
    {
        State.PREPARING: MappingProxyType(
            {Event.PUBLISH: State.PUBLISHED, Event.RELEASE: State.RELEASED}
        ),
        State.PUBLISHED: MappingProxyType({Event.RELEASE: State.RELEASED}),
        State.RELEASED: MappingProxyType({}),
    }
)

CONSUMER: Final = MappingProxyType(
    {
        State.ANNOUNCED: MappingProxyType(
            {
                Event.IMPORT: State.IMPORTED,
                Event.REJECT: State.REJECTED,
                Event.RELEASE: State.RELEASED,
            }
        ),
        State.IMPORTED: MappingProxyType(
            {
                Event.VERIFY: State.VERIFIED,
                Event.REJECT: State.REJECTED,
                Event.RELEASE: State.RELEASED,
            }
        ),
        State.VERIFIED: MappingProxyType(
            {
                Event.STAGE: State.STAGED,
                # The caller installs on his own and says so, without an executor.
                Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
                Event.REJECT: State.REJECTED,
                Event.RELEASE: State.RELEASED,
            }
        ),
        State.STAGED: MappingProxyType(
            {
                Event.INSTALL: State.INSTALLED,
                Event.TEAR: State.TORN,
                Event.REJECT: State.REJECTED,
                Event.RELEASE: State.RELEASED,
            }
        ),
        State.INSTALLED: MappingProxyType(
            {
                Event.ACKNOWLEDGE: State.ACKNOWLEDGED,
                Event.TEAR: State.TORN,
                Event.REJECT: State.REJECTED,
            }
        ),
        State.ACKNOWLEDGED: MappingProxyType({Event.RELEASE: State.RELEASED}),
        State.TORN: MappingProxyType({Event.UNDO: State.REJECTED, Event.INSTALL: State.INSTALLED}),
        State.REJECTED: MappingProxyType({Event.RELEASE: State.RELEASED}),
        State.RELEASED: MappingProxyType({}),
    }
)

TABLE: Final = MappingProxyType({Role.PUBLISHER: PUBLISHER, Role.CONSUMER: CONSUMER})

INITIAL: Final = MappingProxyType({Role.PUBLISHER: State.PREPARING, Role.CONSUMER: State.ANNOUNCED})

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


def shortest_path(role: Role, target: State) -> tuple[Event, ...] | None:
    """Shortest list of events from a role's initial state to `target`; None if there is no way."""
    table = TABLE[role]
    paths: dict[State, tuple[Event, ...]] = {INITIAL[role]: ()}
    queue = [INITIAL[role]]
    for state in queue:
        for event, successor in table[state].items():
            if successor not in paths:
                paths[successor] = (*paths[state], event)
                queue.append(successor)
    return paths.get(target)
