"""The publisher's side of the process that serves reads: starts it, and another one if it dies."""

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
from rl_bridge.transports.nixl.library import bare_command
from rl_bridge.transports.nixl.serving import MAX_MESSAGE_NBYTES

__all__ = [
    "Host",
    "ServingProcess",
]

_REMEDY = "Try again, or let the publisher serve by itself: serve='inline'."

# To start, or to register memory, which networks may have to pin.
_LONG_S = 60.0
_ANSWER_S = 5.0
_GRACE_S = 1.0
_END_S = 5.0
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT


class _Far(Region):
    """Memory that the process registered."""

    def __init__(self, key: int, epoch: int, address: int, metadata: bytes) -> None:
        super().__init__(key, 1, address)
        self.epoch = epoch
        self.metadata = metadata


class ServingProcess:
    """See the module; to the publisher it looks like an `Agent`. Thread-safe."""

    serves_itself: ClassVar[bool] = True

    def __init__(self, *, backend: str, params: dict[str, str]) -> None:
        """Start it.

        Raises:
            TransportUnavailable: it cannot be started, or the library not be opened there.

        """
        self.made = Counters()
        self.epoch = 0
        """Which process this is: they are counted."""
        self._options: dict[str, Any] = {"backend": backend, "params": params}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._connection = b""
        self._keys = 0
        self._live: set[int] = set()
        self._regions: weakref.WeakValueDictionary[int, _Far] = weakref.WeakValueDictionary()
        """Of those that are live; one that nobody has was lost, to an interrupt."""
        self._is_helping = False
        self._how = "it is gone"
        _ALL.add(self)
        self._start()

    # ---- the process ----------------------------------------------------------------------------

    def _start(self) -> None:
        if not sys.executable:
            raise TransportUnavailable("nixl", "this Python does not know its program", _REMEDY)
        command = bare_command(serving.__name__)
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
            self._end()  # it may have said why it cannot, and wait for more
            raise TransportUnavailable(
                "nixl", str(error).removesuffix(f". {_REMEDY}"), _REMEDY
            ) from error
        except OSError as error:
            self._end()
            cause = f"the process that serves reads cannot be started: {error}"
            raise TransportUnavailable("nixl", cause, _REMEDY) from error
        except BaseException:
            self._end()  # half of it is known here: it would seem to serve
            raise

    @property
    def pid(self) -> int:
        """Of the process; 0 where there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it ended, or was never there."""
        return self._line is None or self._line.fileno() < 0 or os.getpid() != self._pid

    def fileno(self) -> int:
        """What becomes readable when it ends; -1 if it did."""
        return -1 if self._line is None else self._line.fileno()

    def look(self) -> None:
        """Take note of its end."""
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

    def ensure(self, *, is_sure: bool = False) -> bool:
        """Have a process that serves: start another one if it died, or does not answer.

        Args:
            is_sure: wait for a word of it.

        Returns:
            Whether it is another one, to which everything has to be registered anew.

        Raises:
            AgentError: it cannot be started.

        """
        with self._lock:
            self.look()
            if is_sure and not self.is_lost:
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
        """Have it gone, and note how it ended."""
        self._live.clear()
        line, process = self._line, self._process
        if line is not None:
            line.close()
        if process is not None and os.getpid() == self._pid:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)  # without the socket it ends by itself
            if process.returncode is None:
                self._how = "it hung"
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            elif process.returncode < 0:
                self._how = f"it was ended by {_name_of(-process.returncode)}"
            else:
                self._how = f"it ended with {process.returncode}"
        self._line = self._process = None  # last: what an interrupt cut off, the next call ends

    # ---- what it is asked -----------------------------------------------------------------------

    def _ask(self, what: str, *, within_s: float, fd: int | None = None, **options: Any) -> Any:
        """Ask and wait for the answer.

        Raises:
            AgentError: it says no, is gone, or does not answer in time and is ended.

        """
        text = b""
        try:
            self._tell(what, fd, **options)
            if self._line is not None and _is_readable(self._line, within_s):
                with suppress(ConnectionError):
                    text = self._line.recv(MAX_MESSAGE_NBYTES)
        except BaseException:
            self._end()  # or the next question would get the answer to this one
            raise
        if not text:
            self._end()
            raise AgentError(
                f"the process that serves reads did not {what!r} within {within_s:.0f} s: "
                f"{self._how}. {_REMEDY}"
            )
        answer = json.loads(text)
        if "error" in answer:
            raise AgentError(f"in the process that serves reads: {answer['error']}")
        return answer

    def _tell(self, what: str, fd: int | None = None, **options: Any) -> None:
        if self.is_lost or self._line is None:
            return
        text = json.dumps({"do": what, **options}).encode("ascii")
        # Not to wait: one that has not read so many words hangs, and another one takes its place.
        # (By `sendmsg`, as `socket.send_fds` takes flags and ignores them.)
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
        """Refuse: only segments can be mapped elsewhere.

        Raises:
            AgentError: always.

        """
        del ranges, device
        raise AgentError(f"{kind} that is no segment cannot be served. Set serve='inline'.")

    def register_segment(self, segment: OwnedSegment) -> Region:
        """Have a segment mapped and registered there.

        Raises:
            AgentError: the process is gone, or the library refuses.

        """
        with self._lock:
            for lost in self._live - set(self._regions):
                self._unmap(lost)
            self._keys += 1
            key = self._keys
            self._live.add(key)  # first: it may be mapped from here on
            try:
                answer = self._ask(
                    "map", within_s=_LONG_S, fd=segment.fd, key=key, nbytes=segment.nbytes
                )
            except AgentError:
                self._live.discard(key)
                raise
            self.made.registrations += 1
            metadata = bytes.fromhex(answer["metadata"])
            region = self._regions[key] = _Far(key, self.epoch, answer["address"], metadata)
            return region

    def deregister(self, region: Region) -> None:
        """Have it unmapped there. Idempotent; with the process it is gone anyway."""
        with self._lock:
            key = region.descriptors
            if not isinstance(region, _Far) or region.epoch != self.epoch or key not in self._live:
                return
            self._unmap(key)

    def _unmap(self, key: int) -> None:
        with suppress(AgentError):  # it ended: so did the registration
            self._ask("unmap", within_s=_LONG_S, key=key)
        self._live.discard(key)  # behind it: what an interrupt cuts off is done again

    def metadata(self, region: Region | None) -> bytes:
        """What a peer needs to read a region; None: to reach the process at all."""
        if region is None:
            return self._connection
        assert isinstance(region, _Far)
        return region.metadata

    def progress(self) -> None:
        """Have it look at its connections."""
        with self._lock:
            self._tell("progress")

    def help(self, *, is_needed: bool) -> None:
        """Have it make progress, from here on or no longer."""
        with self._lock:
            if is_needed != self._is_helping:
                self._is_helping = is_needed
                self._tell("help", is_needed=is_needed)

    def close(self) -> None:
        """End it. Idempotent; in a forked child a no-op."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked child: close its copy of the socket, which would keep the process alive."""
        if self._line is not None:
            self._line.close()


