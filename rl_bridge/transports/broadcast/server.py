"""The publisher's control server: one thread that accepts connections, reads, and never waits.

The server notes the messages of members, and the sender's thread acts on them. A text that is no
message ends the connection that it came on, and no other.
"""

import logging
import os
import select
import socket
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.memory.control import Record, take_note
from rl_bridge.transports.broadcast.group import GroupStore
from rl_bridge.transports.broadcast.init_info import MAGIC, BroadcastInitInfo
from rl_bridge.transports.broadcast.messages import (
    Arrived,
    Declined,
    Failed,
    FromReceiver,
    Join,
    Ready,
    StoreValue,
    Want,
    Welcome,
    from_receiver,
)
from rl_bridge.transports.wire.acceptor import Acceptor, Peer
from rl_bridge.transports.wire.channel import (
    Channel,
    Leave,
    Message,
    Refused,
    Reported,
    Wake,
    keep_newest,
)

_LOG = logging.getLogger(__name__)

_MAX_GONE = 64
_MAX_ANSWERS = 16
_MAX_CATCH_UP_ROUNDS = 64


class Member(Peer):
    """One receiver, as the publisher knows it. Changed only under the server's lock."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(
            channel,
            worker=join.worker,
            rank=join.rank,
            pid=join.pid,
            is_observer=join.is_observer,
        )
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


def _parse_join(text: bytes) -> Join | None:
    message = from_receiver(text)
    return message if isinstance(message, Join) else None


class ControlServer:
    """All connections of one publisher, and the thread that serves them."""

    def __init__(
        self,
        listener: socket.socket,
        info: BroadcastInitInfo,
        *,
        max_members: int,
        timeout_s: float,
    ) -> None:
        """Serve at `listener`, and close it at the end; each connection joins in `timeout_s`."""
        self.info = info
        self.changed = threading.Condition(threading.RLock())
        """The lock of everything here; notified when members come, leave or answer."""
        self.members: list[Member] = []
        self._gone: list[Member] = []
        self._stores: dict[int, tuple[GroupStore, tuple[Member, ...]]] = {}
        self._acceptor = Acceptor(
            listener,
            magic=MAGIC,
            token=bytes.fromhex(info.token),
            identity=info.identity,
            parse=_parse_join,
            timeout_s=timeout_s,
            max_members=max_members,
        )
        self._max_members = max_members
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._is_stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="rlb-broadcast-server", daemon=True)
        _SERVERS.add(self)
        self._thread.start()

    # ---- calls from the publisher's end and the sender ------------------------------------------

    def records(self) -> list[Record]:
        """Everything that members reported, up to what has arrived at this machine by now."""
        self.catch_up()
        with self.changed:
            return [m.record() for m in (*self._gone, *self.members) if not m.is_observer]

    def catch_up(self) -> None:
        """Read what has arrived by now, in a bounded number of rounds."""
        try:
            for _ in range(_MAX_CATCH_UP_ROUNDS):
                if self._is_stopping or not self._step(0):
                    return
        finally:
            self._wake.poke()  # the thread must poll again: there may be something to send

    def send(self, members: Iterable[Member], message: Message) -> None:
        """Send a message to members; the thread notices those that are gone meanwhile."""
        for member in members:
            member.channel.send(message)
        self._wake.poke()

    def drop(self, member: Member, reason: str) -> None:
        """End a member's connection."""
        with self.changed:
            if not member.is_gone:
                _LOG.warning("broadcast group %s: %s %s", self.info.group_name, member.name, reason)
                member.channel.send(Refused(reason=reason[:2000]))
                self._lose(member)

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

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Hang up everywhere and end the thread. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._is_stopping = True
        self._wake.poke()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        with self.changed:
            self._acceptor.close()
            for member in list(self.members):
                member.channel.send(Refused(reason="the publisher closed"))
                self._lose(member)
        self._wake.close()

    def close_listener(self) -> None:
        """Close the listening socket; in a forked child its copy."""
        self._acceptor.listener.close()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._step(None)
            except Exception:  # noqa: BLE001 - one connection's failure must not end the others
                if not self._is_stopping:
                    _LOG.warning("a broadcast connection failed", exc_info=True)

    def _step(self, timeout_ms: float | None) -> bool:
        """Serve what is ready; returns whether anything was."""
        poll, timeout_ms = self._make_poll(timeout_ms)
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        if self._wake.fd in ready:
            self._wake.clear()
        with self.changed:
            if not self._is_stopping:
                for member in list(self.members):
                    if member.channel.socket.fileno() in ready or member.channel.is_lost:
                        self._serve(member)
                for channel, join in self._acceptor.serve(ready, self.changed):
                    self._join(channel, join)
        return bool(ready)

    def _make_poll(self, timeout_ms: float | None) -> tuple[select.poll, float | None]:
        poll = select.poll()
        with self.changed:
            # Strangers may connect without end, so only the thread accepts them, not `catch_up`.
            strangers = self._acceptor.channels if timeout_ms is None else []
            for channel in (*(m.channel for m in self.members), *strangers):
                if channel.is_lost or channel.socket.fileno() < 0:
                    timeout_ms = 0  # it ended while something was sent
                else:
                    wants = select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0)
                    poll.register(channel.socket, wants)
            if timeout_ms is None:
                if self._acceptor.listener.fileno() >= 0:
                    poll.register(self._acceptor.listener, select.POLLIN)
                poll.register(self._wake.fd, select.POLLIN)
                left = self._acceptor.seconds_left
                timeout_ms = None if left is None else left * 1e3 + 1
        return poll, timeout_ms

    def _join(self, channel: Channel, join: Join) -> None:
        try:
            self._check_room(join)
        except WeightBridgeUnavailableError as error:
            channel.send(Refused(reason=str(error)[:2000]))
            channel.close()
            return
        self._gone = [
            m
            for m in self._gone
            if (m.worker, m.rank, m.pid) != (join.worker, join.rank, join.pid) or m.updates
        ]
        self.members.append(Member(channel, join))
        channel.send(Welcome())
        self._serve(self.members[-1])
        self.changed.notify_all()

    def _check_room(self, join: Join) -> None:
        """Raise if the newcomer has no place here."""
        if len(self.members) >= self._max_members:
            raise WeightBridgeUnavailableError(
                f"the publisher has room for {self._max_members} consumers and all are taken. "
                "Close bridges that are not used, or raise max_consumers on the publisher."
            )
        if not join.is_observer:
            self._check_place(join.group_rank)

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

    def _follow(self, member: Member) -> None:
        """Make an observer a full member, if there is a place for it."""
        try:
            self._check_place(member.group_rank)
        except WeightBridgeUnavailableError as error:
            self.drop(member, str(error))
        else:
            member.is_observer = False

    def _serve(self, member: Member) -> None:
        channel = member.channel
        channel.flush()
        channel.fill()
        while not member.is_gone and (text := channel.take()) is not None:
            message = from_receiver(text)
            if message is None:
                _LOG.warning("%s sent a text that is no message; its connection ends", member.name)
                self._lose(member)
                return
            self._handle(member, message)
        if channel.is_lost:
            self._lose(member)

    def _handle(self, member: Member, message: FromReceiver) -> None:
        match message:
            case Reported(report=report):
                take_note(member.updates, report)
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
            case Leave():
                self._lose(member)
            case Join(is_observer=False) if member.is_observer:
                self._follow(member)
            case Join():
                pass
        self.changed.notify_all()

    def _pass_on(self, member: Member, message: StoreValue) -> None:
        store, members = self._stores.get(message.group, (None, ()))
        if store is not None and member in members:
            store.learn(message.key, bytes.fromhex(message.value))
            for other in members:
                if other is not member:
                    other.channel.send(message)

    def _lose(self, member: Member) -> None:
        member.channel.close()
        member.is_gone = True
        for store, members in self._stores.values():
            if member in members:
                store.fail(f"{member.name} is gone")
        if member.updates and not member.is_observer and member not in self._gone:
            self._gone.append(member)
            del self._gone[:-_MAX_GONE]
        if member in self.members:
            self.members.remove(member)
        self.changed.notify_all()


_SERVERS: weakref.WeakSet[ControlServer] = weakref.WeakSet()


def _close_in_child() -> None:
    # With a copy of the socket in a child, receivers would not notice that this process is gone.
    for server in list(_SERVERS):
        server.close_listener()


os.register_at_fork(after_in_child=_close_in_child)
