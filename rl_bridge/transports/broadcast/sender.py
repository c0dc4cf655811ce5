"""The trainer's end, and its two threads: one talks to receivers, one sends versions to them.

The control server notes messages of members, and the sender acts on them: it decides what to send
next and to whom. The newest version is sent at once to every receiver that follows; older versions
are sent to the receivers that ask for them. Before a transfer each receiver says that it is ready,
so that no group begins with a receiver that is dead or hangs. If a transfer breaks off all the
same, its group is given up, the receivers that are gone are left out, and the others get the
version in a new group. They keep their processes, and the versions that they hold.
"""

import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.transports.broadcast.group import BrokenGroups, Group, GroupStore, said, send_slices
from rl_bridge.transports.broadcast.messages import (
    PROTOCOL,
    STEPS_IN_TIME,
    Arrived,
    Backend,
    BroadcastHandle,
    BroadcastInitInfo,
    CalledOff,
    Declined,
    Failed,
    FromReceiver,
    Go,
    Join,
    Offer,
    Ready,
    Released,
    StoreValue,
    Want,
    Welcome,
)
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import (
    Channel,
    Gone,
    Handle,
    Message,
    Refused,
    keep_newest,
)
from rl_bridge.transports.wire.ends import Options, PeerPublisher, Sealed, sealed_in
from rl_bridge.transports.wire.server import Peer, PeerServer

_LOG = logging.getLogger(__name__)

SLICE_NBYTES = 16 << 20
"""Small enough to be digested out of the cache, large enough that a slice's own cost is nothing."""
# A receiver that fails so often is left out, so that it does not take all of the publisher's time.
_MAX_FAILURES = 3
# After a transfer broke off, members have so long to report how it ended. Their sockets are
# closed at once, so members that live answer at once.
_GRACE_S = 5.0
# Slices that Gloo had begun when a transfer broke off end within as many of its deadlines.
_MAX_WAITS = 4
_ANSWERS = (Ready, Declined)
_ENDS = (Arrived, Failed)
_MAX_ANSWERS = 16


# ---- members, and the server that talks to them --------------------------------------------------


