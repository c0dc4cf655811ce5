"""A publisher's control server: one thread that accepts connections, reads, and never waits.

A text that is no message ends the connection that it came on, and no other.
"""

import logging
import os
import select
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, Generic, Self, TypeVar

from rl_bridge.memory.control import Record, UpdateReport, legible, take_note
from rl_bridge.transports.wire.acceptor import Acceptor
from rl_bridge.transports.wire.channel import (
    Channel,
    Leave,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Reported,
    Wake,
)
from rl_bridge.transports.wire.tls import TLS

_LOG = logging.getLogger(__name__)

_MAX_GONE = 64
_MAX_REASON = 2000
_MAX_CATCH_UP_ROUNDS = 64
_CATCH_UP_S = 0.25


class Peer:
    """A receiver that joined, as its publisher knows it. Changed only under the server's lock.

    Attributes:
        channel: its connection.
        worker: its name, as it says.
        rank: its rank, as it says.
        pid: its process, as it says.
        reader: names this receiver over all its connections; empty if it gave no such name.
        is_observer: it leaves no record.
        is_gone: its connection ended.
        updates: update -> what it reported.

    """

    def __init__(
        self,
        channel: Channel,
        join: PeerJoin,
    ) -> None:
        """Start with the peer's own description of itself."""
        self.channel = channel
        self.worker = join.worker
        self.rank = join.rank
        self.pid = join.pid
        self.reader = join.reader
        self.is_observer = join.is_observer
        self.is_gone = False
        self.updates: OrderedDict[str, UpdateReport] = OrderedDict()

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.worker!r} rank {self.rank} (pid {self.pid})"

    def is_from(self, reader: str, pid: int) -> bool:
        """Whether it is a connection of that receiver."""
        return bool(reader) and (self.reader, self.pid) == (reader, pid)

    def take_over(self, gone: list[Self]) -> None:
        """Take over the reports of its earlier connections; removes them from `gone`."""
        if self.is_observer:
            return
        for one in [one for one in gone if one.is_from(self.reader, self.pid)]:
            self.updates = one.updates | self.updates
            gone.remove(one)

    def record(self) -> Record:
        """Everything that it reported."""
        return Record(
            worker=legible(self.worker),
            rank=self.rank,
            pid=self.pid,
            updates=tuple(self.updates.values()),
            presence="gone" if self.is_gone else "alive",
        )


_Member = TypeVar("_Member", bound=Peer)
_Joined = TypeVar("_Joined", bound=PeerJoin)


