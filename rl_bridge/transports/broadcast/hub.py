"""The publisher's side of all connections: one thread that accepts, reads, and waits for nobody.

Who connects has to prove that it knows the token before anything that it says is parsed; what then
does not parse ends its connection, and nobody else's. What members say is noted here; the sender's
thread acts on it.
"""

import logging
import os
import select
import socket
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

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
from rl_bridge.transports.wire.channel import Channel, Leave, Message, Refused, Reported, Wake

__all__ = ["Hub", "Member"]

_LOG = logging.getLogger(__name__)

_REMEMBERED = 64
_MAX_ANSWERS = 16
# Of a look at what members said, each as much of everybody as a channel reads at a time.
_MOST_ROUNDS = 64


class Member(Peer):
    """One receiver, as the publisher knows it. Changed under the hub's lock only."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with what it said of itself."""
        super().__init__(
            channel,
            worker=join.worker,
            rank=join.rank,
            pid=join.pid,
            is_observer=join.is_observer,
        )
        self.group_rank = join.group_rank
        self.has: set[str] = set()
        self.wants: OrderedDict[str, Want] = OrderedDict()
        self.answers: OrderedDict[int, Message] = OrderedDict()
        self.num_failures = 0


def _keep_newest(kept: OrderedDict[Any, Any], count: int) -> None:
    for oldest in list(kept)[:-count]:
        del kept[oldest]


def _joining(text: bytes) -> Join | None:
    try:
        message = from_receiver(text)
    except ValidationError:
        return None
    return message if isinstance(message, Join) else None


class Hub:
    """All connections of one publisher, and the thread that serves them."""

    def __init__(
        self,
        listener: socket.socket,
        info: BroadcastInitInfo,
        *,
        max_members: int,
        timeout_s: float,
    ) -> None:
        """Serve from now on.

        Args:
            listener: the socket, which is the hub's from here on.
            info: what receivers were told.
            max_members: most receivers at a time.
            timeout_s: how long a connection may take to join.

        """
        self.info = info
        self.changed = threading.Condition(threading.RLock())
        """The lock of everything here; told when members come, go or answer."""
        self.members: list[Member] = []
        self._gone: list[Member] = []
        self._stores: dict[int, tuple[GroupStore, tuple[Member, ...]]] = {}
        self._acceptor = Acceptor(
            listener,
            magic=MAGIC,
            token=bytes.fromhex(info.token),
            identity=info.identity,
            parse=_joining,
            timeout_s=timeout_s,
            max_members=max_members,
        )
        self._max_members = max_members
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._is_stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="rlb-broadcast-hub", daemon=True)
        _HUBS.add(self)
        self._thread.start()

    # ---- what the publisher's end and the sender call -------------------------------------------

    def records(self) -> list[Record]:
        """What everybody reported, up to what has arrived at this machine by now."""
        self.drain()
        with self.changed:
            return [m.record() for m in (*self._gone, *self.members) if not m.is_observer]

    def drain(self) -> None:
        """Read what members said already; who goes on talking is not listened to for ever."""
        try:
            for _ in range(_MOST_ROUNDS):
                if self._is_stopping or not self._step(0):
                    return
        finally:
            self._wake.poke()  # what is left to send now is not what its thread waits for

    def send(self, members: Iterable[Member], message: Message) -> None:
        """Tell members; whoever is gone meanwhile is noted by the thread."""
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
        """Make the rendezvous of a group; members' values come by way of this hub."""

        def tell(key: str, value: bytes) -> None:
            self.send(members, StoreValue(group=group, key=key, value=value.hex()))

        store = GroupStore(tell, timeout_s=self._timeout_s)
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
        """Hang up everywhere and end the thread. Idempotent; in a forked child a no-op."""
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

    def forget(self) -> None:
        """In a forked child: close its copy of the listening socket."""
        self._acceptor.listener.close()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._step(None)
            except Exception:  # noqa: BLE001 - it must not end the service for everybody else
                if not self._is_stopping:
                    _LOG.warning("a broadcast connection failed", exc_info=True)

    def _step(self, timeout_ms: float | None) -> bool:
        """Serve what is ready; returns whether anything was."""
        poll, timeout_ms = self._look_out(timeout_ms)
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

    def _look_out(self, timeout_ms: float | None) -> tuple[select.poll, float | None]:
        poll = select.poll()
        with self.changed:
            # Only the thread opens the door: strangers can always knock once more.
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
                "Give each engine a rank of its own, or close that one."
            )

    def _follow(self, member: Member) -> None:
        """Let one that only looked follow, if there is a place for it."""
        try:
            self._check_place(member.group_rank)
        except WeightBridgeUnavailableError as error:
            self.drop(member, str(error))
        else:
            member.is_observer = False

    def _serve(self, member: Member) -> None:
        try:
            self._hear(member)
        except BaseException:
            member.channel.is_lost = True  # a message was heard by half: its next link repeats it
            raise

    def _hear(self, member: Member) -> None:
        channel = member.channel
        channel.flush()
        channel.fill()
        while not member.is_gone and (text := channel.take()) is not None:
            try:
                message = from_receiver(text)
            except ValidationError:
                _LOG.warning("%s sent what is no message; its connection ends", member.name)
                self._lose(member)
                return
            self._note(member, message)
        if channel.is_lost:
            self._lose(member)

    def _note(self, member: Member, message: FromReceiver) -> None:
        match message:
            case Reported(report=report):
                take_note(member.updates, report)
            case StoreValue():
                self._pass_on(member, message)
            case Want(update_id=update_id):
                member.wants[update_id] = message
                _keep_newest(member.wants, _MAX_ANSWERS)
            case Ready() | Declined() | Arrived() | Failed():
                member.answers[message.transfer] = message
                member.answers.move_to_end(message.transfer)
                _keep_newest(member.answers, _MAX_ANSWERS)
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
        # Out of the members last: what an interrupt cuts off, the next look does again.
        member.channel.close()
        member.is_gone = True
        for store, members in self._stores.values():
            if member in members:
                store.fail(f"{member.name} is gone")
        if member.updates and not member.is_observer and member not in self._gone:
            self._gone.append(member)
            del self._gone[:-_REMEMBERED]
        self.changed.notify_all()
        if member in self.members:
            self.members.remove(member)


_HUBS: weakref.WeakSet[Hub] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A copy of the socket in a child would keep receivers waiting for a publisher that is gone.
    for hub in list(_HUBS):
        hub.forget()


os.register_at_fork(after_in_child=_forget_in_child)
