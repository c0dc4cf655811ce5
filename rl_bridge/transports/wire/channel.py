"""The parts that both sides of a socket share: the greeting, framed messages, common kinds.

A connection begins with a greeting of fixed length, and nothing is parsed before its proof: each
side sends random bytes and a keyed digest (HMAC-SHA256) of both sides' random bytes and of the
group's identity. The token itself never travels. Messages follow, each with its length ahead of
it: JSON objects with a ``kind``. Every transport adds kinds of its own, and a text that is no
message ends the connection. Sending never waits: a `Channel` keeps what the peer does not take yet,
up to a bound. With TLS all of it, the greeting too, comes behind its handshake.

The manifest of a version, and a transport's options, say where a publisher listens. Both are
checked before anything is connected to.
"""

import hashlib
import hmac
import ipaddress
import math
import operator
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from rl_bridge.errors import (
    MalformedManifest,
    SegmentError,
    StaleUpdate,
    TransportUnavailable,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.holding import Holding
from rl_bridge.transports.wire.tls import Session

# ---- the greeting -------------------------------------------------------------------------------

_MAGIC_NBYTES = 8
_NONCE_NBYTES = 32
_PROOF_NBYTES = 32
GREETING_NBYTES = {
    "hello": _MAGIC_NBYTES + _NONCE_NBYTES,
    "answer": _NONCE_NBYTES + _PROOF_NBYTES,
    "proof": _PROOF_NBYTES,
}
"""Length of the parts: the publisher's hello, the receiver's answer, the publisher's proof."""


def fresh_nonce() -> bytes:
    """Random bytes for one greeting."""
    return secrets.token_bytes(_NONCE_NBYTES)


class Greeting:
    """Both sides' parts of one greeting."""

    refusal: ClassVar[bytes] = bytes(_PROOF_NBYTES)
    """Sent instead of the publisher's proof if the receiver has another token."""

    def __init__(self, magic: bytes, token: bytes, identity: str, nonce: bytes) -> None:
        """Start with the publisher's nonce.

        Args:
            magic: 8 bytes that name the transport's protocol.
            token: the shared secret.
            identity: names the publisher and its group.
            nonce: the publisher's random bytes.

        """
        self._magic = magic
        self._token = token
        self._identity = identity.encode("utf-8")
        self._nonce = nonce

    @property
    def hello(self) -> bytes:
        """The publisher's first bytes."""
        return self._magic + self._nonce

    @staticmethod
    def nonce_of(magic: bytes, hello: bytes) -> bytes | None:
        """The nonce in a publisher's first bytes; None if they are something else."""
        return hello[len(magic) :] if hello[: len(magic)] == magic else None

    def answer(self, nonce: bytes) -> bytes:
        """The receiver's part: its nonce, and the proof that it knows the token."""
        return nonce + self._digest(b"receiver", nonce)

    def accepts(self, answer: bytes) -> bool:
        """Whether a receiver's part proves that it knows the token."""
        nonce, proof = answer[:_NONCE_NBYTES], answer[_NONCE_NBYTES:]
        return hmac.compare_digest(proof, self._digest(b"receiver", nonce))

    def proof(self, answer: bytes) -> bytes:
        """The publisher's proof, in answer to a receiver's part."""
        return self._digest(b"publisher", answer[:_NONCE_NBYTES])

    def is_proven_by(self, proof: bytes, answer: bytes) -> bool:
        """Whether the publisher's proof shows that the publisher knows the token, too."""
        return hmac.compare_digest(proof, self.proof(answer))

    def _digest(self, role: bytes, nonce: bytes) -> bytes:
        text = b"\0".join((role, self._nonce, nonce, self._identity))
        return hmac.digest(self._token, text, hashlib.sha256)


# ---- framed messages ----------------------------------------------------------------------------

MAX_MESSAGE_NBYTES = 1 << 16
"""The largest message, if a transport asks for no other bound."""

_LENGTH = struct.Struct("!I")
_MAX_PENDING = 1024
_MAX_PENDING_NBYTES = 64 << 20
_CHUNK = 1 << 16
_LONGEST_KEEPIDLE_S = 32767  # Linux takes no more
_TURN_S = 0.1


class Channel:
    """A socket with framed messages; sending works from any thread, and from finalizers.

    Attributes:
        socket: the socket.
        is_lost: whether the connection ended, as far as this side read. With TLS it makes no
            difference whether the other side said so: a message is whole, or it does not count.
        failure: why TLS ended it; None if it did not.

    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
        timeout_s: float | None = None,
        tls: Session | None = None,
    ) -> None:
        """Own a connected socket.

        Args:
            connection: the socket.
            max_message_nbytes: the largest message.
            timeout_s: a peer's machine that vanished is noticed in about three times as long. None
                leaves that to the kernel, which takes hours.
            tls: this connection's, which begins now; what is sent meanwhile waits for it.

        """
        self._max_message_nbytes = max_message_nbytes
        connection.setblocking(False)  # noqa: FBT003 - Python's own signature
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if timeout_s is not None:
                _set_keepalive(connection, timeout_s)
        self.socket = connection
        self.is_lost = False
        self.failure: ssl.SSLError | None = None
        self._tls = tls
        self._incoming = bytearray()
        self._outgoing: deque[bytes] = deque()
        self._rest = b""
        """What the kernel did not take yet of the bytes that were last given to it."""
        # Not reentrant: a finalizer may run inside of `flush`, in the same thread, and must not
        # send into the middle of a message. The `flush` that it interrupted sends its message.
        # With TLS, reading has its turn by the same lock: both change one session.
        self._turn = threading.Lock()
        close_in_children(connection)
        self.flush()

    @property
    def is_secured(self) -> bool:
        """Whether it has TLS, and both sides accepted the other's certificate."""
        return self._tls is not None and self._tls.is_established

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits until the peer reads."""
        if self._tls is None:
            return bool(self._rest or self._outgoing)
        is_ready = self._tls.has_leaving or (self._tls.is_established and bool(self._outgoing))
        return bool(self._rest) or is_ready

    def send(self, message: BaseModel) -> None:
        """Send a message, or keep it until `flush`; does nothing on a lost connection."""
        self.send_bytes(message.model_dump_json().encode("utf-8", "replace"))

    def send_bytes(self, *texts: bytes) -> None:
        """Send messages' texts in one go."""
        longest = max(map(len, texts))
        if longest > self._max_message_nbytes:
            raise MalformedManifest(
                f"a message of {longest} bytes, at most {self._max_message_nbytes}. Send less."
            )
        self.send_raw(b"".join(_LENGTH.pack(len(text)) + text for text in texts))

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        if self.is_lost:
            return
        self._outgoing.append(data)
        self.flush()
        if len(self._outgoing) > 1:  # a peer that does not read must not use up memory
            nbytes = sum(map(len, list(self._outgoing)))
            self.is_lost |= len(self._outgoing) > _MAX_PENDING or nbytes > _MAX_PENDING_NBYTES

    def flush(self) -> None:
        """Hand to the kernel as much as it takes. Never waits."""
        while self.has_outgoing and not self.is_lost and self._turn.acquire(blocking=False):
            try:
                while data := self._next():
                    num = self.socket.send(data, socket.MSG_NOSIGNAL)
                    self._rest = data[num:]
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
            finally:
                self._turn.release()

    def _next(self) -> bytes:
        """The next bytes for the kernel, kept in `_rest`; empty if there are none."""
        if not self._rest and self._tls is None:
            self._rest = self._outgoing.popleft() if self._outgoing else b""
        elif not self._rest and self._tls is not None:
            if self._outgoing and self._tls.is_established and not self._tls.has_leaving:
                self._tls.seal(self._outgoing.popleft())
            self._rest = self._tls.take()
        return self._rest

    def _end(self, error: OSError) -> None:
        if isinstance(error, ssl.SSLError):
            self.failure = error
            if self._tls is not None:
                with suppress(OSError):  # the peer learns why, if it takes these few bytes at once
                    self.socket.send(self._rest + self._tls.take(), socket.MSG_NOSIGNAL)
        self.is_lost = True

    def fill(self, *, is_polled: bool = False) -> None:
        """Read what is there, without waiting; sets `is_lost` at the end of the stream.

        If the caller polls the socket again soon (`is_polled`), the end of the stream is noticed
        then, and not looked for after the last bytes. With TLS, another thread that is just sending
        may keep this one from reading: then it is as if nothing had come, until the next call.
        """
        if self._tls is None:
            self._fill(is_polled=is_polled)
            return
        # Bounded, since a finalizer may read in the middle of `flush`, in the same thread.
        if self._turn.acquire(timeout=_TURN_S):
            try:
                self._fill(is_polled=is_polled)
            finally:
                self._turn.release()
            self.flush()  # answers of the handshake, and what waited for its end

    def _fill(self, *, is_polled: bool) -> None:
        try:
            while True:
                data = self.socket.recv(_CHUNK)
                if data and self._tls is not None:
                    self._tls.feed(data, self._incoming)
                else:
                    self._incoming += data
                if not data or (self._tls is not None and self._tls.is_ended):
                    self.is_lost = True
                    return
                if is_polled and len(data) < _CHUNK:
                    return
                if len(self._incoming) > 2 * (self._max_message_nbytes + _CHUNK):
                    return  # complete messages are taken out first
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)

    def take_raw(self, nbytes: int) -> bytes | None:
        """Take a number of the bytes that were read; None if there are fewer."""
        if len(self._incoming) < nbytes:
            return None
        data = bytes(self._incoming[:nbytes])
        del self._incoming[:nbytes]
        return data

    def take(self) -> bytes | None:
        """Take the next message's text out of the bytes that were read; None if incomplete."""
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        if length > self._max_message_nbytes:
            self.is_lost = True  # no peer that knows the protocol sends so much
            return None
        if len(self._incoming) < _LENGTH.size + length:
            return None
        data = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
        del self._incoming[: _LENGTH.size + length]
        return data

    def receive(self, *, until: float) -> bytes | None:
        """Wait for a message's text; None if it does not come in time, or the stream ends."""
        return self._wait(self.take, until)

    def receive_raw(self, nbytes: int, *, until: float) -> bytes | None:
        """Wait for a number of bytes; None if they do not come in time, or the stream ends."""
        return self._wait(partial(self.take_raw, nbytes), until)

    def _wait(self, take: Callable[[], bytes | None], until: float) -> bytes | None:
        while (data := take()) is None:
            left = until - time.monotonic()
            if self.is_lost or left <= 0:
                return None
            poll = select.poll()
            # What the peer is to answer may not have left as a whole yet.
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.has_outgoing else 0))
            poll.poll(left * 1e3)
            self.flush()
            self.fill(is_polled=True)
        return data

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.is_lost = True
        self.socket.close()


