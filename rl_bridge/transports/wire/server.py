"""A publisher's control server: one thread that accepts connections, reads, and never waits.

Anybody can open connections and say nothing, or what is no TLS. So the connections that have not
joined yet are bounded in number and in time, and a stranger never pushes out a peer that has proven
itself. A text that is no message ends the connection that it came on, and no other.
"""

import errno
import logging
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, Generic, Self, TypeVar

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.control import Record, UpdateReport, legible, take_note
from rl_bridge.transports.wire.channel import (
    GREETING_NBYTES,
    Channel,
    Greeting,
    Leave,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Reported,
    Wake,
    close_in_children,
    fresh_nonce,
)
from rl_bridge.transports.wire.tls import TLS, RefusalLog

_LOG = logging.getLogger(__name__)

_Joined = TypeVar("_Joined", bound=PeerJoin)

_BACKLOG = 128
_MIN_PENDING = 64
_PAUSE_S = 0.05
_MAX_GONE = 64
_MAX_REASON = 2000
_MAX_CATCH_UP_ROUNDS = 64
_CATCH_UP_S = 0.25


def listen(name: str, address: str, port: int) -> socket.socket:
    """Listen at an address.

    Raises:
        TransportUnavailable: the port is taken, or the address is not this machine's.

    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TransportUnavailable(
            name,
            f"nothing can listen at {address} port {port}: {error}",
            "Choose an address of this machine, and a free port or port=0.",
        ) from error
    return listener


class _Pending:
    """A connection that has not joined yet."""

    def __init__(self, channel: Channel, peer: str, greeting: Greeting, until: float) -> None:
        self.channel = channel
        self.peer = peer
        self.greeting = greeting
        self.until = until
        self.is_proven = False

    @property
    def trust(self) -> tuple[bool, bool]:
        """Orders strangers before peers whose certificate was accepted, and all before proven."""
        return self.is_proven, self.channel.is_secured


class Acceptor(Generic[_Joined]):
    """A listening socket, and the connections that have not joined yet.

    Called under its owner's lock.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: PeerProtocol[_Joined, Any],
        *,
        token: bytes,
        identity: str,
        timeout_s: float,
        max_members: int,
        tls: TLS | None = None,
    ) -> None:
        """Own a listening socket; for `token` and `identity` see `Greeting`.

        A new connection may take `timeout_s` to join; one whose first message after the greeting is
        not of the kind `protocol.join` is turned away. All of `max_members` peers may come at once,
        and each takes some round trips: twice as many connections may wait to join, and 64 in any
        case. Beyond that the oldest is turned away, strangers before peers that proved themselves.
        With `tls`, its handshake counts as part of the greeting.
        """
        self.listener = listener
        self._protocol = protocol
        self._token = token
        self._identity = identity
        self._timeout_s = timeout_s
        self._max_pending = max(_MIN_PENDING, 2 * max_members)
        self._pending: dict[int, _Pending] = {}
        self._tls = tls
        self._refusals = RefusalLog()

    @property
    def channels(self) -> list[Channel]:
        """The connections."""
        return [pending.channel for pending in self._pending.values()]

    @property
    def seconds_left(self) -> float | None:
        """How long until the next silent connection is turned away; None if there is none."""
        left = [pending.until - time.monotonic() for pending in self._pending.values()]
        return max(0.0, min(left)) if left else None

    def serve(self, ready: set[int], pause: threading.Condition) -> list[tuple[Channel, _Joined]]:
        """Continue the greetings of connections in `ready`; returns those that joined.

        If no descriptor is left to accept with, it releases the owner's lock (`pause`) briefly.
        """
        joined = []
        now = time.monotonic()
        for fd, pending in list(self._pending.items()):
            if pending.channel.is_lost:
                self._turn_away(fd)
            elif fd in ready:
                join = self._greet(fd, pending)
                if join is not None:
                    joined.append((pending.channel, join))
            elif pending.until <= now:
                self._turn_away(fd)
        if self.listener.fileno() in ready:
            self._accept(pause)
        return joined

    def _accept(self, pause: threading.Condition) -> None:
        try:
            connection, peer = self.listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                pause.wait(_PAUSE_S)  # the listener stays ready: do not poll it in a busy loop
            return
        channel = Channel(
            connection,
            max_message_nbytes=self._protocol.max_message_nbytes,
            timeout_s=self._timeout_s,
            tls=None if self._tls is None else self._tls.accept(),
        )
        greeting = Greeting(self._protocol.magic, self._token, self._identity, fresh_nonce())
        until = time.monotonic() + self._timeout_s
        self._pending[connection.fileno()] = _Pending(channel, str(peer[0]), greeting, until)
        channel.send_raw(greeting.hello)
        strangers_first = sorted(self._pending, key=lambda fd: self._pending[fd].trust)
        for oldest in strangers_first[: -self._max_pending]:
            self._turn_away(oldest)

    def _greet(self, fd: int, pending: _Pending) -> _Joined | None:
        channel = pending.channel
        channel.fill()
        if channel.failure is not None:
            self._refusals.say(pending.peer, channel.failure)
        if not pending.is_proven:
            answer = channel.take_raw(GREETING_NBYTES["answer"])
            if answer is not None:
                if not pending.greeting.accepts(answer):
                    self._refusals.say(pending.peer, "it does not know the token")
                    channel.send_raw(Greeting.refusal)
                    self._turn_away(fd)
                    return None
                pending.is_proven = True
                channel.send_raw(pending.greeting.proof(answer))
        text = channel.take() if pending.is_proven else None
        if text is None:
            if channel.is_lost:
                self._turn_away(fd)
            return None
        join = self._protocol.parse_receiver(text)
        if not isinstance(join, self._protocol.join):
            self._turn_away(fd)
            return None
        del self._pending[fd]
        return join

    def _turn_away(self, fd: int) -> None:
        pending = self._pending.pop(fd, None)
        if pending is not None:
            pending.channel.close()

    def close(self) -> None:
        """Stop listening, and hang up on connections that have not joined."""
        self.listener.close()
        for fd in list(self._pending):
            self._turn_away(fd)


# ---- peers that joined --------------------------------------------------------------------------


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
        # With a copy of it in a child, peers would not notice that this process is gone.
        close_in_children(listener)
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

    def admit(self, member: _Member, welcome: Message | None) -> None:
        """Make a peer a member, which takes over the reports of its earlier connections.

        Without `welcome`, it gets that message later.
        """
        self.members.append(member)
        member.take_over(self._gone)
        if welcome is not None:
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
