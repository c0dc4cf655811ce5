"""The publisher's control server: one thread that answers readers, and makes progress for them.

A reader leases the version that it wants to read, which stays unchanged meanwhile. The lease ends
when the reader says so, with its connection, or when it is not renewed in time. If the network
cannot read memory by itself (TCP), the publisher has to make progress: this thread does, only as
long as a reader asks for that.
"""

import logging
import socket
import time
from typing import Any

from rl_bridge.memory.control import take_note
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
from rl_bridge.transports.wire.channel import Channel, Gone, Leave, Message, Reported
from rl_bridge.transports.wire.server import Peer, PeerServer

_LOG = logging.getLogger(__name__)

_ROUNDS = 64  # calls into the library between two polls
_MAX_REASON = 2048


class _Member(Peer):
    """One reader."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(channel, join, join.reader)
        self.needs_help = False
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""


class ControlServer(PeerServer[_Member, Join]):
    """The server; its lock is the versions', too."""

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
        self._store = store
        self._host = host
        self._epoch = host.epoch
        super().__init__(
            listener,
            endpoint.server_name,
            magic=MAGIC,
            token=token,
            identity=endpoint.identity,
            join=Join,
            parse=from_reader,
            timeout_s=timeout_s,
            max_members=max_members,
            max_message_nbytes=MAX_MESSAGE_NBYTES,
        )

    @property
    def _is_helping(self) -> bool:
        return any(m.needs_help and m.leases for m in self.members)

    def _work(self) -> None:
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
            _LOG.debug("%s: no progress", self.name, exc_info=True)

    def _begin(self, ready: set[int]) -> None:
        fd = self._host.fileno()
        if fd < 0 or fd in ready:  # else it lives
            self._host.notice_end()
        self._check_host()

    def _watched(self) -> list[Any]:
        return [self._host]

    def _wait_s(self) -> float | None:
        if self._is_helping and not self._host.serves_itself:
            return 0
        now = time.monotonic()
        left = [until - now for m in self.members for until in m.leases.values()]
        if self._acceptor.seconds_left is not None:
            left.append(self._acceptor.seconds_left)
        return min(left, default=None)

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
            self.name,
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

    def _end(self) -> None:
        now = time.monotonic()
        for member in self.members:
            for update_id, until in list(member.leases.items()):
                if until <= now:
                    _LOG.warning(
                        "%s: %s did not renew its lease of update %s within %s s; it ends",
                        self.name,
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
        if not self._has_room(channel):
            return
        try:
            self._ensure_host(ping=True)
        except AgentError as error:
            self._refuse(channel, f"it cannot serve now: {error}")
            return
        member = _Member(channel, join)
        self.members.append(member)
        member.take_over(self._gone)
        metadata, epoch = self._host.metadata(None).hex(), self._host.epoch
        channel.send(Welcome(metadata=metadata, epoch=epoch, timeout_s=self._timeout_s))
        self._serve(member)

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

    def _let_go(self, member: _Member) -> None:
        # The library notices only in these calls that its own connection to the reader ended.
        for _ in range(1 if self._host.serves_itself else _ROUNDS):
            self._progress()
        for update_id in list(member.leases):
            self._unlease(member, update_id)