def _set_keepalive(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel ask from time to time whether the peer's machine is there.

    The peer's kernel answers, so a process that is slow or stopped does not count as lost. (With
    TCP_USER_TIMEOUT, a process that does not read for long would.)
    """
    idle_s = min(max(1, math.ceil(timeout_s)), _LONGEST_KEEPIDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(one: socket.socket) -> None:
    """Have a socket closed in forked children: with a copy there, a peer would not see its end."""
    _SOCKETS.add(one)


def _close_in_child() -> None:
    for one in list(_SOCKETS):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Wake:
    """Ends the `poll` of another thread on `fd`. From any thread, and from finalizers.

    The number of a closed descriptor soon belongs to another file, which `poke` must not write to:
    hence the lock. Closed in forked children.
    """

    def __init__(self) -> None:
        """Open an eventfd."""
        self._held = Holding(self)
        self._held.open(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = self._held.pid
        # Reentrant: a finalizer may run in the middle of any of these methods, in the same thread.
        self._lock = threading.RLock()

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it is closed."""
        return self._held.fd

    def poke(self) -> None:
        """Wake; does nothing once it is closed, and in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self.fd >= 0:
                with suppress(BlockingIOError):  # it is awake already
                    os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget all pokes so far."""
        with self._lock:
            if self.fd >= 0:
                with suppress(BlockingIOError):
                    os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._held.dispose()


