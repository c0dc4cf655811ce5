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

from rl_bridge.transports.nixl.agent import AgentError, Host
from rl_bridge.transports.nixl.messages import (
    MAX_REASON,
    PROTOCOL,
    STALL_PART,
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
)
from rl_bridge.transports.nixl.store import VersionStore
from rl_bridge.transports.wire.channel import Channel, Gone, Message, Refused
from rl_bridge.transports.wire.server import Peer, PeerServer
from rl_bridge.transports.wire.tls import TLS

_LOG = logging.getLogger(__name__)

_ROUNDS = 64  # calls into the library between two polls


class _Member(Peer):
    """One reader."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(channel, join)
        self.needs_help = False
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""
        self.asked: list[Join | Lease] = []
        """Messages that are answered once a host serves."""
        self.stall_s = join.timeout_s * STALL_PART


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
        tls: TLS | None,
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
            PROTOCOL,
            token=token,
            identity=endpoint.identity,
            timeout_s=timeout_s,
            max_members=max_members,
            tls=tls,
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
        left = self._host.seconds_left
        if self._host.fileno() in ready or (left is not None and left <= 0):
            self._host.hear()
        self._check_host()

    def _watched(self) -> list[Any]:
        return [self._host]

    def _wait_s(self) -> float | None:
        if self._is_helping and not self._host.serves_itself:
            return 0
        now = time.monotonic()
        left = [until - now for m in self.members for until in m.leases.values()]
        others = self._acceptor.seconds_left, self._host.seconds_left
        return min([*left, *(one for one in others if one is not None)], default=None)

    def _check_host(self) -> None:
        """Hang up on the members that read if their host is gone: they connect again."""
        host = self._host
        if host.is_lost and host.is_hopeless:
            for member in [member for member in self.members if member.asked]:
                self._refuse_asked(member, host.ended)
        epoch = host.epoch + host.is_lost  # one that is lost is as good as replaced
        if epoch == self._epoch:
            return
        busy = [member for member in self.members if member.leases]
        _LOG.warning(
            "%s: %s. %d readers were in the middle, and connect again; another process takes its "
            "place when it is needed.",
            self.name,
            host.ended,
            len(busy),
        )
        for member in busy:
            self.lose(member)
        self._epoch = epoch

    def _answer_asked(self, member: _Member) -> None:
        """Answer what only a host that serves can answer, if one does by now; else start one."""
        if not member.asked:
            return
        try:
            if not self._host.ensure():
                self._host.doubt(member.stall_s)
                return
        except AgentError as error:
            self._refuse_asked(member, str(error))
            return
        self._check_host()
        asked, member.asked = member.asked, []
        for message in () if member.is_gone else asked:
            answer = self._welcome() if isinstance(message, Join) else self._lease(member, message)
            member.channel.send(answer)

    def _refuse_asked(self, member: _Member, reason: str) -> None:
        asked, member.asked = member.asked, []
        for message in asked:
            text = f"it cannot be served now: {reason}"[:MAX_REASON]
            if isinstance(message, Join):
                member.channel.send(Refused(reason=text))
                self.lose(member)
            else:
                gone = Gone(update_id=message.update_id, reason=text, is_stale=False)
                member.channel.send(gone)

    def _welcome(self) -> Welcome:
        metadata, epoch = self._host.metadata(None).hex(), self._host.epoch
        return Welcome(metadata=metadata, epoch=epoch, timeout_s=self._timeout_s)

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
        for member in list(self.members):
            self._answer_asked(member)

    def _unlease(self, member: _Member, update_id: str) -> None:
        if update_id in member.leases:
            self._store.unlease(update_id, member)
            del member.leases[update_id]
            self.changed.notify_all()

    def join(self, channel: Channel, join: Join) -> None:
        """See `PeerServer`."""
        if not self.has_room(channel):
            return
        member = _Member(channel, join)
        self.members.append(member)
        member.take_over(self._gone)
        member.asked.append(join)
        self._answer_asked(member)
        self._serve(member)

    def handle(self, member: _Member, message: FromReader) -> Message | None:
        """See `PeerServer`."""
        match message:
            case Lease():
                member.asked.append(message)
                self._answer_asked(member)
            case Renew(update_id=update_id):
                if update_id not in member.leases:
                    return Lapsed(update_id=update_id)
                member.leases[update_id] = time.monotonic() + self._timeout_s
            case Help(is_needed=is_needed):
                self._help(member, is_needed=is_needed)
            case Unlease(update_id=update_id):
                member.asked = [one for one in member.asked if not _is_lease(one, update_id)]
                self._unlease(member, update_id)
            case AskCatalog():
                return Catalog(entries=self._store.entries())
        return None

    def _help(self, member: _Member, *, is_needed: bool) -> None:
        if is_needed and member.needs_help:  # and still nothing arrives
            self._host.doubt(member.stall_s)
        member.needs_help = is_needed

    def _lease(self, member: _Member, lease: Lease) -> Message:
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

    def let_go(self, member: _Member) -> None:
        """See `PeerServer`."""
        # The library notices only in these calls that its own connection to the reader ended.
        for _ in range(1 if self._host.serves_itself else _ROUNDS):
            self._progress()
        for update_id in list(member.leases):
            self._unlease(member, update_id)


def _is_lease(message: Join | Lease, update_id: str) -> bool:
    return isinstance(message, Lease) and message.update_id == update_id
