"""The publisher's second thread: carries versions to the receivers, and notices who is gone.

The newest version goes to all who follow, at once; older ones only to those who ask. Before a
transfer each receiver says that it is ready, so that the group never begins with one that is dead
or hangs. Where a transfer breaks off all the same, the group is given up, those who are gone are
left out, and the others get the version in a group of their own: they keep their processes and
what they hold.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rl_bridge.errors import SegmentError
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.broadcast.group import Group, send_slices
from rl_bridge.transports.broadcast.hub import Hub, Member
from rl_bridge.transports.broadcast.messages import (
    Arrived,
    CalledOff,
    Declined,
    Failed,
    Go,
    Offer,
    Ready,
    Released,
    Want,
)
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import Gone, Message

__all__ = [
    "SLICE_NBYTES",
    "Offered",
    "Schedule",
    "Sender",
    "Wrecks",
]

# ---- What a publisher sends next, and to whom: decided here, done by the sender.

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

    def seconds_left(self) -> float | None:
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


# ---- Groups that broke off, until nothing of theirs reads or writes memory any more.


class Wrecks:
    """Waits for them in threads of their own: whoever is left goes on at once."""

    def __init__(self) -> None:
        """Start without any."""
        self._threads: list[threading.Thread] = []

    def leave(self, group: Group, then: Callable[[], object]) -> None:
        """End a group, and call `then` when its memory may be used again.

        That may be at once, in this thread. It never is where the backend does not end what it
        began: then the memory is kept.
        """
        if group.is_idle:
            group.close()
            then()
            return
        thread = threading.Thread(
            target=_settle, args=(group, then), name="rlb-broadcast-wreck", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, for so long; returns whether they have."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _settle(group: Group, then: Callable[[], object]) -> None:
    if group.settle():
        then()
    else:
        _LOG.error("a broadcast that broke off does not end; the memory of its version is kept")


# ---- the rest builds on the parts above

SLICE_NBYTES = 16 << 20
"""Small enough to be digested out of the cache, large enough that a slice's own cost is nothing."""
# How long members may take to say what became of a transfer that broke off: those that live are
# told at once, by sockets that close.
_GRACE_S = 5.0
# What Gloo had begun when a transfer broke off ends within as many of its deadlines.
_MAX_WAITS = 4
_ANSWERS = (Ready, Declined)
_ENDS = (Arrived, Failed)