# ---- the kinds of messages that every transport has ---------------------------------------------

Count = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Text = Annotated[StrictStr, Field(max_length=2048)]
UpdateId = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


class Message(BaseModel):
    """The base of all kinds."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def keep_newest(kept: dict[Any, Any], count: int) -> None:
    """Forget all but the newest entries; a finalizer may do the same meanwhile."""
    for oldest in list(kept)[:-count]:
        kept.pop(oldest, None)


def parser(kinds: Any) -> Callable[[bytes], Any]:
    """Make a function that parses messages of these kinds, and returns None for another text."""
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[kinds, Field(discriminator="kind")])

    def parse(text: bytes) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError:
            return None

    return parse


class Reported(Message):
    """From a receiver: the state that an update is in there."""

    kind: Literal["report"] = "report"
    report: UpdateReport


class Leave(Message):
    """From a receiver: its last message."""

    kind: Literal["leave"] = "leave"


class Refused(Message):
    """From the publisher: the receiver is not a member, or no longer."""

    kind: Literal["refused"] = "refused"
    reason: Text


class Gone(Message):
    """From the publisher: the update that was asked for cannot be had."""

    kind: Literal["gone"] = "gone"
    update_id: UpdateId
    reason: Text
    is_stale: StrictBool
    """Whether it was released; otherwise another version was asked for, or `is_short`."""
    is_short: StrictBool = False
    """Whether the publisher's machine lacks something for now: it may be asked for again."""