class Member(Peer):
    """One receiver."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(channel, join)
        self.group_rank = join.group_rank
        self.has: set[str] = set()
        self.wants: OrderedDict[str, tuple[Want, int]] = OrderedDict()
        """What it asked for, with the last transfer that had ended at it by then."""
        self.answers: OrderedDict[int, Message] = OrderedDict()
        self.last_ended = 0
        self.num_failures = 0

    def note_sent(self, update_id: str, transfer: int) -> None:
        """Note that a transfer has been made; a `Want` that came after its end asks for another."""
        self.has.add(update_id)
        if update_id in self.wants and self.wants[update_id][1] < transfer:
            del self.wants[update_id]


class ControlServer(PeerServer[Member, Join]):
    """The server; the sender's thread acts on what members say.

    Attributes:
        info: where it listens.

    """

    def __init__(
        self,
        listener: socket.socket,
        info: BroadcastInitInfo,
        options: Options,
    ) -> None:
        """Serve at `listener`, and close it at the end."""
        self.info = info
        self._stores: dict[int, tuple[GroupStore, tuple[Member, ...]]] = {}
        super().__init__(
            listener,
            f"broadcast group {info.group_name}",
            PROTOCOL,
            token=bytes.fromhex(info.token),
            identity=info.identity,
            timeout_s=options.timeout_s,
            max_members=options.max_consumers,
            tls=options.tls,
        )

    # ---- calls from the sender ------------------------------------------------------------------

    def send(self, members: Iterable[Member], message: Message) -> None:
        """Send a message to members; the thread notices those that are gone meanwhile."""
        for member in members:
            member.channel.send(message)
        self._wake.poke()

    def drop(self, member: Member, reason: str) -> None:
        """End a member's connection."""
        with self.changed:
            if not member.is_gone:
                _LOG.warning("%s: %s %s", self.name, member.name, reason)
                member.channel.send(Refused(reason=reason[:2000]))
                self.lose(member)

    def open_store(self, group: int, members: tuple[Member, ...]) -> GroupStore:
        """Make the rendezvous of a group; this server passes members' values on to each other."""

        def send(key: str, value: bytes) -> None:
            self.send(members, StoreValue(group=group, key=key, value=value.hex()))

        store = GroupStore(send, timeout_s=self._timeout_s)
        with self.changed:
            self._stores[group] = store, members
            for member in members:
                if member.is_gone:
                    store.fail(f"{member.name} is gone")
        return store

    def close_store(self, group: int) -> None:
        """Forget a rendezvous."""
        with self.changed:
            self._stores.pop(group, None)

    # ---- the thread -----------------------------------------------------------------------------

    def join(self, channel: Channel, join: Join) -> None:
        """See `PeerServer`."""
        if not self.has_room(channel):
            return
        try:
            if not join.is_observer:
                self._check_place(join.group_rank)
        except WeightBridgeUnavailableError as error:
            self.refuse(channel, error)
            return
        self.admit(Member(channel, join), Welcome())

    def _check_place(self, rank: int) -> None:
        size = self.info.world_size
        if not size:
            return
        if not 0 < rank < size:
            raise WeightBridgeUnavailableError(
                f"rank {rank} is not in the group {self.info.group_name!r} of world_size={size}. "
                f"Set rank_offset and source_rank so that engines take 1 to {size - 1}."
            )
        twins = [m for m in self.members if m.group_rank == rank and not m.is_observer]
        if twins:
            raise WeightBridgeUnavailableError(
                f"rank {rank} of the group {self.info.group_name!r} is taken by {twins[0].name}. "
                "Give each engine a rank of its own, or close the engine that has this rank."
            )

    def follow(self, member: Member, join: Join) -> None:
        """Make an observer a full member, if there is a place for it."""
        if join.is_observer or not member.is_observer:
            return
        try:
            self._check_place(member.group_rank)
        except WeightBridgeUnavailableError as error:
            self.drop(member, str(error))
        else:
            member.is_observer = False

    def handle(self, member: Member, message: FromReceiver) -> None:
        """See `PeerServer`."""
        match message:
            case StoreValue():
                self._pass_on(member, message)
            case Want(update_id=update_id):
                member.wants[update_id] = message, member.last_ended
                keep_newest(member.wants, _MAX_ANSWERS)
            case Ready() | Declined() | Arrived() | Failed():
                if not isinstance(message, Ready):
                    member.last_ended = message.transfer
                member.answers[message.transfer] = message
                member.answers.move_to_end(message.transfer)
                keep_newest(member.answers, _MAX_ANSWERS)
        self.changed.notify_all()

    def _pass_on(self, member: Member, message: StoreValue) -> None:
        store, members = self._stores.get(message.group, (None, ()))
        if store is not None and member in members:
            store.learn(message.key, bytes.fromhex(message.value))
            for other in members:
                if other is not member:
                    other.channel.send(message)

    def let_go(self, member: Member) -> None:
        """See `PeerServer`."""
        for store, members in self._stores.values():
            if member in members:
                store.fail(f"{member.name} is gone")


# ---- what is sent, and to whom -------------------------------------------------------------------


@dataclass(slots=True)
class Offered:
    """A sealed version. Once it is published, its `header` is known and receivers hear of it."""

    update_id: str
    slot: Slot
    generation: int
    arena_nbytes: int
    layout_digest: str
    header: str = ""
    published_at: float = field(default_factory=time.monotonic)
    is_released: bool = False
    num_broken_groups: int = 0
    """How many groups whose transfer broke off still read it."""


