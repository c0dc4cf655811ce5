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
from functools import partial

from rl_bridge.errors import SegmentError
from rl_bridge.transports._wire.arenas import Arenas
from rl_bridge.transports._wire.messages import Message
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
)
from rl_bridge.transports.broadcast.schedule import Offered, Schedule
from rl_bridge.transports.broadcast.wrecks import Wrecks

__all__ = ["SLICE_NBYTES", "Sender"]

_LOG = logging.getLogger(__name__)

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
                self._hub.changed.wait(self._schedule.patience_s())
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