class PeerJoin(Message):
    """From a receiver: its first message, which names it.

    An observer leaves no record. `reader` names the receiver over all its connections: the
    publisher keeps the newest one, with what was reported over the others. It may be empty.
    """

    worker: Annotated[StrictStr, Field(max_length=512)]
    rank: Count
    pid: Count
    is_observer: StrictBool = False
    reader: Annotated[StrictStr, Field(pattern=r"^([0-9a-f]{32})?$")] = ""


_Joined = TypeVar("_Joined", bound=PeerJoin)
_Welcomed = TypeVar("_Welcomed", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProtocol(Generic[_Joined, _Welcomed]):
    """What both sides of one kind of connection have to agree on.

    Attributes:
        magic: names it in greetings; 8 bytes.
        join: the kind of a receiver's first message.
        welcome: the kind of the publisher's answer to it, if it is not `Refused`.
        from_receiver: other kinds of messages that a receiver sends. `Reported` and `Leave` are
            understood anyhow.
        from_publisher: other kinds of messages that the publisher sends. `Refused` is understood
            anyhow.
        max_message_nbytes: size of the largest message's text.
        parse_receiver: reads any message of a receiver; None for a text that is none.
        parse_publisher: reads any message of the publisher; None for a text that is none.

    Raises:
        ValueError: `magic` has another length.

    """

    magic: bytes
    join: type[_Joined]
    welcome: type[_Welcomed]
    from_receiver: tuple[type[Message], ...] = ()
    from_publisher: tuple[type[Message], ...] = ()
    max_message_nbytes: int = MAX_MESSAGE_NBYTES
    parse_receiver: Callable[[bytes], Any] = field(init=False)
    parse_publisher: Callable[[bytes], Any] = field(init=False)

    def __post_init__(self) -> None:
        """Make the parsers."""
        if len(self.magic) != _MAGIC_NBYTES:
            raise ValueError(f"magic={self.magic!r}: expected {_MAGIC_NBYTES} bytes.")
        receivers = parser(Union[(self.join, Reported, Leave, *self.from_receiver)])
        publishers = parser(Union[(self.welcome, Refused, *self.from_publisher)])
        object.__setattr__(self, "parse_receiver", receivers)
        object.__setattr__(self, "parse_publisher", publishers)


def error_of(gone: Gone) -> WeightBridgeError:
    """Make the error that an import raises after this answer."""
    if gone.is_stale:
        return StaleUpdate(
            f"update {gone.update_id} is gone: {gone.reason}. Import the publisher's latest "
            "manifest."
        )
    if gone.is_short:
        return WeightBridgeUnavailableError(
            f"update {gone.update_id} cannot be read now: {gone.reason}. Free memory at its "
            "publisher, or raise that process's limits (ulimit -l, ulimit -v), and import it again."
        )
    return SegmentError(
        f"update {gone.update_id} is not what was published: {gone.reason}. Use the manifest "
        "as it was published."
    )


# ---- where a publisher listens: options and handles ---------------------------------------------


def checked_address(address: str) -> str:
    """Check that an address is a literal that a peer can connect to.

    A name would be looked up by each peer, and could mean another machine there.

    Raises:
        ValueError: it is none.

    """
    try:
        parsed = _parsed(address)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{address!r} is no IP address. Write it in numbers.") from error
    if parsed.is_unspecified or parsed.is_multicast:
        raise ValueError(f"{address!r} is no machine's address. Name the interface's own.")
    return address


def checked_port(port: object) -> int:
    """Check a port; 0 stands for a free one.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.

    """
    try:
        number = -1 if isinstance(port, bool) else operator.index(port)  # type: ignore[arg-type]  # that is what is tried
    except TypeError as error:
        raise TypeError(f"port={port!r}: expected an int from 0 to 65535.") from error
    if not 0 <= number < 2**16:
        raise ValueError(f"port={port!r}: expected an int from 0 to 65535.")
    return number


@lru_cache(maxsize=1024)  # the same few addresses come in every manifest
def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address)


