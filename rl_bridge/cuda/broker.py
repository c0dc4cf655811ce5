"""Descriptors handed from a publisher to its consumers, one at a time, over a private socket.

The publisher's `Broker` listens on a unix socket in a directory that only its user may enter, under
a name that nobody can guess. A request is one message: a token that travels with the manifest, and
the number of a descriptor. The answer is one message with the descriptor attached. Each side asks
the kernel for the other's process (``SO_PEERCRED``), and checks every byte that arrives.
(unix(7), ``SCM_RIGHTS`` and ``SO_PEERCRED``.)

One thread polls all connections and never waits for one: a client that is silent or slow costs a
place in a bounded list, until its time is over or the place is needed. Nothing that a client sends
makes the thread allocate, block or end.
"""

import array
import errno
import fcntl
import hmac
import logging
import os
import re
import secrets
import select
import socket
import struct
import tempfile
import threading
import time
import weakref
from contextlib import closing, suppress
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.cuda.owners import Descriptor
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    SegmentError,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.segment import process_start_time, require_resources
from rl_bridge.processes import (
    close_fd,
    forget_fd_in_children,
    in_forked_children,
    no_fork,
)

# ---- the server's thread, its private directory, and the answers ---------------------------------

_LOG = logging.getLogger(__name__)

MAGIC = b"rlb1"
REQUEST = struct.Struct("!4s16sQ")
"""Magic, token, key."""
ANSWER = struct.Struct("!4sB3xQ")
"""Magic, status, size of the memory in bytes."""
SOCKET_PATH_NBYTES = 107  # sockaddr_un has 108, one of them for the end

_TRANSPORT = "cuda-vmm"
_SOCKET = "s"
_NAME = re.compile(r"rlb-broker-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}")
_CREDENTIALS = struct.Struct("=iII")
_PAUSE_MS = 50
_BACKLOG = 128


class Status(IntEnum):
    """The outcome that an answer carries."""

    SERVED = 0
    MALFORMED = 1
    WRONG_TOKEN = 2
    UNKNOWN_KEY = 3
    FOREIGN = 4


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Ask the kernel for pid and uid of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def may_talk(uid: int) -> bool:
    """Whether a process of that user is one of ours: the same user, or root."""
    return uid in {os.geteuid(), 0}


def _default_root() -> Path:
    # Where login sessions keep sockets. By its usual path: no environment is read down here.
    root = Path(f"/run/user/{os.geteuid()}")
    is_ours = root.is_dir() and os.access(root, os.W_OK | os.X_OK)
    return root if is_ours else Path(tempfile.gettempdir())