class PeerServer(ABC, Generic[_Member, _Joined]):
    """All connections of one publisher, and the thread that serves them.

    Attributes:
        name: for messages.
        changed: the lock of everything here; notified when anything changed.
        members: the peers that joined.

    """

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        protocol: PeerProtocol[_Joined, Any],
        *,
        token: bytes,
        identity: str,
        timeout_s: float,
        max_members: int,
        tls: TLS | None = None,
    ) -> None:
        """Serve from now on, in a thread.

        Args:
            listener: see `listen`; it is closed at the end.
            name: the publisher's, for messages.
            protocol: what both sides agree on.
            token: the secret that lets receivers in.
            identity: names the publisher; receivers learn it together with the token.
            timeout_s: longest that a new connection may take to join.
            max_members: most receivers at a time.
            tls: encrypts connections, and shows each side the other's certificate.

        """
        self.name = name
        self._parse = protocol.parse_receiver
        self.changed = threading.Condition(threading.RLock())
        self.members: list[_Member] = []
        self._gone: list[_Member] = []
        self._acceptor = Acceptor(
            listener,
            protocol,
            token=token,
            identity=identity,
            timeout_s=timeout_s,
            max_members=max_members,
            tls=tls,
        )
        self._max_members = max_members
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._is_stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"rlb-{name[:32]}", daemon=True)
        _SERVERS.add(self)
        self._thread.start()

    # ---- calls from the publisher's end ---------------------------------------------------------

    def records(self) -> list[Record]:
        """Everything that members reported, up to what has arrived at this machine by now."""
        self.catch_up()
        with self.changed:
            return [m.record() for m in (*self._gone, *self.members) if not m.is_observer]

    def catch_up(self) -> None:
        """Read what has arrived by now.

        Strangers may connect without end, so it stops after a bounded number of rounds and time.
        """
        until = time.monotonic() + _CATCH_UP_S
        try:
            for _ in range(_MAX_CATCH_UP_ROUNDS):
                if self._is_stopping or not self._step(0) or time.monotonic() > until:
                    return
        finally:
            self._wake.poke()  # the thread must poll again: there may be something to send

    def poke(self) -> None:
        """Have the thread look again at what it has to wait for."""
        self._wake.poke()

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
                self.lose(member)
        self._wake.close()

    def close_listener(self) -> None:
        """Close the listening socket; in a forked child its copy."""
        self._acceptor.listener.close()

    # ---- what a transport adds ------------------------------------------------------------------

    @abstractmethod
    def join(self, channel: Channel, join: _Joined) -> None:
        """`admit` a peer whose first message this is, or `refuse` it."""

    @abstractmethod
    def handle(self, member: _Member, message: Any) -> Message | None:
        """Do what a member asks for; the answer, if there is one.

        It gets the kinds of `PeerProtocol.from_receiver` only.
        """

    def follow(self, member: _Member, join: _Joined) -> None:
        """Note that a member that joined before joins again, as an observer or no longer as one."""
        member.is_observer = join.is_observer
        member.take_over(self._gone)

    def let_go(self, member: _Member) -> None:
        """Do what is to be done for a member that is gone, before its connection is closed."""

    # ---- what a transport calls, under the lock -------------------------------------------------

    def has_room(self, channel: Channel) -> bool:
        """Whether there is room for one more; else it is refused."""
        has_room = len(self.members) < self._max_members
        if not has_room:
            self.refuse(
                channel,
                f"the publisher has room for {self._max_members} consumers and all are taken. "
                "Close bridges that are not used, or let the publisher have more (max_consumers).",
            )
        return has_room

    def admit(self, member: _Member, welcome: Message) -> None:
        """Make a peer a member, which takes over the reports of its earlier connections."""
        self.members.append(member)
        member.take_over(self._gone)
        member.channel.send(welcome)
        self._serve(member)  # more may have come together with its first message
        self.changed.notify_all()

    def refuse(self, channel: Channel, reason: object) -> None:
        """Turn a peer away, and tell it why."""
        channel.send(Refused(reason=str(reason)[:_MAX_REASON]))
        channel.close()

    def lose(self, member: _Member) -> None:
        """End a member's connection."""
        member.is_gone = True
        self.let_go(member)
        member.channel.close()
        self._wake.poke()  # the end reaches the peer once nobody polls the socket any longer
        if member.updates and not member.is_observer and member not in self._gone:
            self._gone.append(member)
            del self._gone[:-_MAX_GONE]
        if member in self.members:
            self.members.remove(member)
        self.changed.notify_all()

    # ---- hooks of the thread, for transports that have more to wait for -------------------------

    def _begin(self, ready: set[int]) -> None:
        """Do what comes before the members are served."""

    def _end(self) -> None:
        """Do what comes after the members."""

    def _work(self) -> None:
        """Do what the thread has to do between two polls, without the lock."""

    def _watched(self) -> list[Any]:
        """Sockets and the like to poll besides the connections."""
        return []

    def _wait_s(self) -> float | None:
        """How long the thread may wait; None: until something comes."""
        return self._acceptor.seconds_left

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._step(None)
                self._work()
            except Exception:  # noqa: BLE001 - one connection's failure must not end the others
                if not self._is_stopping:
                    _LOG.warning("a connection of %s failed", self.name, exc_info=True)

    def _step(self, timeout_ms: float | None) -> bool:
        """Serve what is ready; returns whether anything was."""
        poll, timeout_ms = self._make_poll(timeout_ms)
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        wake = self._wake.fd
        if wake in ready:
            self._wake.clear()
        with self.changed:
            if not self._is_stopping:
                self._begin(ready)
                for member in list(self.members):
                    if member.channel.socket.fileno() in ready or member.channel.is_lost:
                        self._serve(member)
                for channel, join in self._acceptor.serve(ready, self.changed):
                    for before in [m for m in self.members if m.is_from(join.reader, join.pid)]:
                        self.lose(before)  # its socket may never show its end
                    self.join(channel, join)
                self._end()
        return bool(ready - {wake})

    def _make_poll(self, timeout_ms: float | None) -> tuple[select.poll, float | None]:
        poll = select.poll()
        with self.changed:
            for channel in (*(m.channel for m in self.members), *self._acceptor.channels):
                if channel.is_lost or channel.socket.fileno() < 0:
                    timeout_ms = 0  # it ended while something was sent
                else:
                    wants = select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0)
                    poll.register(channel.socket, wants)
            for one in (self._acceptor.listener, *self._watched()):
                if one.fileno() >= 0:
                    poll.register(one, select.POLLIN)
            if timeout_ms is None:
                poll.register(self._wake.fd, select.POLLIN)
                left = self._wait_s()
                timeout_ms = None if left is None else max(0.0, left) * 1e3 + (left > 0)
        return poll, timeout_ms

    def _serve(self, member: _Member) -> None:
        try:
            self._read(member)
        except BaseException:
            member.channel.is_lost = True  # handled in part: the peer connects and asks again
            raise

    def _read(self, member: _Member) -> None:
        channel = member.channel
        channel.flush()
        channel.fill(is_polled=True)
        while not member.is_gone and (text := channel.take()) is not None:
            message = self._parse(text)
            if message is None:
                _LOG.warning("%s sent a text that is no message; its connection ends", member.name)
                self.lose(member)
                return
            answer = self._answer(member, message)
            if answer is not None:
                channel.send(answer)
        if channel.is_lost and member in self.members:
            self.lose(member)

    def _answer(self, member: _Member, message: Any) -> Message | None:
        match message:
            case Reported(report=report):
                take_note(member.updates, report)
                self.changed.notify_all()
            case Leave():
                self.lose(member)
            case PeerJoin():
                self.follow(member, message)  # type: ignore[arg-type]  # parsed as a `join`
                self.changed.notify_all()
            case _:
                return self.handle(member, message)
        return None


_SERVERS: weakref.WeakSet[PeerServer[Any, Any]] = weakref.WeakSet()


def _close_in_child() -> None:
    # With a copy of the socket in a child, peers would not notice that this process is gone.
    for server in list(_SERVERS):
        server.close_listener()


os.register_at_fork(after_in_child=_close_in_child)