class Sender:
    """Sends versions in a thread of its own; everything is noted under the hub's lock."""

    def __init__(
        self,
        hub: Hub,
        arenas: Arenas,
        *,
        timeout_s: float,
        free: Callable[[str], None],
        at_end: Callable[[], None],
        slice_nbytes: int | None = None,
    ) -> None:
        """Start the thread.

        Args:
            hub: the connections.
            arenas: where the versions lie.
            timeout_s: longest wait for a receiver, and for a slice.
            free: lets a released version's slot be written again; called under the hub's lock.
            at_end: called by the thread when nothing reads the arenas any more.
            slice_nbytes: bytes that go over the wire at a time; None takes `SLICE_NBYTES`.

        """
        self._hub = hub
        self._arenas = arenas
        self._timeout_s = timeout_s
        self._free = free
        self._at_end = at_end
        self._slice_nbytes = SLICE_NBYTES if slice_nbytes is None else slice_nbytes
        self._schedule = Schedule(hub, timeout_s=timeout_s)
        self._sending: Offered | None = None
        self._receivers: tuple[Member, ...] = ()
        self._transfer = 0
        self._transfers = itertools.count(1)
        self._groups = itertools.count(1)
        self._group: tuple[tuple[Member, ...], int, Group] | None = None
        self._on_wire: Offered | None = None
        self._wrecks = Wrecks()
        self._is_suspect = False
        self._is_stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rlb-broadcast-sender", daemon=True)
        self._thread.start()

    # ---- what the publisher's end calls ---------------------------------------------------------

    def prepare(self, offered: Offered) -> None:
        """Take note of a version that is sealed, and not published yet."""
        with self._hub.changed:
            self._schedule.add(offered)

    def announce(self, update_id: str, header: str) -> None:
        """Send a version to all who follow, and to whoever asks.

        Args:
            update_id: of a version that is prepared.
            header: digest of its manifest's header, which receivers compare with the manifest's.

        Raises:
            SegmentError: it was released.

        """
        with self._hub.changed:
            offered = self._schedule.find(update_id)
            if offered is None:
                msg = f"update {update_id} is gone: it was released. Publish again."
                raise SegmentError(msg)
            self._schedule.announce(offered, header)
            self._hub.changed.notify_all()

    def release(self, update_id: str) -> None:
        """Withdraw a version; one that is on the wire still goes out whole."""
        self._hub.drain()
        with self._hub.changed:
            offered = self._schedule.withdraw(update_id)
            if offered is None:
                return
            followers = [member for member in self._hub.members if not member.is_observer]
            if self._sending is not offered or self._has_gone_out():
                self._give_back(offered)
            self._hub.changed.notify_all()
        self._hub.send(followers, Released(update_id=update_id))

    def _give_back(self, offered: Offered) -> None:
        if not offered.num_wrecks:
            self._free(offered.update_id)

    def _has_gone_out(self) -> bool:
        """Whether all receivers said that they have what is being sent: then nothing reads it."""
        answers = [member.answers.get(self._transfer) for member in self._receivers]
        return bool(answers) and all(isinstance(answer, Arrived) for answer in answers)

    def receivers_of(self, update_id: str) -> list[str]:
        """To whom a version is being sent now."""
        with self._hub.changed:
            if self._sending is None or self._sending.update_id != update_id:
                return []
            return [f"{member.name}, being sent to" for member in self._receivers]

    def find(self, update_id: str) -> Offered | None:
        """A version that is published and not released."""
        return self._schedule.find(update_id)

    def stop(self) -> None:
        """Begin nothing more."""
        if os.getpid() == self._pid:
            with self._hub.changed:
                self._is_stopping = True
                self._hub.changed.notify_all()

    def close(self, *, timeout_s: float) -> bool:
        """Stop after the slice that is on the wire; returns whether the thread ended."""
        if os.getpid() != self._pid:
            return False
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                task = self._next_task()
                if task is not None:
                    self._carry_out(*task)
            except Exception:  # noqa: BLE001 - the next version has to go out all the same
                if not self._is_stopping:
                    _LOG.exception("a broadcast failed")
                    self._end_group()
        self._end_group()
        if self._wrecks.join((_MAX_WAITS + 1) * self._timeout_s):
            self._at_end()

    def _next_task(self) -> tuple[Offered, tuple[Member, ...]] | None:
        with self._hub.changed:
            while not self._is_stopping:
                self._is_suspect |= self._schedule.hear_out()
                task = self._schedule.choose()
                if task is not None:
                    # At once: an answer to the transfer before must not be taken for this one's.
                    self._sending, self._receivers = task
                    self._transfer = next(self._transfers)
                    return task
                self._hub.changed.wait(self._schedule.seconds_left())
        return None

    # ---- one transfer ---------------------------------------------------------------------------

    def _carry_out(self, offered: Offered, members: tuple[Member, ...]) -> None:
        transfer = self._transfer
        try:
            ready = self._gather(transfer, offered, members)
            if ready:
                self._send(transfer, offered, ready)
        finally:
            with self._hub.changed:
                self._sending, self._receivers = None, ()
                if offered.is_released:
                    self._give_back(offered)
                self._hub.changed.notify_all()

    def _gather(
        self, transfer: int, offered: Offered, members: tuple[Member, ...]
    ) -> tuple[Member, ...]:
        """Ask who is ready, and leave out who does not say."""
        offer = Offer(
            transfer=transfer,
            update_id=offered.update_id,
            generation=offered.generation,
            arena_nbytes=offered.arena_nbytes,
            layout_digest=offered.layout_digest,
            header=offered.header,
        )
        self._hub.send(members, offer)
        answers = self._collect(transfer, members, _ANSWERS, self._timeout_s)
        ready = []
        for member in members:
            answer = answers.get(member)
            if isinstance(answer, Ready):
                ready.append(member)
            elif isinstance(answer, Declined):
                with self._hub.changed:
                    # It may ask for it once it has room; until then it is not pushed.
                    member.has.add(offered.update_id)
                    member.wants.pop(offered.update_id, None)
                _LOG.info("%s declined: %s", member.name, answer.reason)
            elif not member.is_gone and not self._is_stopping:
                self._hub.drop(member, f"did not answer within {self._timeout_s} s")
        return tuple(ready)

    def _collect(
        self,
        transfer: int,
        members: tuple[Member, ...],
        kinds: tuple[type[Message], ...],
        timeout_s: float,
    ) -> dict[Member, Message]:
        """Wait until everybody answered who lives."""

        def answered(member: Member) -> bool:
            return member.is_gone or isinstance(member.answers.get(transfer), kinds)

        with self._hub.changed:
            self._hub.changed.wait_for(
                lambda: self._is_stopping or all(map(answered, members)), timeout_s
            )
            found = {
                member: member.answers[transfer]
                for member in members
                if not member.is_gone and isinstance(member.answers.get(transfer), kinds)
            }
            for member in found:
                del member.answers[transfer]
            return found

    def _send(self, transfer: int, offered: Offered, members: tuple[Member, ...]) -> None:
        start = time.perf_counter()
        try:
            group = self._meet(transfer, members)
            group.why_off = partial(self._why_off, transfer, members)
            self._on_wire = offered
            arena = self._arenas.tensor(offered.slot, offered.arena_nbytes)
            send_slices(group, arena, self._slice_nbytes)
        except (RuntimeError, TimeoutError) as error:
            self._part(transfer, offered, members, error)
            return
        with self._hub.changed:
            for member in members:
                member.has.add(offered.update_id)
                member.wants.pop(offered.update_id, None)
        _LOG.info(
            "sent update %s: %d bytes to %d receivers in %.3f s",
            offered.update_id,
            offered.arena_nbytes,
            len(members),
            time.perf_counter() - start,
        )

    def _meet(self, transfer: int, members: tuple[Member, ...]) -> Group:
        """Begin: in the group that there is, if it is of the same members, or else in a new one."""
        known = self._group
        with self._hub.changed:
            # A receiver that failed left the group, also where its bytes had all been sent by then.
            for member in members:
                if any(isinstance(answer, Failed) for answer in member.answers.values()):
                    self._is_suspect = True
        if known is not None and known[0] == members and not self._is_suspect:
            self._go(transfer, known[1], members)
            return known[2]
        self._end_group()
        number = next(self._groups)
        store = self._hub.open_store(number, members)
        try:
            self._go(transfer, number, members)
            group = Group(
                self._hub.info.backend,
                store,
                rank=0,
                size=len(members) + 1,
                address=self._hub.info.address,
                timeout_s=self._timeout_s,
                why_off=partial(self._why_off, transfer, members),
            )
        except BaseException:
            self._hub.close_store(number)
            raise
        self._group = members, number, group
        return group

    def _go(self, transfer: int, number: int, members: tuple[Member, ...]) -> None:
        for rank, member in enumerate(members, 1):
            go = Go(
                transfer=transfer,
                group=number,
                rank=rank,
                size=len(members) + 1,
                slice_nbytes=self._slice_nbytes,
            )
            self._hub.send([member], go)

    def _part(
        self, transfer: int, offered: Offered, members: tuple[Member, ...], error: Exception
    ) -> None:
        """Give the group up, and find out who is to blame."""
        said = str(error).splitlines()[0][:500] if str(error) else type(error).__name__
        reason = self._why_off(transfer, members) or said
        _LOG.warning("transfer %d broke off: %s", transfer, reason)
        self._end_group()
        self._hub.send(members, CalledOff(transfer=transfer, reason=reason))
        ends = self._collect(transfer, members, _ENDS, min(_GRACE_S, self._timeout_s))
        is_explained = any(member.is_gone for member in members)
        for member in members:
            if member.is_gone or self._is_stopping:
                continue
            if member not in ends:
                self._hub.drop(member, f"hung in a transfer for more than {self._timeout_s} s")
                is_explained = True
        with self._hub.changed:
            for member, end in ends.items():
                if isinstance(end, Arrived):
                    member.has.add(offered.update_id)
                    member.wants.pop(offered.update_id, None)
                elif not is_explained:
                    self._schedule.blame(member)

    def _why_off(self, transfer: int, members: tuple[Member, ...]) -> str | None:
        """Why a transfer is in vain, if it is: the connections tell it at once."""
        with self._hub.changed:
            for member in members:
                answer = member.answers.get(transfer)
                if member.is_gone:
                    return f"{member.name} is gone"
                if isinstance(answer, Failed):
                    return f"{member.name}: {answer.reason}"
        return None

    def _end_group(self) -> None:
        self._is_suspect = False
        known, self._group = self._group, None
        read, self._on_wire = self._on_wire, None
        if known is None:
            return
        self._hub.close_store(known[1])
        if read is None:
            known[2].close()
            return
        with self._hub.changed:
            read.num_wrecks += 1
        self._wrecks.leave(known[2], partial(self._forget_wreck, read))

    def _forget_wreck(self, offered: Offered) -> None:
        with self._hub.changed:
            offered.num_wrecks -= 1
            if offered.is_released and self._sending is not offered:
                self._give_back(offered)