class Schedule:
    """Decides what to send next, and to whom. Called under the server's lock."""

    def __init__(self, server: ControlServer, *, timeout_s: float) -> None:
        """Start empty; `timeout_s` is how long the first version waits for all members."""
        self._server = server
        self._timeout_s = timeout_s
        self._offered: dict[str, Offered] = {}
        self._newest: Offered | None = None
        self._was_complete = False

    def add(self, offered: Offered) -> None:
        """Note a version that is not published yet."""
        self._offered[offered.update_id] = offered

    def announce(self, offered: Offered, header: str) -> None:
        """Send this version to every receiver that follows, before all others."""
        offered.header = header
        offered.published_at = time.monotonic()
        self._newest = offered

    def find(self, update_id: str) -> Offered | None:
        """Find a version that is not released."""
        return self._offered.get(update_id)

    def withdraw(self, update_id: str) -> Offered | None:
        """Stop sending a version; returns it, or None if it is not here."""
        offered = self._offered.pop(update_id, None)
        if offered is not None:
            offered.is_released = True
            if self._newest is offered:
                self._newest = None
            for member in self._server.members:
                member.has.discard(update_id)
        return offered

    def read_answers(self) -> bool:
        """Handle the members' answers; returns whether a transfer failed at one of them."""
        has_failed = False
        for member in list(self._server.members):
            for transfer, answer in list(member.answers.items()):
                if isinstance(answer, Failed):
                    _LOG.warning("%s: transfer %d: %s", member.name, transfer, answer.reason)
                    has_failed = True
                    member.has.clear()
                    self.blame(member)
                if isinstance(answer, Arrived):
                    member.num_failures = 0
                member.answers.pop(transfer, None)
            for want, _ in list(member.wants.values()):
                self._check_want(member, want)
        return has_failed

    def blame(self, member: Member) -> None:
        """Note that a transfer failed, perhaps because of this member."""
        member.num_failures += 1
        if member.num_failures >= _MAX_FAILURES:
            self._server.drop(member, f"failed in {member.num_failures} transfers")

    def _check_want(self, member: Member, want: Want) -> None:
        offered = self._offered.get(want.update_id)
        if offered is not None and not offered.header:
            offered = None  # not published yet: a receiver cannot have its manifest
        asked = want.arena_nbytes, want.generation
        if offered is None:
            reason = "its publisher released it"
        elif (offered.arena_nbytes, offered.generation) != asked:
            found = offered.arena_nbytes, offered.generation
            reason = f"the publisher has (bytes, write) {found}, the receiver asked for {asked}"
        else:
            return
        del member.wants[want.update_id]
        gone = Gone(update_id=want.update_id, reason=reason, is_stale=offered is None)
        self._server.send([member], gone)

    def choose(self) -> tuple[Offered, tuple[Member, ...]] | None:
        """Choose the newest version for all that lack it, else a version that is asked for."""
        newest = self._newest
        members = self._server.members
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
        """Whether all expected members are here, or the wait for them is over."""
        size = self._server.info.world_size
        if not size or self._was_complete:
            return True
        following = sum(not member.is_observer for member in self._server.members)
        self._was_complete = (
            following >= size - 1
            or any(newest.update_id in member.wants for member in lacking)
            or time.monotonic() >= newest.published_at + self._timeout_s
        )
        return self._was_complete

    def wait_s(self) -> float | None:
        """How long to wait for news; None: without end."""
        newest = self._newest
        if newest is None or self._was_complete or not self._server.info.world_size:
            return None
        left = newest.published_at + self._timeout_s - time.monotonic()
        if left <= 0:
            self._was_complete = True  # from now on each member gets the version when it comes
        return max(0.0, left)


def _together(members: list[Member]) -> tuple[Member, ...]:
    """Choose all members at once; suspects, after failures, one by one, to find the faulty one."""
    suspects = [member for member in members if member.num_failures]
    if suspects:
        trusted = [member for member in members if not member.num_failures]
        return tuple(trusted) or (suspects[0],)
    return tuple(sorted(members, key=lambda m: (m.group_rank, m.rank, m.worker)))


