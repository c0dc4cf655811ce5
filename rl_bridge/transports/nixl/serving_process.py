"""What holds a publisher's registered memory: an agent, or a process of its own.

`ServingProcess` is the publisher's side of the process that serves reads (see `serving`): it starts
the process, and another one if it dies. To the publisher it looks like an `Agent`; `Host` is what
the two have in common.
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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.transports.nixl import serving
from rl_bridge.transports.nixl.agent import AgentError, Counters, Kind, Region
from rl_bridge.transports.nixl.library import command_without_torch
from rl_bridge.transports.nixl.serving import MAX_MESSAGE_NBYTES

__all__ = ["Host", "ServingProcess"]

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


class ServingProcess:
    """A process that serves reads; see `Host`. Thread-safe."""

    serves_itself: ClassVar[bool] = True

    def __init__(self, *, backend: str, params: dict[str, str]) -> None:
        """Start the process.

        Raises:
            TransportUnavailable: it cannot be started, or cannot open the library.

        """
        self.made = Counters()
        self.epoch = 0
        """Counts the processes that were started."""
        self._options: dict[str, Any] = {"backend": backend, "params": params}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._connection = b""
        self._keys = 0
        self._live: set[int] = set()
        self._regions: weakref.WeakValueDictionary[int, _FarRegion] = weakref.WeakValueDictionary()
        """The live regions; a live key without a region was lost to an interrupt."""
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

    def notice_end(self) -> None:
        """Note whether the process has ended."""
        with self._lock:
            if self._line is None:
                return
            if self._line.fileno() < 0:
                self._end()  # an interrupt cut that off
                return
            with suppress(BlockingIOError):
                try:
                    is_over = not self._line.recv(1, _PEEK)
                except ConnectionError:
                    is_over = True
                if is_over:
                    self._end()

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
        line, process = self._line, self._process
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
        self._line = self._process = None  # last: what an interrupt cut off, the next call ends

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

    # ---- what an agent offers -------------------------------------------------------------------

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
            for lost in self._live - set(self._regions):
                self._unmap(lost)
            self._keys += 1
            key = self._keys
            self._live.add(key)  # before the request: it may be mapped from here on
            try:
                answer = self._ask(
                    "map", within_s=_LONG_S, fd=segment.fd, key=key, nbytes=segment.nbytes
                )
            except AgentError:
                self._live.discard(key)
                raise
            self.made.registrations += 1
            metadata = bytes.fromhex(answer["metadata"])
            region = self._regions[key] = _FarRegion(key, self.epoch, answer["address"], metadata)
            return region

    def deregister(self, region: Region) -> None:
        """Have the process unmap a segment. Idempotent; does nothing if that process is gone."""
        with self._lock:
            key = region.descriptors
            is_known = isinstance(region, _FarRegion) and region.epoch == self.epoch
            if is_known and key in self._live:
                self._unmap(key)

    def _unmap(self, key: int) -> None:
        with suppress(AgentError):  # the process ended, and the registration with it
            self._ask("unmap", within_s=_LONG_S, key=key)
        self._live.discard(key)  # last: what an interrupt cuts off is done again

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


class Host(Protocol):
    """What holds a publisher's registered memory: an `Agent` or a `ServingProcess`."""

    @property
    def made(self) -> Counters:
        """What was made so far."""

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""

    @property
    def serves_itself(self) -> bool:
        """Whether it makes progress by itself once `help` asks for it; else `progress` does."""

    @property
    def epoch(self) -> int:
        """Grows when another process takes its place."""

    @property
    def is_lost(self) -> bool:
        """Whether it died."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it dies; -1 if there is none."""

    def notice_end(self) -> None:
        """Note whether it has ended."""

    def ensure(self, *, ping: bool = False) -> bool:
        """Replace it if it died; returns whether all memory has to be registered anew.

        Args:
            ping: replace it, too, if it lives and does not answer.

        Raises:
            AgentError: it cannot be replaced.

        """

    def register(self, ranges: Sequence[tuple[int, int]], kind: Kind, device: int = 0) -> Region:
        """Register ranges (address, size) of this process.

        Raises:
            AgentError: it cannot.

        """

    def register_segment(self, segment: OwnedSegment) -> Region:
        """Register a segment.

        Raises:
            AgentError: it cannot.

        """

    def deregister(self, region: Region) -> None:
        """End a registration. Idempotent."""

    def metadata(self, region: Region | None) -> bytes:
        """Describe a region to a peer that will read it; None: only how to reach the host."""

    def progress(self) -> None:
        """Serve peers that read, once."""

    def help(self, *, is_needed: bool) -> None:
        """Serve peers that read from now on, or stop."""

    def close(self) -> None:
        """End it. Idempotent."""
