"""The publisher's side of the process that serves reads (see `serving`).

`ServingProcess` starts the process, and another one if it dies or hangs. To the publisher it looks
like an `Agent`: both are a `Host`.

Requests that have an answer are answered in their order, so nobody has to wait for one: `hear`
takes what has come. Each answer has its time. A process that has not answered by then hangs, and
is killed, which ends a stopped process, too.
"""

import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.transports.nixl import serving
from rl_bridge.transports.nixl.agent import AgentError, Counters, Host, Kind, Region
from rl_bridge.transports.nixl.library import command_without_torch
from rl_bridge.transports.nixl.serving import MAX_MESSAGE_NBYTES
from rl_bridge.transports.wire.channel import close_in_children

_LOG = logging.getLogger(__name__)

_REMEDY = "Try again, or let the publisher serve by itself: serve='inline'."

_START_S = 60.0  # and longer for each segment, which some networks pin
_ANSWER_S = 20.0
_PIN_NBYTES_PER_S = 1 << 28  # fresh pages are zeroed, too
_REFUSAL_S = 0.5  # a publisher that needs more memory mapped waits so long for a refusal
_LEAST_S = 0.2  # a process that is well may answer so late where cores are scarce
_GRACE_S = 1.0
_END_S = 5.0  # a killed process's memory is given back before it is gone


class _FarRegion(Region):
    """A segment that the process maps; `address` and `metadata` are known once it has."""

    def __init__(self, key: int, segment: OwnedSegment) -> None:
        super().__init__(key, 1)
        self.segment = segment
        self.metadata = b""


@dataclass(slots=True, eq=False)
class _Expected:
    """An answer that is still to come.

    Attributes:
        what: the request.
        until: when it is overdue.
        region: what is to be mapped.

    """

    what: str
    until: float
    region: _FarRegion | None = None

    @property
    def pin_s(self) -> float:
        """How long a network may take to pin what is to be mapped."""
        return 0.0 if self.region is None else _pin_s(self.region)


def _pin_s(region: _FarRegion) -> float:
    return region.segment.nbytes / _PIN_NBYTES_PER_S