class Sender:
    """Sends versions in a thread of its own; its state is changed under the server's lock."""

    def __init__(
        self,
        server: ControlServer,
        arenas: Arenas,
        *,
        timeout_s: float,
        free: Callable[[str], None],
        at_end: Callable[[], None],
    ) -> None:
        """Start the thread, which waits `timeout_s` at most for a receiver and for a slice.

        `free`, called under the server's lock, lets a released version's slot be written again. The
        thread calls `at_end` once nothing reads the arenas any longer.
        """
        self._server = server
        self._arenas = arenas
        self._timeout_s = timeout_s
        self._free = free
        self._at_end = at_end
        self._schedule = Schedule(server, timeout_s=timeout_s)
        self._sending: Offered | None = None
        self._receivers: tuple[Member, ...] = ()
        self._transfer = 0
        self._transfers = itertools.count(1)
        self._groups = itertools.count(1)
        self._group: tuple[tuple[Member, ...], int, Group] | None = None
        self._on_wire: Offered | None = None
        self._broken_groups = BrokenGroups()
        self._is_suspect = False
        self._is_stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rlb-broadcast-sender", daemon=True)
        self._thread.start()

    # ---- calls from the publisher's end ---------------------------------------------------------

    def prepare(self, offered: Offered) -> None:
        """Note a version that is sealed, and not published yet."""
        with self._server.changed:
            self._schedule.add(offered)

    def announce(self, update_id: str, header: str) -> None:
        """Send a version to every receiver that follows, and to those that ask for it.

        Args:
            update_id: a version that is prepared.
            header: digest of its manifest's header, which receivers compare with the manifest's.

        Raises:
            SegmentError: it was released.

        """
        with self._server.changed:
            offered = self._schedule.find(update_id)
            if offered is None:
                raise SegmentError(f"update {update_id} is gone: it was released. Publish again.")
            self._schedule.announce(offered, header)
            self._server.changed.notify_all()

    def release(self, update_id: str) -> None:
        """Withdraw a version; a transfer that has begun still sends it whole."""
        self._server.catch_up()
        with self._server.changed:
            offered = self._schedule.withdraw(update_id)
            if offered is None:
                return
            followers = [member for member in self._server.members if not member.is_observer]
            if self._sending is not offered or self._has_arrived():
                self._free_slot(offered)
            self._server.changed.notify_all()
        self._server.send(followers, Released(update_id=update_id))

    def _free_slot(self, offered: Offered) -> None:
        if not offered.num_broken_groups:
            self._free(offered.update_id)

    def _has_arrived(self) -> bool:
        """Whether all receivers have the version that is being sent: nothing reads it now."""
        answers = [member.answers.get(self._transfer) for member in self._receivers]
        return bool(answers) and all(isinstance(answer, Arrived) for answer in answers)

    def receivers_of(self, update_id: str) -> list[str]:
        """Name the receivers that a version is being sent to."""
        with self._server.changed:
            if self._sending is None or self._sending.update_id != update_id:
                return []
            return [f"{member.name}, being sent to" for member in self._receivers]

    def find(self, update_id: str) -> Offered | None:
        """Find a version that is not released."""
        return self._schedule.find(update_id)

    def stop(self) -> None:
        """Begin no more transfers."""
        if os.getpid() == self._pid:
            with self._server.changed:
                self._is_stopping = True
                self._server.changed.notify_all()

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
            except Exception:  # noqa: BLE001 - the next version has to be sent all the same
                if not self._is_stopping:
                    _LOG.exception("a broadcast failed")
                    self._end_group()
        self._end_group()
        if self._broken_groups.join((_MAX_WAITS + 1) * self._timeout_s):
            self._at_end()

    def _next_task(self) -> tuple[Offered, tuple[Member, ...]] | None:
        with self._server.changed:
            while not self._is_stopping:
                self._is_suspect |= self._schedule.read_answers()
                task = self._schedule.choose()
                if task is not None:
                    # Under the same lock: no answer to the last transfer counts for this one.
                    self._sending, self._receivers = task
                    self._transfer = next(self._transfers)
                    return task
                self._server.changed.wait(self._schedule.wait_s())
        return None

    # ---- one transfer ---------------------------------------------------------------------------

    def _carry_out(self, offered: Offered, members: tuple[Member, ...]) -> None:
        transfer = self._transfer
        try:
            ready = self._offer(transfer, offered, members)
            if ready:
                self._send(transfer, offered, ready)
        finally:
            with self._server.changed:
                self._sending, self._receivers = None, ()
                if offered.is_released:
                    self._free_slot(offered)
                self._server.changed.notify_all()

    def _offer(
        self, transfer: int, offered: Offered, members: tuple[Member, ...]
    ) -> tuple[Member, ...]:
        """Ask members whether they are ready; drops those that do not answer."""
        offer = Offer(
            transfer=transfer,
            update_id=offered.update_id,
            generation=offered.generation,
            arena_nbytes=offered.arena_nbytes,
            layout_digest=offered.layout_digest,
            header=offered.header,
        )
        self._server.send(members, offer)
        answers = self._collect(transfer, members, _ANSWERS, self._timeout_s)
        ready = []
        for member in members:
            answer = answers.get(member)
            if isinstance(answer, Ready):
                ready.append(member)
            elif isinstance(answer, Declined):
                # Not sent again unasked: the member may ask for it once it has room.
                with self._server.changed:
                    member.note_sent(offered.update_id, transfer)
                _LOG.info("%s declined: %s", member.name, answer.reason)
            elif not member.is_gone and not self._is_stopping:
                self._server.drop(member, f"did not answer within {self._timeout_s} s")
        return tuple(ready)

    def _collect(
        self,
        transfer: int,
        members: tuple[Member, ...],
        kinds: tuple[type[Message], ...],
        timeout_s: float,
    ) -> dict[Member, Message]:
        """Wait for an answer of one of these kinds from each member that is not gone."""

        def answered(member: Member) -> bool:
            return member.is_gone or isinstance(member.answers.get(transfer), kinds)

        with self._server.changed:
            self._server.changed.wait_for(
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
            group = self._start(transfer, members)
            group.why_aborted = partial(self._why_aborted, transfer, members)
            self._on_wire = offered
            arena = self._arenas.tensor(offered.slot, offered.arena_nbytes)
            send_slices(group, arena, SLICE_NBYTES)
        except (RuntimeError, TimeoutError) as error:
            self._break_off(transfer, offered, members, error)
            return
        with self._server.changed:
            for member in members:
                member.note_sent(offered.update_id, transfer)
        _LOG.info(
            "sent update %s: %d bytes to %d receivers in %.3f s",
            offered.update_id,
            offered.arena_nbytes,
            len(members),
            time.perf_counter() - start,
        )

    def _start(self, transfer: int, members: tuple[Member, ...]) -> Group:
        """Begin a transfer, in the last group if it has the same members, else in a new one."""
        known = self._group
        with self._server.changed:
            # A receiver that failed has left the group, even if all its bytes had been sent.
            for member in members:
                if any(isinstance(answer, Failed) for answer in member.answers.values()):
                    self._is_suspect = True
        if known is not None and known[0] == members and not self._is_suspect:
            self._send_go(transfer, known[1], members)
            return known[2]
        self._end_group()
        number = next(self._groups)
        store = self._server.open_store(number, members)
        try:
            self._send_go(transfer, number, members)
            group = Group(
                self._server.info.backend,
                store,
                rank=0,
                size=len(members) + 1,
                address=self._server.info.address,
                timeout_s=self._timeout_s,
                why_aborted=partial(self._why_aborted, transfer, members),
            )
        except BaseException:
            self._server.close_store(number)
            raise
        self._group = members, number, group
        return group

    def _send_go(self, transfer: int, number: int, members: tuple[Member, ...]) -> None:
        for rank, member in enumerate(members, 1):
            go = Go(
                transfer=transfer,
                group=number,
                rank=rank,
                size=len(members) + 1,
                slice_nbytes=SLICE_NBYTES,
            )
            self._server.send([member], go)

    def _break_off(
        self, transfer: int, offered: Offered, members: tuple[Member, ...], error: Exception
    ) -> None:
        """Give the group up, and find out which member failed."""
        reason = self._why_aborted(transfer, members) or said(error)
        _LOG.warning("transfer %d broke off: %s", transfer, reason)
        self._end_group()
        self._server.send(members, CalledOff(transfer=transfer, reason=reason))
        ends = self._collect(transfer, members, _ENDS, min(_GRACE_S, self._timeout_s))
        is_explained = any(member.is_gone for member in members)
        for member in members:
            if member.is_gone or self._is_stopping:
                continue
            if member not in ends:
                self._server.drop(member, f"hung in a transfer for more than {self._timeout_s} s")
                is_explained = True
        with self._server.changed:
            for member, end in ends.items():
                if isinstance(end, Arrived):
                    member.note_sent(offered.update_id, transfer)
                elif not is_explained:
                    self._schedule.blame(member)

    def _why_aborted(self, transfer: int, members: tuple[Member, ...]) -> str | None:
        """Why a transfer cannot succeed any longer, as the connections show; None while it can."""
        with self._server.changed:
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
        self._server.close_store(known[1])
        if read is None:
            known[2].close()
            return
        with self._server.changed:
            read.num_broken_groups += 1
        self._broken_groups.end(known[2], partial(self._note_group_end, read))

    def _note_group_end(self, offered: Offered) -> None:
        with self._server.changed:
            offered.num_broken_groups -= 1
            if offered.is_released and self._sending is not offered:
                self._free_slot(offered)


# ---- the publisher's end ------------------------------------------------------------------------


def group_info(
    listener: socket.socket,
    publisher_id: str,
    *,
    group_name: str | None,
    backend: Backend,
    world_size: int,
    has_tls: bool,
) -> BroadcastInitInfo:
    """Describe a new group to its receivers."""
    address, port = listener.getsockname()[:2]
    return BroadcastInitInfo(
        address=address,
        port=port,
        token=secrets.token_hex(32),
        publisher_id=publisher_id,
        group_name=f"rl_bridge-{publisher_id[:12]}" if group_name is None else group_name,
        backend=backend,
        world_size=world_size,
        has_tls=has_tls,
    )


class BroadcastPublisher(PeerPublisher):
    """See `rl_bridge.transports.base.PublisherEnd`."""

    def __init__(
        self, listener: socket.socket, info: BroadcastInitInfo, arenas: Arenas, options: Options
    ) -> None:
        """Serve receivers from now on."""
        self.info = info
        self._options = options

        def receivers_of(update_id: str) -> list[str]:
            return sender.receivers_of(update_id)

        self._ring = ring = SlotRing(
            arenas.slot_maker(f"rlb-{info.publisher_id[:12]}"),
            limit=options.max_slots,
            name_holders=receivers_of,
        )
        server = ControlServer(listener, info, options)
        self._sender = sender = Sender(
            server,
            arenas,
            timeout_s=options.timeout_s / STEPS_IN_TIME,
            free=ring.release,
            at_end=partial(_close_slots, server, ring, arenas),
        )
        super().__init__(server, ring, arenas.place, _end, server, sender, options.timeout_s)

    def _seal(
        self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str
    ) -> tuple[Sealed, Handle]:
        sealed = sealed_in(
            self._ring,
            plan,
            tensors,
            update_id,
            lock=self._server.changed,
            num_threads=self._options.num_threads,
        )
        nbytes, layout = plan.table.arena_nbytes, plan.table.digest
        self._sender.prepare(Offered(update_id, sealed.slot, sealed.generation, nbytes, layout))
        return sealed, BroadcastHandle(group=self.info, generation=sealed.generation)

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Leave the version to the sender, which sends the header's digest ahead of the bytes."""
        self._sender.announce(update_id, digest.hex())

    def _slot_of(self, update_id: str) -> Slot | None:
        offered = self._sender.find(update_id)
        return None if offered is None else offered.slot

    def release(self, update_id: str) -> None:
        """Let its slot be written again, once no transfer reads it."""
        self._sender.release(update_id)


def _close_slots(server: ControlServer, ring: SlotRing, arenas: Arenas) -> None:
    with server.changed:
        ring.close()
    arenas.close()


def _end(server: ControlServer, sender: Sender, timeout_s: float) -> None:
    # Hang up first: receivers in the middle of a transfer then end their side of it.
    sender.stop()
    server.close()
    sender.close(timeout_s=timeout_s)