def _name_of(number: int) -> str:
    """A signal's name; those in real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_readable(line: socket.socket, within_s: float) -> bool:
    """Whether something can be read in time."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


_ALL: weakref.WeakSet[ServingProcess] = weakref.WeakSet()


def _forget_in_child() -> None:
    for one in list(_ALL):
        one.forget()


os.register_at_fork(after_in_child=_forget_in_child)


# ---- Whoever holds a publisher's registered memory: an agent here, or a process of its own.


class Host(Protocol):
    """What `Agent` and `ServingProcess` have in common."""

    @property
    def made(self) -> Counters:
        """What was made so far."""

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""

    @property
    def serves_itself(self) -> bool:
        """Whether it makes progress by itself, once `help` says so; else `progress` does."""

    @property
    def epoch(self) -> int:
        """Grows when somebody else takes over."""

    @property
    def is_lost(self) -> bool:
        """Whether it died."""

    def fileno(self) -> int:
        """What becomes readable when it dies; -1 where nothing does."""

    def look(self) -> None:
        """Take note of its end."""

    def ensure(self, *, is_sure: bool = False) -> bool:
        """Replace it if it died; returns whether everything has to be registered anew.

        Args:
            is_sure: a living one that does not answer is replaced, too.

        Raises:
            AgentError: nobody can take its place.

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
        """Take memory back. Idempotent."""

    def metadata(self, region: Region | None) -> bytes:
        """What a peer needs to read a region; None: to reach the host at all."""

    def progress(self) -> None:
        """Serve peers that read, a little."""

    def help(self, *, is_needed: bool) -> None:
        """Serve peers that read, from here on or no longer."""

    def close(self) -> None:
        """End it. Idempotent."""