def sweep_brokers(root: Path) -> list[str]:
    """Remove the directories of this user's brokers whose process is dead; returns their names."""
    swept = []
    for path in sorted(root.glob("rlb-broker-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or process_start_time(int(match[1])) == int(match[2]):
            continue
        try:
            fd = _open_directory(path)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            # A broker in another process namespace looks dead by its number, and holds the lock.
            if os.fstat(fd).st_uid == os.geteuid() and _try_lock(fd):
                swept.append(path.name)
                _remove(path, fd)
        finally:
            close_fd(fd)
    return swept


def _open_directory(path: Path) -> int:
    # Each of these is for a lock, which a child's copy would hold on to.
    with no_fork():
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return forget_fd_in_children(os.open(path, flags))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, fd: int) -> None:
    """Remove a broker's directory, open as `fd`, if it is the one that lies at `path`."""
    with suppress(OSError):
        os.unlink(_SOCKET, dir_fd=fd)
    with suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.rmdir()


class Server:
    """A listening socket in a private directory, and the thread that answers there."""

    def __init__(
        self,
        token: bytes,
        *,
        root: Path | None,
        max_clients: int,
        client_timeout_s: float,
    ) -> None:
        """Listen and start to serve; see `rl_bridge.cuda.broker.Broker`.

        Raises:
            TransportUnavailable: no socket can be had there.

        """
        self.offers: dict[int, tuple[Descriptor, int]] = {}
        self._token = token
        self._max_clients = max_clients
        self._client_timeout_s = client_timeout_s
        self._pid = os.getpid()
        self._clients: dict[socket.socket, float] = {}  # in order of arrival: until when
        self._is_stopping = False
        self._closing = threading.Lock()
        root = (root or _default_root()).absolute()
        start = process_start_time(self._pid) or 0
        name = f"rlb-broker-{self._pid}-{start}-{secrets.token_hex(8)}"
        self.path = root / name / _SOCKET
        if len(os.fsencode(self.path)) > SOCKET_PATH_NBYTES:
            raise TransportUnavailable(
                _TRANSPORT,
                f"the path of its socket, {str(self.path)!r}, has more than {SOCKET_PATH_NBYTES} "
                "bytes",
                "Use a directory for temporary files (TMPDIR) with a shorter path.",
            )
        sweep_brokers(root)
        self._directory_fd = self._wake = -1
        self._listener = None
        try:
            self.path.parent.mkdir(mode=0o700)
            self._directory_fd = _open_directory(self.path.parent)
            fcntl.flock(self._directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _SERVERS.add(self)
            with no_fork():
                self._listener = socket.socket(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
                )
            self._listener.bind(str(self.path))
            self._listener.listen(_BACKLOG)
            with no_fork():
                flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
                self._wake = forget_fd_in_children(os.eventfd(0, flags))
            self._thread = threading.Thread(target=self._run, name="rlb-broker", daemon=True)
            self._thread.start()
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError | RuntimeError):  # the latter: no thread can be started
                raise TransportUnavailable(
                    _TRANSPORT,
                    f"no socket can be served in {str(root)!r}: {error}",
                    "Use a directory for temporary files (TMPDIR) that this user may write to.",
                ) from error
            raise

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return not self._is_stopping and os.getpid() == self._pid and self._thread.is_alive()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop, and remove the directory; see `rl_bridge.cuda.broker.Broker.close`."""
        if os.getpid() != self._pid:
            return
        if not self._closing.acquire(blocking=False):
            return  # another thread is at it, or this one: a finalizer may run in here
        try:
            # A close that was cut off half-way is finished by the next call.
            self._is_stopping = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
            self._clean_up()
        finally:
            self._closing.release()

    def _clean_up(self) -> None:
        self.offers.clear()
        if self._directory_fd >= 0:
            _remove(self.path.parent, self._directory_fd)
        self.forget()
        # Noted first: if they were closed twice, the numbers could be another file's by then.
        fds, self._directory_fd, self._wake = (self._directory_fd, self._wake), -1, -1
        for fd in fds:
            close_fd(fd)

    def forget(self) -> None:
        """Close this process's copies of the sockets."""
        for connection in (self._listener, *self._clients):
            if connection is not None:
                connection.close()
        self._clients.clear()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._serve_once()
            except Exception:  # noqa: BLE001 - it must not end the service for everybody else
                if not self._is_stopping:
                    _LOG.warning("a broker's request failed", exc_info=True)
                    self._drop_oldest()

    def _serve_once(self) -> None:
        assert self._listener is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for client in self._clients:
            poll.register(client, select.POLLIN)
        left = [until - time.monotonic() for until in self._clients.values()]
        ready = {fd for fd, _ in poll.poll(max(0.0, min(left)) * 1e3 + 1 if left else None)}
        if self._is_stopping:
            return
        now = time.monotonic()
        for client, until in list(self._clients.items()):
            if client.fileno() in ready:
                self._answer(client)
            elif until <= now:
                self._drop(client)
        if self._listener.fileno() in ready:
            self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            with no_fork():  # it does not wait: the listener is not to block
                client, _ = listener.accept()
                self._clients[client] = time.monotonic() + self._client_timeout_s
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                # The listener stays ready: do not poll it in a busy loop.
                self._drop_oldest()
                pause = select.poll()
                pause.register(self._wake, select.POLLIN)
                pause.poll(_PAUSE_MS)
            return
        client.setblocking(False)  # noqa: FBT003 - Python's own signature
        if len(self._clients) > self._max_clients:
            self._drop_oldest()

    def _answer(self, client: socket.socket) -> None:
        try:
            data = client.recv(REQUEST.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # it hung up
        if not may_talk(peer_of(client)[1]):
            self._reply(client, Status.FOREIGN)
            return
        if len(data) != REQUEST.size:
            self._reply(client, Status.MALFORMED)
            return
        magic, token, key = REQUEST.unpack(data)
        if magic != MAGIC:
            self._reply(client, Status.MALFORMED)
        elif not hmac.compare_digest(token, self._token):
            self._reply(client, Status.WRONG_TOKEN)
        else:
            # One look-up: a descriptor that is withdrawn from here on stays open until it is sent.
            offer = self.offers.get(key)
            self._reply(client, Status.UNKNOWN_KEY if offer is None else Status.SERVED, offer)

    def _reply(
        self, client: socket.socket, status: Status, offer: tuple[Descriptor, int] | None = None
    ) -> None:
        descriptor, nbytes = offer or (None, 0)
        attached = [] if descriptor is None else [array.array("i", [descriptor.fd])]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds) for fds in attached]
        with suppress(OSError):  # it no longer listens, or never read: its own loss
            client.sendmsg([ANSWER.pack(MAGIC, status, nbytes)], rights, socket.MSG_NOSIGNAL)
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._clients.pop(client, None)
        client.close()

    def _drop_oldest(self) -> None:
        for client in list(self._clients)[:1]:
            self._drop(client)


