"""The publisher's side of new connections: a listening socket, and the greeting.

Anybody can open connections and say nothing, or what is no TLS. So the connections that have not
joined yet are bounded in number and in time, and a stranger never pushes out a peer that has proven
itself.
"""

import errno
import logging
import socket
import threading
import time
from typing import Any, Generic, TypeVar

from rl_bridge.errors import TransportUnavailable
from rl_bridge.transports.wire.channel import (
    GREETING_NBYTES,
    Channel,
    Greeting,
    PeerJoin,
    PeerProtocol,
    fresh_nonce,
)
from rl_bridge.transports.wire.tls import TLS, RefusalLog

_LOG = logging.getLogger(__name__)

_Joined = TypeVar("_Joined", bound=PeerJoin)

_BACKLOG = 128
_MIN_PENDING = 64
_PAUSE_S = 0.05


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
