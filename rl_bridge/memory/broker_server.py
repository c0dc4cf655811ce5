"""The thread behind a `rl_bridge.memory.broker.Broker`, its private directory, and what sweeps it.

One thread polls all connections and waits for none: a client that is silent or slow costs a place
in a bounded list, until its time is over or the place is needed. Nothing that a client sends makes
the thread allocate, block or end.
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
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.holding import FORKS, SETTLING, close_fd, forget_fd_in_children
from rl_bridge.memory.segment import process_start_time
from rl_bridge.memory.vmm.owners import Descriptor

__all__ = [
    "ANSWER",
    "MAGIC",
    "REQUEST",
    "SOCKET_PATH_NBYTES",
    "Server",
    "Status",
    "may_talk",
    "peer_of",
    "sweep_brokers",
]

_LOG = logging.getLogger(__name__)

MAGIC = b"rlb1"
REQUEST = struct.Struct("!4s16sQ")
"""Magic, token, key."""
ANSWER = struct.Struct("!4sB3xQ")
"""Magic, status, size of the memory in bytes."""
SOCKET_PATH_NBYTES = 107  # sockaddr_un has 108, one of them for the end

_SOCKET = "s"
_NAME = re.compile(r"rlb-broker-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}")
_CREDENTIALS = struct.Struct("=iII")
_PAUSE_MS = 50
_BACKLOG = 128


class Status(IntEnum):
    """What an answer says."""

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


def sweep_brokers(root: Path | None = None, *, dry_run: bool = False) -> list[str]:
    """Remove the directories of this user's brokers whose process is dead.

    Args:
        root: where to look; None for where brokers go by default.
        dry_run: only say which.

    Returns:
        The names of those (to be) removed.

    """
    swept = []
    for path in sorted((root or _default_root()).glob("rlb-broker-*")):
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
                if not dry_run:
                    _remove(path, fd)
        finally:
            close_fd(fd)
    return swept


def _open_directory(path: Path) -> int:
    # Each of these is for a lock, which a child's copy would hold on to.
    with SETTLING, FORKS:
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
        transport: str,
        max_clients: int,
        client_timeout_s: float,
    ) -> None:
        """Listen and start to serve; see `rl_bridge.memory.broker.Broker`.

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
                transport,
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
            with SETTLING, FORKS:
                self._listener = socket.socket(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
                )
            self._listener.bind(str(self.path))
            self._listener.listen(_BACKLOG)
            with SETTLING, FORKS:
                flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
                self._wake = forget_fd_in_children(os.eventfd(0, flags))
            self._thread = threading.Thread(target=self._run, name="rlb-broker", daemon=True)
            self._thread.start()
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError | RuntimeError):  # the latter: no thread can be started
                raise TransportUnavailable(
                    transport,
                    f"no socket can be served in {str(root)!r}: {error}",
                    "Use a directory for temporary files (TMPDIR) that this user may write to.",
                ) from error
            raise

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered."""
        return not self._is_stopping and os.getpid() == self._pid and self._thread.is_alive()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop, and remove the directory; see `rl_bridge.memory.broker.Broker.close`."""
        if os.getpid() != self._pid:
            return
        if not self._closing.acquire(blocking=False):
            return  # another thread is at it, or this one: a finalizer may run in here
        try:
            # Whatever an interrupt cut off is made up for by the next call.
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
        # Noted first: closed twice, the numbers may be somebody else's by then.
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
            with SETTLING, FORKS:  # it does not wait: the listener is not to block
                client, _ = listener.accept()
                self._clients[client] = time.monotonic() + self._client_timeout_s
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                # Nobody is accepted now; the connection waits, and must not be polled in a circle.
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
            # One look: what is withdrawn from here on stays open until it is sent.
            offer = self.offers.get(key)
            self._reply(client, Status.UNKNOWN_KEY if offer is None else Status.SERVED, offer)

    def _reply(
        self, client: socket.socket, status: Status, offer: tuple[Descriptor, int] | None = None
    ) -> None:
        descriptor, nbytes = offer or (None, 0)
        attached = [] if descriptor is None else [array.array("i", [descriptor.fd])]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds) for fds in attached]
        with suppress(OSError):  # it does not listen any more, or never read: its own loss
            client.sendmsg([ANSWER.pack(MAGIC, status, nbytes)], rights, socket.MSG_NOSIGNAL)
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._clients.pop(client, None)
        client.close()

    def _drop_oldest(self) -> None:
        for client in list(self._clients)[:1]:
            self._drop(client)


_SERVERS: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A copy of the socket in a child would keep clients waiting for a publisher that is gone.
    for server in list(_SERVERS):
        server.forget()


os.register_at_fork(after_in_child=_forget_in_child)
