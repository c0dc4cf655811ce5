"""The publisher's control server: one thread that answers readers, and makes progress for them.

A reader leases the version that it wants to read, which stays unchanged meanwhile. The lease ends
when the reader says so, with its connection, or when it is not renewed in time. If the network
cannot read memory by itself (TCP), the publisher has to make progress: this thread does, only as
long as a reader asks for that.
"""

import logging
import os
import select
import socket
import threading
import time
import weakref

from rl_bridge.memory.control import Record, take_note
from rl_bridge.transports.nixl.agent import AgentError, Host
from rl_bridge.transports.nixl.messages import (
    MAGIC,
    MAX_MESSAGE_NBYTES,
    AskCatalog,
    Catalog,
    FromReader,
    Help,
    Join,
    Lapsed,
    Lease,
    NIXLEndpoint,
    Renew,
    Unlease,
    Welcome,
    from_reader,
)
from rl_bridge.transports.nixl.store import VersionStore
from rl_bridge.transports.wire.acceptor import Acceptor, Peer
from rl_bridge.transports.wire.channel import Channel, Gone, Leave, Message, Refused, Reported, Wake

_LOG = logging.getLogger(__name__)

_MAX_GONE = 64
_ROUNDS = 64  # calls into the library between two polls
_MAX_REASON = 2048
_CATCH_UP_S = 0.25


class _Member(Peer):
    """One reader, as the publisher knows it. Changed only under the server's lock."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(
            channel,
            worker=join.worker,
            rank=join.rank,
            pid=join.pid,
            is_observer=join.is_observer,
            reader=join.reader,
        )
        self.needs_help = False
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""


def _parse_join(text: bytes) -> Join | None:
    """Read a reader's first message; None if it is another one."""
    message = from_reader(text)
    return message if isinstance(message, Join) else None


