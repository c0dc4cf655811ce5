"""What a publisher sends next, and to whom: decided here, done by the sender."""

import logging
import time
from dataclasses import dataclass, field

from rl_bridge.memory.slots import Slot
from rl_bridge.transports._wire.messages import Gone
from rl_bridge.transports.broadcast.hub import Hub, Member
from rl_bridge.transports.broadcast.messages import Arrived, Failed, Want

__all__ = ["Offered", "Schedule"]

_LOG = logging.getLogger(__name__)

# A receiver that fails again and again, alone, is not to cost the publisher all its time.
_MAX_FAILURES = 3


@dataclass(slots=True)
class Offered:
    """A version that is sealed. Once it is published its `header` is known, and receivers hear."""

    update_id: str
    slot: Slot
    generation: int
    arena_nbytes: int
    layout_digest: str
    header: str = ""
    published_at: float = field(default_factory=time.monotonic)
    is_released: bool = False
    num_wrecks: int = 0
    """How many groups that broke off still read it."""


class Schedule:
    """The published versions, and what members have of them. Called under the hub's lock."""

    def __init__(self, hub: Hub, *, timeout_s: float) -> None:
        """Start empty; `timeout_s` is how long the first version waits for all members."""
        self._hub = hub
        self._timeout_s = timeout_s
        self._offered: dict[str, Offered] = {}
        self._newest: Offered | None = None
        self._was_complete = False

    def add(self, offered: Offered) -> None:
        """Take note of a version, which nobody hears of yet."""
        self._offered[offered.update_id] = offered

    def announce(self, offered: Offered, header: str) -> None:
        """Send this version to all who follow, before all others."""
        offered.header = header
        offered.published_at = time.monotonic()
        self._newest = offered

    def find(self, update_id: str) -> Offered | None:
        """A version that is published and not released."""
        return self._offered.get(update_id)

    def withdraw(self, update_id: str) -> Offered | None:
        """Send this version no more; returns it, or None if it is not here."""
        offered = self._offered.pop(update_id, None)
        if offered is not None:
            offered.is_released = True
            if self._newest is offered:
                self._newest = None
            for member in self._hub.members:
                member.has.discard(update_id)
        return offered

    def hear_out(self) -> bool:
        """Take note of what members say; returns whether a transfer failed on the other side."""
        has_failed = False
        for member in list(self._hub.members):
            for transfer, answer in list(member.answers.items()):
                if isinstance(answer, Failed):
                    _LOG.warning("%s: transfer %d: %s", member.name, transfer, answer.reason)
                    has_failed = True
                    member.has.clear()
                    self.blame(member)
                if isinstance(answer, Arrived):
                    member.num_failures = 0
                member.answers.pop(transfer, None)
            for want in list(member.wants.values()):
                self._check_want(member, want)
        return has_failed

    def blame(self, member: Member) -> None:
        """Note that a transfer failed, and maybe by this member's fault."""
        member.num_failures += 1
        if member.num_failures >= _MAX_FAILURES:
            self._hub.drop(member, f"failed in {member.num_failures} transfers")

    def _check_want(self, member: Member, want: Want) -> None:
        offered = self._offered.get(want.update_id)
        if offered is not None and not offered.header:
            offered = None  # it is not published yet: whoever asks cannot have its manifest
        asked = want.arena_nbytes, want.generation
        if offered is None:
            reason = "its publisher released it"
        elif (offered.arena_nbytes, offered.generation) != asked:
            found = offered.arena_nbytes, offered.generation
            reason = f"the publisher has (bytes, write) {found}, asked for were {asked}"
        else:
            return
        del member.wants[want.update_id]
        gone = Gone(update_id=want.update_id, reason=reason, is_stale=offered is None)
        self._hub.send([member], gone)

    def choose(self) -> tuple[Offered, tuple[Member, ...]] | None:
        """What to send next, and to whom: the newest to all who lack it, else what is asked for."""
        newest = self._newest
        members = self._hub.members
        if newest is not None:
            lacking = [
                member
                for member in members
                if newest.update_id in member.wants
                or (not member.is_observer and newest.update_id not in member.has)
            ]
            if lacking and self._is_complete(newest, lacking):
                return newest, _together(lacking)
        for member in members:
            for update_id in member.wants:
                wanting = [m for m in members if update_id in m.wants]
                return self._offered[update_id], _together(wanting)
        return None

    def _is_complete(self, newest: Offered, lacking: list[Member]) -> bool:
        """Whether all are here that are expected, or nobody waits for them any longer."""
        size = self._hub.info.world_size
        if not size or self._was_complete:
            return True
        following = sum(not member.is_observer for member in self._hub.members)
        self._was_complete = (
            following >= size - 1
            or any(newest.update_id in member.wants for member in lacking)
            or time.monotonic() >= newest.published_at + self._timeout_s
        )
        return self._was_complete

    def patience_s(self) -> float | None:
        """How long to wait for news; None for ever."""
        newest = self._newest
        if newest is None or self._was_complete or not self._hub.info.world_size:
            return None
        left = newest.published_at + self._timeout_s - time.monotonic()
        if left <= 0:
            self._was_complete = True  # also where nobody came at all: whoever comes now gets it
        return max(0.0, left)


def _together(members: list[Member]) -> tuple[Member, ...]:
    """All at once, or where something failed before, one after another: to see who it is."""
    suspects = [member for member in members if member.num_failures]
    if suspects:
        trusted = [member for member in members if not member.num_failures]
        return tuple(trusted) or (suspects[0],)
    return tuple(sorted(members, key=lambda m: (m.group_rank, m.rank, m.worker)))
