"""Descriptors handed from a publisher to its consumers, one at a time, over a private socket.

The publisher's `Broker` listens on a unix socket in a directory that only its user may enter, under
a name that nobody can guess. A request is one message: a token that travels with the manifest, and
the number of what is asked for. The answer is one message with the descriptor attached. Each side
asks the kernel who the other one is (``SO_PEERCRED``); what arrives is checked, never believed.
(unix(7), ``SCM_RIGHTS`` and ``SO_PEERCRED``.)
"""

import array
import os
import secrets
import select
import socket
import struct
import time
import weakref
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    SegmentError,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.lifecycle.forks import in_forked_children
from rl_bridge.memory.broker_server import (
    ANSWER,
    MAGIC,
    REQUEST,
    SOCKET_PATH_NBYTES,
    Server,
    Status,
    may_talk,
    peer_of,
)
from rl_bridge.memory.holding import FORKS, SETTLING, close_fd, forget_fd_in_children
from rl_bridge.memory.segment import process_start_time, require_resources
from rl_bridge.memory.vmm.owners import Descriptor

__all__ = ["Broker", "BrokerRef", "fetch_fd"]

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
        msg = f"expected a path of at most {SOCKET_PATH_NBYTES} bytes without a zero byte"
        raise ValueError(msg)
    parsed = PurePosixPath(path)
    if not parsed.is_absolute() or ".." in parsed.parts:
        msg = "expected an absolute path without '..'"
        raise ValueError(msg)
    return path


class BrokerRef(BaseModel):
    """Where a broker is, as it travels in a manifest. What it says is checked, never believed.

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
        transport: str = "cuda-vmm",
        max_clients: int = 64,
        client_timeout_s: float = 2.0,
    ) -> None:
        """Sweep what dead brokers left, then listen.

        Args:
            root: where the private directory goes; None for ``/run/user/<uid>``, or the directory
                for temporary files where that is missing.
            transport: whose broker this is; for its errors.
            max_clients: connections at a time; one more drops the one that waits longest.
            client_timeout_s: seconds after which a client that asked nothing is dropped.

        Raises:
            TransportUnavailable: no socket can be had there.

        """
        token = secrets.token_bytes(16)
        self._server = Server(
            token,
            root=root,
            transport=transport,
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
            nbytes: size of the memory, which is told with it.

        Raises:
            BridgeClosed: the broker was closed, or this is a forked child.
            ValueError: the key is in use, or a number is out of its range.

        """
        if not self.is_serving:
            msg = "the broker was closed, or this is a forked child. Make a new one."
            raise BridgeClosed(msg)
        if not (0 <= key < 2**64 and 0 < nbytes < 2**63) or key in self._server.offers:
            msg = f"key {key} of {nbytes} bytes is in use or out of range."
            raise ValueError(msg)
        self._server.offers[key] = (descriptor, nbytes)

    def withdraw(self, key: int) -> None:
        """Serve it no more and close it; what was handed out stays with its receivers. Idempotent.

        A consumer that asks at this moment may still get it.
        """
        self._server.offers.pop(key, None)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop serving, close what is offered, remove the directory. Idempotent.

        Args:
            timeout_s: how long the thread is waited for.

        """
        self._server.close(timeout_s=timeout_s)


# Connections of fetches that run: a forked child's copy would keep what arrives there.
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
        SegmentError: the publisher is gone, is another process, or does not have it any more.
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
        # In a crowd it drops whoever waits longest. If it is gone, connecting again tells.
        time.sleep(min(_RETRY_S, _left(ref, deadline)))


def _left(ref: BrokerRef, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        msg = f"{_name(ref)} did not answer in time. See what stops it, or raise timeout_s."
        raise DeadlineExceeded(msg)
    return min(left, _LONGEST_S)


def _name(ref: BrokerRef) -> str:
    return f"the publisher's broker (pid {ref.pid})"


def _connect(ref: BrokerRef, deadline: float) -> socket.socket:
    try:
        with SETTLING, FORKS:  # a child that is forked in between would keep what arrives there
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _CONNECTIONS.add(connection)
    except OSError as error:
        require_resources(error)
        raise TransportUnavailable(
            "cuda-vmm",
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
    if pid != ref.pid or start != ref.start_time or not may_talk(uid):
        msg = (
            f"{ref.path} belongs to process {pid} of user {uid}, started at {start}; expected "
            f"{ref.pid} of user {os.geteuid()}, started at {ref.start_time}. {_GONE}"
        )
        raise SegmentError(msg)


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
        with SETTLING, FORKS:  # no wait in here: every fork of this process waits for it
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
        msg = f"{_name(ref)} answered {len(data)} bytes of something else. {_GONE}"
        raise SegmentError(msg)
    if status != Status.SERVED:
        why = _REFUSALS[Status(status)]
        msg = f"{_name(ref)} refuses key {key}: {why}. Import its latest manifest, as published."
        raise SegmentError(msg)
    if flags & socket.MSG_CTRUNC and not num_fds:
        msg = f"this process has no descriptor left for memory of {_name(ref)}. Close some."
        raise WeightBridgeUnavailableError(msg)
    if num_fds != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or not 0 < nbytes < 2**63:
        msg = f"{_name(ref)} sent {num_fds} descriptors for {nbytes} bytes, expected one. {_GONE}"
        raise SegmentError(msg)
    return int(nbytes)