class ServingProcess(Host):
    """A process that serves reads; see `Host`. Thread-safe."""

    serves_itself: ClassVar[bool] = True
    epoch: int = 0

    def __init__(
        self, *, backend: str, params: dict[str, str], answer_s: float = _ANSWER_S
    ) -> None:
        """Start the process. One that serves has to begin to map a segment within `answer_s`.

        Raises:
            TransportUnavailable: it cannot be started, or cannot open the library.

        """
        self.made = Counters()
        self._options: dict[str, Any] = {"backend": backend, "params": params}
        self._answer_s = max(answer_s, _LEAST_S)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._connection = b""
        self._keys = 0
        self._regions: dict[int, _FarRegion] = {}
        self._expected: deque[_Expected] = deque()
        self._is_starting = False
        self._is_helping = False
        self._start()
        try:
            self._wait(None, _START_S)
        except BaseException:
            self._end(is_hung=True)  # half-started, it would seem to serve
            raise
        if not self.is_serving:
            self._end(is_hung=True)
            raise TransportUnavailable("nixl", self.ended, _REMEDY)

    # ---- the process ----------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the process, and have it map all segments; waits for none of its answers."""
        if not sys.executable:
            raise TransportUnavailable("nixl", "this Python does not know its program", _REMEDY)
        command = command_without_torch(serving.__name__)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line = mine
            close_in_children(mine)  # a copy there would keep the process alive
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own words
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
        except OSError as error:
            self._end()
            cause = f"the process that serves reads cannot be started: {error}"
            raise TransportUnavailable("nixl", cause, _REMEDY) from error
        except BaseException:
            self._end()  # half-started, it would seem to serve
            raise
        self.epoch += 1
        self.is_hopeless = self._is_helping = False
        self._is_starting = True
        self._ask("open", _START_S, **self._options)
        for region in self._regions.values():
            self._map(region)

    @property
    def pid(self) -> int:
        """The process's id; 0 if there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether the process ended, or was never started."""
        return self._line is None or self._line.fileno() < 0 or os.getpid() != self._pid

    @property
    def is_serving(self) -> bool:
        """Whether readers can be led to everything that was registered."""
        return not self.is_lost and all(one.what == "ping" for one in self._expected)

    @property
    def seconds_left(self) -> float | None:
        """How long until an answer is overdue; None if none is expected."""
        left = [one.until for one in self._expected]
        return min(left) - time.monotonic() if left else None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when it answers or ends; -1 if it has."""
        return -1 if self._line is None else self._line.fileno()

    def hear(self) -> None:
        """Take the answers that came; never waits. Kills the process if one is overdue."""
        with self._lock:
            try:
                while not self.is_lost and self._take_next():
                    pass
            except BaseException:
                self._end(is_hung=True)  # else the next request would get the answer to this one
                raise
            left = self.seconds_left
            if left is not None and left <= 0:
                self._end(is_hung=True)

    def _take_next(self) -> bool:
        """Take one answer, or note that the process ended; returns whether there was one."""
        assert self._line is not None
        try:
            text = self._line.recv(MAX_MESSAGE_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            text = b""
        if text:
            self._take(json.loads(text))
        else:
            self._end()
        return bool(text)

    def _take(self, answer: dict[str, Any]) -> None:
        region = None
        if self._expected and self._expected[0].what == answer["to"]:
            region = self._expected.popleft().region
        if "error" in answer:
            refusal = f"in the process that serves reads: {answer['error']}"
            if region is None:
                self._end(refusal)
            else:  # its caller is told, or its readers; other memory is served
                region.refusal = refusal
                if region.descriptors in self._regions:
                    _LOG.warning("a version's memory cannot be served: %s", refusal)
        elif region is not None:
            region.address, region.metadata = answer["address"], bytes.fromhex(answer["metadata"])
            self.made.registrations += 1
        elif answer["to"] == "open":
            self._connection = bytes.fromhex(answer["connection"])
        self._is_starting &= not self.is_serving

    def ensure(self) -> bool:
        """Start another process if this one ended.

        Returns:
            Whether it serves; else it is starting, or has to map something first.

        """
        with self._lock:
            self.hear()
            if self.is_lost:
                try:
                    self._start()
                except TransportUnavailable as error:
                    raise AgentError(str(error)) from error
            return self.is_serving

    def doubt(self, within_s: float) -> None:
        """Have the process show within this time that it runs; `hear` kills it if it does not.

        One that is starting has its own time: else readers in a hurry would never let it start.
        """
        with self._lock:
            if self.is_lost or self._is_starting:
                return
            # What it has to map before it answers has its time.
            pinning_s = sum(one.pin_s for one in self._expected)
            until = time.monotonic() + max(within_s, _LEAST_S) + pinning_s
            for one in self._expected:
                if one.what == "ping":
                    one.until = min(one.until, until)
                    return
            self._ask("ping", until - time.monotonic())

    def _end(self, refusal: str = "", *, is_hung: bool = False) -> None:
        """End the process, and note how it ended."""
        what = f"did not {self._expected[0].what!r}" if self._expected else "is gone"
        self._expected.clear()
        self._is_starting = False
        line, self._line = self._line, None
        process, self._process = self._process, None
        if line is not None:
            line.close()
        if process is None or os.getpid() != self._pid:
            return
        if is_hung:
            process.kill()
        try:  # it ends by itself once its socket is closed
            process.wait(_END_S if is_hung else _GRACE_S)
        except subprocess.TimeoutExpired:
            is_hung = True
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        code = process.returncode or 0
        how = "it hung" if is_hung else f"it was ended by {_name_of(-code)}" if code < 0 else ""
        how = how or f"it ended with {code}"
        self.ended = refusal or f"the process that serves reads {what}: {how}"
        self.is_hopeless = bool(refusal) or (code > 0 and not is_hung)

    # ---- messages to the process ----------------------------------------------------------------

    def _ask(
        self,
        what: str,
        within_s: float,
        region: _FarRegion | None = None,
        fd: int | None = None,
        **options: Any,
    ) -> None:
        """Send a request whose answer is expected in this time."""
        if not self.is_lost:
            self._expected.append(_Expected(what, time.monotonic() + within_s, region))
            self._send(what, fd, **options)

    def _map(self, region: _FarRegion) -> None:
        region.address, region.metadata, region.refusal = 0, b"", ""
        # It maps one after the other.
        pinning_s = sum(one.pin_s for one in self._expected) + _pin_s(region)
        self._ask(
            "map",
            pinning_s + (_START_S if self._is_starting else self._answer_s),
            region,
            region.segment.fd,
            key=region.descriptors,
            nbytes=region.segment.nbytes,
        )

    def _wait(self, region: _FarRegion | None, within_s: float) -> None:
        """Wait for an answer about this region, at most so long."""
        until = time.monotonic() + within_s
        while any(one.region is region for one in self._expected):
            left = until - time.monotonic()
            if self._line is None or left <= 0:
                return
            poll = select.poll()
            poll.register(self._line, select.POLLIN)
            poll.poll(left * 1e3 + 1)
            self.hear()

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
        except BlockingIOError:
            self._end(is_hung=True)
        except OSError:
            self._end()

    # ---- as an agent ----------------------------------------------------------------------------

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now, or as soon as the process serves."""
        return len(self._regions)

    def register(self, ranges: object, kind: Kind, device: int = 0) -> Region:
        """Refuse: another process can only map segments."""
        del ranges, device
        raise AgentError(f"{kind} that is no segment cannot be served. Set serve='inline'.")

    def register_segment(self, segment: OwnedSegment) -> Region:
        """Have the process map and register a segment, and each process that takes its place.

        A process that does not answer for a moment is not waited for: readers are.
        """
        with self._lock:
            self._keys += 1
            region = _FarRegion(self._keys, segment)
            self.ensure()
            self._map(region)
            if not self._is_starting:
                self._wait(region, _REFUSAL_S)
            if region.refusal:
                raise AgentError(region.refusal)
            self._regions[self._keys] = region
            try:
                self.ensure()  # it may have died of it
            except BaseException:
                self.deregister(region)
                raise
            return region

    def try_again(self, region: Region) -> None:
        """Have the process map a segment that it refused when nobody waited for its answer."""
        assert isinstance(region, _FarRegion)
        # (One that cannot be started: readers are told when they ask.)
        with self._lock, suppress(AgentError):
            self.ensure()  # one that is new has mapped it, or will
            if region.refusal:
                self._map(region)

    def deregister(self, region: Region) -> None:
        """Have the process unmap a segment. Idempotent."""
        with self._lock:
            if self._regions.pop(region.descriptors, None) is not None:
                self._send("unmap", key=region.descriptors)

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
            self._regions.clear()
            self._end(is_hung=True)


def _name_of(number: int) -> str:
    """Name a signal; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