_SERVERS: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_server_in_child() -> None:
    # A copy of the socket in a child would keep clients waiting for a publisher that is gone.
    for server in list(_SERVERS):
        server.forget()


os.register_at_fork(after_in_child=_forget_server_in_child)


# ---- a publisher's broker, and a consumer's request ----------------------------------------------

_RETRY_S = 0.005
_LONGEST_S = 3600.0  # sockets take no infinite ones
_GONE = "Publish again; both sides must run under one user, in one process namespace."
_REFUSALS = {
    Status.MALFORMED: "it cannot read the request of this version of rl_bridge",
    Status.WRONG_TOKEN: "the token is not its own",
    Status.UNKNOWN_KEY: "it was released",
    Status.FOREIGN: "this process runs under another user",
}


def _checked_path(path: str) -> str:
    name = path.encode("utf-8", "surrogateescape")
    if b"\0" in name or len(name) > SOCKET_PATH_NBYTES:
        raise ValueError(
            f"expected a path of at most {SOCKET_PATH_NBYTES} bytes without a zero byte"
        )
    parsed = PurePosixPath(path)
    if not parsed.is_absolute() or ".." in parsed.parts:
        raise ValueError("expected an absolute path without '..'")
    return path


class BrokerRef(BaseModel):
    """The address of a broker, as a manifest carries it. It is checked, never believed.

    Attributes:
        path: of its socket.
        token: 32 hexadecimal digits that a request must bring.
        pid: the publisher's process.
        start_time: that process's, as `rl_bridge.memory.segment.process_start_time` tells it.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[StrictStr, AfterValidator(_checked_path)]
    token: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
    pid: Annotated[StrictInt, Field(ge=1, lt=2**31)]
    start_time: Annotated[StrictInt, Field(ge=0, lt=2**63)]


class Broker:
    """A publisher's end: serves descriptors from a thread of its own until it is closed.

    A forked child serves nothing and removes nothing. A broker that is dropped, or whose
    interpreter ends, closes itself; one that is killed leaves a directory, which the next sweeps.
    """

    def __init__(
        self,
        *,
        root: Path | None = None,
        max_clients: int = 64,
        client_timeout_s: float = 2.0,
    ) -> None:
        """Sweep what dead brokers left, then listen.

        Args:
            root: where the private directory goes; None for ``/run/user/<uid>``, or the directory
                for temporary files where that is missing.
            max_clients: connections at a time; one more drops the one that waits longest.
            client_timeout_s: seconds after which a client that asked nothing is dropped.

        Raises:
            TransportUnavailable: no socket can be had there.

        """
        token = secrets.token_bytes(16)
        self._server = Server(
            token,
            root=root,
            max_clients=max_clients,
            client_timeout_s=client_timeout_s,
        )
        weakref.finalize(self, self._server.close)
        pid = os.getpid()
        self.ref = BrokerRef(
            path=str(self._server.path),
            token=token.hex(),
            pid=pid,
            start_time=process_start_time(pid) or 0,
        )

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered: not closed, and not in a forked child."""
        return self._server.is_serving

    def offer(self, key: int, descriptor: Descriptor, nbytes: int) -> None:
        """Serve a descriptor from now on.

        Args:
            key: what consumers ask for; an integer of 0 or more, below 2**64, not in use.
            descriptor: what they get; the broker's from now on: keep and close it nowhere else.
            nbytes: size of the memory, which is sent with it.

        Raises:
            BridgeClosed: the broker was closed, or this is a forked child.
            ValueError: the key is in use, or a number is out of its range.

        """
        if not self.is_serving:
            raise BridgeClosed("the broker was closed, or this is a forked child. Make a new one.")
        if not (0 <= key < 2**64 and 0 < nbytes < 2**63) or key in self._server.offers:
            raise ValueError(f"key {key} of {nbytes} bytes is in use or out of range.")
        self._server.offers[key] = (descriptor, nbytes)

    def withdraw(self, key: int) -> None:
        """Stop serving it and close it; receivers keep their descriptors. Idempotent.

        A consumer that asks at this moment may still get it.
        """
        self._server.offers.pop(key, None)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop serving, close what is offered, remove the directory. Idempotent.

        Args:
            timeout_s: how long the thread is waited for.

        """
        self._server.close(timeout_s=timeout_s)


# Connections of fetches that run: a forked child's copy would keep arriving descriptors open.
_CONNECTIONS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_in_child() -> None:
    for connection in list(_CONNECTIONS):
        connection.close()


in_forked_children(_forget_in_child)


def fetch_fd(ref: BrokerRef, key: int, *, timeout_s: float) -> tuple[int, int]:
    """Ask a broker for a descriptor.

    Args:
        ref: where it is, from the manifest.
        key: which one.
        timeout_s: how long all of it may take.

    Returns:
        A descriptor, close-on-exec and closed in forked children, and the size of its memory in
        bytes. The caller closes it with `close_fd`, or makes a `Descriptor` of it.

    Raises:
        SegmentError: the publisher is gone, is another process, or no longer has it.
        DeadlineExceeded: no answer in time.
        TransportUnavailable: this process cannot have sockets.
        WeightBridgeUnavailableError: this process is short of descriptors or memory.

    """
    deadline = time.monotonic() + timeout_s
    while True:
        with closing(_connect(ref, deadline)) as connection:
            _check_peer(connection, ref)
            if _ask(connection, ref, key, deadline):
                found = _receive(connection, ref, key, deadline)
                if found is not None:
                    return found
        # In a crowd the broker drops the client that waits longest. If the broker is gone, the next
        # connection shows it.
        time.sleep(min(_RETRY_S, _left(ref, deadline)))


def _left(ref: BrokerRef, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(
            f"{_name(ref)} did not answer in time. See what stops it, or raise timeout_s."
        )
    return min(left, _LONGEST_S)


def _name(ref: BrokerRef) -> str:
    return f"the publisher's broker (pid {ref.pid})"


def _connect(ref: BrokerRef, deadline: float) -> socket.socket:
    try:
        with no_fork():  # a child that is forked in between would keep what arrives there
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _CONNECTIONS.add(connection)
    except OSError as error:
        require_resources(error)
        raise TransportUnavailable(
            _TRANSPORT,
            f"this process cannot have a unix socket: {error}",
            "Let the sandbox allow AF_UNIX, or use shared-memory.",
        ) from error
    try:
        while True:
            connection.settimeout(_left(ref, deadline))
            try:
                connection.connect(ref.path)
            except BlockingIOError:  # its queue is full; the kernel does not tell when it is not
                time.sleep(min(_RETRY_S, _left(ref, deadline)))
            else:
                return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, DeadlineExceeded):
            raise _lost(ref, f"{ref.path} cannot be reached: {error}", error) from error
        raise


def _lost(ref: BrokerRef, what: str, error: OSError) -> SegmentError | DeadlineExceeded:
    if isinstance(error, TimeoutError):
        msg = f"{_name(ref)} did not answer in time. See what stops it, or raise timeout_s."
        return DeadlineExceeded(msg)
    require_resources(error)
    return SegmentError(f"{_name(ref)} is gone or not visible: {what}. {_GONE}")


def _check_peer(connection: socket.socket, ref: BrokerRef) -> None:
    pid, uid = peer_of(connection)
    start = process_start_time(pid)
    if pid == ref.pid and start is None:
        raise SegmentError(f"{_name(ref)} is gone or not visible: it has ended. {_GONE}")
    if pid != ref.pid or start != ref.start_time or not may_talk(uid):
        raise SegmentError(
            f"{ref.path} belongs to process {pid} of user {uid}, started at {start}; expected "
            f"{ref.pid} of user {os.geteuid()}, started at {ref.start_time}. {_GONE}"
        )


def _ask(connection: socket.socket, ref: BrokerRef, key: int, deadline: float) -> bool:
    """Send the request; False if the broker hung up."""
    connection.settimeout(_left(ref, deadline))
    try:
        connection.send(REQUEST.pack(MAGIC, bytes.fromhex(ref.token), key))
    except (BrokenPipeError, ConnectionResetError):
        return False
    except OSError as error:
        raise _lost(ref, f"nothing can be sent: {error}", error) from error
    return True


def _receive(
    connection: socket.socket, ref: BrokerRef, key: int, deadline: float
) -> tuple[int, int] | None:
    """Receive the answer; None if the broker hung up without one."""
    _await_answer(connection, ref, deadline)
    fds = array.array("i")
    # Not socket.recv_fds: it drops the flag that closes the descriptor when another program starts.
    room = socket.CMSG_LEN(fds.itemsize)
    options = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    try:
        with no_fork():  # no wait in here: every fork of this process waits for it
            data, found, flags, _ = connection.recvmsg(ANSWER.size + 1, room, options)
            for level, kind, payload in found:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            for fd in fds:
                forget_fd_in_children(fd)
    except ConnectionResetError:
        return None
    except OSError as error:
        raise _lost(ref, f"nothing can be received: {error}", error) from error
    if not data and not fds:
        return None
    try:
        nbytes = _read_answer(data, flags, len(fds), ref, key)
    except BaseException:
        for fd in fds:
            close_fd(fd)
        raise
    return fds[0], nbytes


def _await_answer(connection: socket.socket, ref: BrokerRef, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(_left(ref, deadline) * 1e3):
        pass  # `_left` ends it


def _read_answer(data: bytes, flags: int, num_fds: int, ref: BrokerRef, key: int) -> int:
    try:
        magic, status, nbytes = ANSWER.unpack(data)
    except struct.error:
        magic, status, nbytes = b"", -1, 0
    if magic != MAGIC or status not in set(Status):
        raise SegmentError(f"{_name(ref)} answered {len(data)} bytes of something else. {_GONE}")
    if status != Status.SERVED:
        why = _REFUSALS[Status(status)]
        raise SegmentError(
            f"{_name(ref)} refuses key {key}: {why}. Import its latest manifest, as published."
        )
    if flags & socket.MSG_CTRUNC and not num_fds:
        raise WeightBridgeUnavailableError(
            f"this process has no descriptor left for memory of {_name(ref)}. Close some."
        )
    if num_fds != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or not 0 < nbytes < 2**63:
        raise SegmentError(
            f"{_name(ref)} sent {num_fds} descriptors for {nbytes} bytes, expected one. {_GONE}"
        )
    return int(nbytes)