class ControlServer:
    """All connections of one publisher, and the thread that serves them."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: NIXLEndpoint,
        store: VersionStore,
        host: Host,
        *,
        token: bytes,
        max_members: int,
        timeout_s: float,
    ) -> None:
        """Serve at `listener`, and close it at the end.

        A connection has to join within `timeout_s`, and a lease to be renewed.
        """
        self.endpoint = endpoint
        self.changed = threading.Condition(threading.RLock())
        """The lock of everything here, the versions too; notified when a lease ends."""
        self._store = store
        self._host = host
        self._epoch = host.epoch
        self.members: list[_Member] = []
        self._gone: list[_Member] = []
        self._acceptor: Acceptor[Join] = Acceptor(
            listener,
            magic=MAGIC,
            token=token,
            identity=endpoint.identity,
            parse=_parse_join,
            timeout_s=timeout_s,
            max_message_nbytes=MAX_MESSAGE_NBYTES,
            max_members=max_members,
        )
        self._max_members = max_members
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._is_stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="rlb-nixl-server", daemon=True)
        _SERVERS.add(self)
        self._thread.start()

    # ---- calls from the publisher's end ---------------------------------------------------------

    def records(self) -> list[Record]:
        """Everything that readers reported, up to what has arrived at this machine by now."""
        self.catch_up()
        with self.changed:
            return [m.record() for m in (*self._gone, *self.members) if not m.is_observer]

    def catch_up(self) -> None:
        """Read what has arrived: leases that ended, readers that are gone.

        Strangers may connect without end, so it stops after a bounded time.
        """
        until = time.monotonic() + _CATCH_UP_S
        try:
            while not self._is_stopping and self._step(0) and time.monotonic() < until:
                pass
        finally:
            self._wake.poke()  # the thread must poll again: there may be something to send

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
                self._help()
            except Exception:  # noqa: BLE001 - one connection's failure must not end the others
                if not self._is_stopping:
                    _LOG.warning("a connection of %s failed", self._name, exc_info=True)

    @property
    def _name(self) -> str:
        return self.endpoint.server_name

    @property
    def _is_helping(self) -> bool:
        return any(m.needs_help and m.leases for m in self.members)

    def _help(self) -> None:
        with self.changed:
            is_helping = self._is_helping and not self._is_stopping
            self._host.help(is_needed=is_helping)
            if not is_helping or self._host.serves_itself:
                return
        # Not under the lock: the trainer may publish meanwhile.
        for _ in range(_ROUNDS):
            self._progress()
        time.sleep(0)  # lets other threads of this process run

    def _progress(self) -> None:
        try:
            self._host.progress()
        except AgentError:
            # A reader may have died in the middle of a read: its own connection shows that.
            _LOG.debug("%s: no progress", self._name, exc_info=True)

    def _step(self, timeout_ms: float | None) -> bool:
        """Serve what is ready; returns whether anything was."""
        poll, timeout_ms = self._make_poll(timeout_ms)
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        wake = self._wake.fd
        if wake in ready:
            self._wake.clear()
        with self.changed:
            if not self._is_stopping:
                fd = self._host.fileno()
                if fd < 0 or fd in ready:  # else it lives
                    self._host.notice_end()
                self._check_host()
                for member in list(self.members):
                    if member.channel.socket.fileno() in ready or member.channel.is_lost:
                        self._serve(member)
                for channel, join in self._acceptor.serve(ready, self.changed):
                    self._join(channel, join)
                self._expire()
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
            for one in (self._acceptor.listener, self._host):
                if one.fileno() >= 0:
                    poll.register(one, select.POLLIN)
            if timeout_ms is None:
                poll.register(self._wake.fd, select.POLLIN)
                timeout_ms = self._wait_ms()
        return poll, timeout_ms

    def _wait_ms(self) -> float | None:
        if self._is_helping and not self._host.serves_itself:
            return 0
        now = time.monotonic()
        left = [until - now for m in self.members for until in m.leases.values()]
        if self._acceptor.seconds_left is not None:
            left.append(self._acceptor.seconds_left)
        return max(0.0, min(left)) * 1e3 + 1 if left else None

    def _check_host(self) -> None:
        """Hang up on the members that read if their host is gone: they connect again."""
        if not self._host.is_lost and self._host.epoch == self._epoch:
            return
        busy = [member for member in self.members if member.leases]
        if self._epoch == self._host.epoch and not busy:
            return  # nobody was reading
        _LOG.warning(
            "%s: the process that serves reads ended. %d readers were in the middle, and connect "
            "again; another process takes its place.",
            self._name,
            len(busy),
        )
        for member in busy:
            self._lose(member)
        self._epoch = self._host.epoch

    def _ensure_host(self, *, ping: bool) -> None:
        """Make sure that there is a host for a reader that comes now.

        Raises:
            AgentError: there is none.

        """
        self._store.ensure_host(ping=ping)
        self._check_host()

    def _expire(self) -> None:
        now = time.monotonic()
        for member in self.members:
            for update_id, until in list(member.leases.items()):
                if until <= now:
                    _LOG.warning(
                        "%s: %s did not renew its lease of update %s within %s s; it ends",
                        self._name,
                        member.name,
                        update_id,
                        self._timeout_s,
                    )
                    self._unlease(member, update_id)

    def _unlease(self, member: _Member, update_id: str) -> None:
        if update_id in member.leases:
            self._store.unlease(update_id, member)
            del member.leases[update_id]
            self.changed.notify_all()

    def _join(self, channel: Channel, join: Join) -> None:
        for before in [m for m in self.members if m.is_from(join.reader, join.pid)]:
            self._lose(before)  # its socket may never show its end, and it takes a place
        if len(self.members) >= self._max_members:
            reason = (
                f"the publisher has room for {self._max_members} consumers and all are taken. "
                "Close bridges that are not used, or raise max_consumers on the publisher."
            )
            channel.send(Refused(reason=reason))
            channel.close()
            return
        try:
            self._ensure_host(ping=True)
        except AgentError as error:
            channel.send(Refused(reason=f"it cannot serve now: {error}"[:_MAX_REASON]))
            channel.close()
            return
        member = _Member(channel, join)
        self.members.append(member)
        member.take_over(self._gone)
        metadata, epoch = self._host.metadata(None).hex(), self._host.epoch
        channel.send(Welcome(metadata=metadata, epoch=epoch, timeout_s=self._timeout_s))
        self._serve(member)

    def _serve(self, member: _Member) -> None:
        try:
            self._read(member)
        except BaseException:
            member.channel.is_lost = True  # handled in part: the reader connects and asks again
            raise

    def _read(self, member: _Member) -> None:
        channel = member.channel
        channel.flush()
        channel.fill(is_polled=True)
        while not member.is_gone and (text := channel.take()) is not None:
            message = from_reader(text)
            if message is None:
                _LOG.warning("%s sent a text that is no message; its connection ends", member.name)
                self._lose(member)
                return
            answer = self._handle(member, message)
            if answer is not None:
                channel.send(answer)
        if channel.is_lost and member in self.members:
            self._lose(member)

    def _handle(self, member: _Member, message: FromReader) -> Message | None:
        match message:
            case Lease():
                return self._lease(member, message)
            case Renew(update_id=update_id):
                if update_id not in member.leases:
                    return Lapsed(update_id=update_id)
                member.leases[update_id] = time.monotonic() + self._timeout_s
            case Help(is_needed=is_needed):
                member.needs_help = is_needed
            case Unlease(update_id=update_id):
                self._unlease(member, update_id)
            case Reported(report=report):
                take_note(member.updates, report)
            case AskCatalog():
                return Catalog(entries=self._store.entries())
            case Leave():
                self._lose(member)
            case Join(is_observer=is_observer):
                member.is_observer = is_observer
                member.take_over(self._gone)
        return None

    def _lease(self, member: _Member, lease: Lease) -> Message | None:
        try:
            self._ensure_host(ping=False)
        except AgentError as error:
            reason = f"it cannot be served now: {error}"[:_MAX_REASON]
            return Gone(update_id=lease.update_id, reason=reason, is_stale=False)
        if member.is_gone:
            return None
        is_moved = lease.epoch != self._host.epoch
        # To make a new connection, the reader always needs progress here.
        member.needs_help = lease.needs_help or is_moved
        is_new = lease.update_id not in member.leases
        # Before the lease: it ends with its time or with the connection, whatever happens here.
        member.leases[lease.update_id] = time.monotonic() + self._timeout_s
        answer = self._store.lease(lease, member, member.name)
        if is_new and isinstance(answer, Gone):
            del member.leases[lease.update_id]
        return answer

    def _lose(self, member: _Member) -> None:
        member.is_gone = True
        # The library notices only in these calls that its own connection to the reader ended.
        for _ in range(1 if self._host.serves_itself else _ROUNDS):
            self._progress()
        member.channel.close()
        for update_id in list(member.leases):
            self._unlease(member, update_id)
        if member.updates and not member.is_observer and member not in self._gone:
            self._gone.append(member)
            del self._gone[:-_MAX_GONE]
        if member in self.members:
            self.members.remove(member)
        self.changed.notify_all()


_SERVERS: weakref.WeakSet[ControlServer] = weakref.WeakSet()


def _close_in_child() -> None:
    # With a copy of the socket in a child, readers would not notice that this process is gone.
    for server in list(_SERVERS):
        server.close_listener()


os.register_at_fork(after_in_child=_close_in_child)