class Endpoint(BaseModel):
    """Where a publisher listens, and how it is recognised; a transport adds what it needs besides.

    Attributes:
        address: of the publisher, in numbers.
        port: where it listens.
        publisher_id: the publisher of the versions.
        backend: what carries the bytes.
        has_tls: whether its control connections have TLS.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[StrictStr, AfterValidator(checked_address)]
    port: Annotated[StrictInt, Field(ge=1, lt=2**16)]
    publisher_id: UpdateId
    backend: StrictStr
    has_tls: StrictBool = False

    def require_backend(self, transport: str, backend: str) -> None:
        """Check that both sides use the same backend.

        Raises:
            TransportUnavailable: they do not.

        """
        if self.backend != backend:
            raise TransportUnavailable(
                transport,
                f"the publisher sends over {self.backend} and this side was made for {backend}",
                "Give both sides the same backend=.",
            )


class Handle(BaseModel):
    """The part of a manifest that leads to the bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def publisher_id(self) -> str:
        """The publisher that it leads to."""
        raise NotImplementedError


_Handle = TypeVar("_Handle", bound=Handle)


def read_handle(kind: type[_Handle], manifest: WeightUpdateManifest) -> _Handle:
    """Read the manifest's handle, which must lead to the manifest's own publisher.

    Raises:
        MalformedManifest: it is of another kind, or leads to another publisher.

    """
    handle = manifest.parse_handle(kind)
    if handle.publisher_id != manifest.publisher_id:
        raise MalformedManifest(
            f"update {manifest.update_id}: its handle names publisher {handle.publisher_id}, but "
            f"the manifest names {manifest.publisher_id}. Send the manifest as it was published."
        )
    return handle
