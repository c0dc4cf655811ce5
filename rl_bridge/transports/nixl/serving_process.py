"""The publisher's side of the process that serves reads (see `serving`).

`ServingProcess` starts the process, and another one if it dies. To the publisher it looks like an
`Agent`: both are a `Host`.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, ClassVar

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.transports.nixl import serving
from rl_bridge.transports.nixl.agent import AgentError, Counters, Host, Kind, Region
from rl_bridge.transports.nixl.library import command_without_torch
from rl_bridge.transports.nixl.serving import MAX_MESSAGE_NBYTES

_REMEDY = "Try again, or let the publisher serve by itself: serve='inline'."

_LONG_S = 60.0  # to start, or to register memory, which some networks have to pin
_ANSWER_S = 5.0
_GRACE_S = 1.0
_END_S = 5.0
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class _FarRegion(Region):
    """Memory that the process registered."""

    def __init__(self, key: int, epoch: int, address: int, metadata: bytes) -> None:
        super().__init__(key, 1, address)
        self.epoch = epoch
        self.metadata = metadata


class ServingProcess(Host):
    """A process that serves reads; see `Host`. Thread-safe."""

    serves_itself: ClassVar[bool] = True
    epoch: int = 0

    def __init__(self, *, backend: str, params: dict[str, str]) -> None:
        """Start the process.

        Raises:
            TransportUnavailable: it cannot be started, or cannot open the library.

        """
        self.made = Counters()
        self._options: dict[str, Any] = {"backend": backend, "params": params}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._connection = b""
        self._keys = 0
        self._live: set[int] = set()
        """Keys of the segments that the process has mapped."""
        self._is_helping = False
        self._how_it_ended = "it is gone"
        _ALL.add(self)
        self._start()

    # ---- the process ----------------------------------------------------------------------------

    def _start(self) -> None:
        if not sys.executable:
            raise TransportUnavailable("nixl", "this Python does not know its program", _REMEDY)
        command = command_without_torch(serving.__name__)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line = mine
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own words
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
            self._live.clear()
            self._is_helping = False
            self.epoch += 1
            answer = self._ask("open", within_s=_LONG_S, **self._options)
            self._connection = bytes.fromhex(answer["connection"])
        except AgentError as error:
            self._end()
            raise TransportUnavailable(
                "nixl", str(error).removesuffix(f". {_REMEDY}"), _REMEDY
            ) from error
        except OSError as error:
            self._end()
            cause = f"the process that serves reads cannot be started: {error}"
            raise TransportUnavailable("nixl", cause, _REMEDY) from error
        except BaseException:
            self._end()  # half-started, it would seem to serve
            raise

    @property
    def pid(self) -> int:
        """The process's id; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether the process ended, or was never started."""
        return self._line is None or self._line.fileno() < 0 or os.getpid() != self._pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when it ends; -1 if it has."""
        return -1 if self._line is None else self._line.fileno()

    def notice_end(self) -> bool:
        """Find out whether the process has ended."""
        with self._lock:
            if self._line is not None and not self.is_lost:
                with suppress(BlockingIOError):
                    try:
                        is_over = not self._line.recv(1, _PEEK)
                    except ConnectionError:
                        is_over = True
                    if is_over:
                        self._end()
            return self.is_lost

    def ensure(self, *, ping: bool = False) -> bool:
        """Start another process if this one died, or does not answer a ping.

        Returns:
            Whether it is a new process: all memory has to be registered anew.

        Raises:
            AgentError: it cannot be started.

        """
        with self._lock:
            self.notice_end()
            if ping and not self.is_lost:
                with suppress(AgentError):
                    self._ask("ping", within_s=_ANSWER_S)
            if not self.is_lost:
                return False
            try:
                self._start()
            except TransportUnavailable as error:
                raise AgentError(str(error)) from error
            return True

    def _end(self) -> None:
        """End the process, and note how it ended."""
        self._live.clear()
        line, self._line = self._line, None
        process, self._process = self._process, None
        if line is not None:
            line.close()
        if process is not None and os.getpid() == self._pid:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)  # it ends by itself once its socket is closed
            if process.returncode is None:
                self._how_it_ended = "it hung"
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            elif process.returncode < 0:
                self._how_it_ended = f"it was ended by {_name_of(-process.returncode)}"
            else:
                self._how_it_ended = f"it ended with {process.returncode}"

    # ---- messages to the process ----------------------------------------------------------------

    def _ask(self, what: str, *, within_s: float, fd: int | None = None, **options: Any) -> Any:
        """Send a request and wait for the answer.

        Raises:
            AgentError: it refuses, is gone, or does not answer in time and is ended.

        """
        text = b""
        try:
            self._send(what, fd, **options)
            if self._line is not None and _is_readable(self._line, within_s):
                with suppress(ConnectionError):
                    text = self._line.recv(MAX_MESSAGE_NBYTES)
        except BaseException:
            self._end()  # else the next request would get the answer to this one
            raise
        if not text:
            self._end()
            raise AgentError(
                f"the process that serves reads did not {what!r} within {within_s:.0f} s: "
                f"{self._how_it_ended}. {_REMEDY}"
            )
        answer = json.loads(text)
        if "error" in answer:
            raise AgentError(f"in the process that serves reads: {answer['error']}")
        return answer

    def _send(self, what: str, fd: int | None = None, **options: Any) -> None:
        if self.is_lost or self._line is None:
            return
        text = json.dumps({"do": what, **options}).encode("ascii")
        # Never wait: a process whose socket is full hangs, and is replaced. (`sendmsg`, because
        # `socket.send_fds` ignores its flags.)
        beside = (
            [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        )
        try:
            self._line.sendmsg([text], beside, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            self._end()

    # ---- as an agent ----------------------------------------------------------------------------

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""
        return len(self._live)

    def register(self, ranges: object, kind: Kind, device: int = 0) -> Region:
        """Refuse: another process can only map segments.

        Raises:
            AgentError: always.

        """
        del ranges, device
        raise AgentError(f"{kind} that is no segment cannot be served. Set serve='inline'.")

    def register_segment(self, segment: OwnedSegment) -> Region:
        """Have the process map and register a segment.

        Raises:
            AgentError: the process is gone, or the library refuses.

        """
        with self._lock:
            self._keys += 1
            key = self._keys
            answer = self._ask(
                "map", within_s=_LONG_S, fd=segment.fd, key=key, nbytes=segment.nbytes
            )
            self._live.add(key)
            self.made.registrations += 1
            metadata = bytes.fromhex(answer["metadata"])
            return _FarRegion(key, self.epoch, answer["address"], metadata)

    def deregister(self, region: Region) -> None:
        """Have the process unmap a segment. Idempotent; does nothing if that process is gone."""
        with self._lock:
            key = region.descriptors
            is_known = isinstance(region, _FarRegion) and region.epoch == self.epoch
            if is_known and key in self._live:
                self._live.discard(key)
                with suppress(AgentError):  # the process ended, and the registration with it
                    self._ask("unmap", within_s=_LONG_S, key=key)

    def metadata(self, region: Region | None) -> bytes:
        """Describe a region to a peer that will read it; None: only how to reach the process."""
        if region is None:
            return self._connection
        assert isinstance(region, _FarRegion)
        return region.metadata

    def progress(self) -> None:
        """Have the process look at its connections once."""
        with self._lock:
            self._send("progress")

    def help(self, *, is_needed: bool) -> None:
        """Have the process make progress from now on, or stop."""
        with self._lock:
            if is_needed != self._is_helping:
                self._is_helping = is_needed
                self._send("help", is_needed=is_needed)

    def close(self) -> None:
        """End the process. Idempotent; does nothing in a forked child."""
        with self._lock:
            self._end()

    def close_socket(self) -> None:
        """Close the socket; in a forked child its copy, which would keep the process alive."""
        if self._line is not None:
            self._line.close()


def _name_of(number: int) -> str:
    """Name a signal; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_readable(line: socket.socket, within_s: float) -> bool:
    """Wait until something can be read; returns whether it can in time."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


_ALL: weakref.WeakSet[ServingProcess] = weakref.WeakSet()


def _close_in_child() -> None:
    for one in list(_ALL):
        one.close_socket()


os.register_at_fork(after_in_child=_close_in_child)
