"""The program of the process that serves reads: an agent, and the publisher's segments, read-only.

UCX answers reads over TCP in software, and ends its own process if a reader is killed in the middle
of a read. So that it does not end the trainer, the agent has a process of its own. This process
knows no versions, leases or tokens: over a Unix socket the publisher says what to map, and when
readers need progress. The process ends with that socket.

It imports neither torch nor the rest of rl_bridge, so that it starts quickly and stays small.

UCX waits for its sockets by epoll, and NIXL does not say by which. To call the library all the time
would take a core from readers, trainers, and the processes of other ranks, so this process polls
every epoll that it has. Progress that no epoll shows (shared memory, for instance) waits until the
next look.
"""

import json
import mmap
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rl_bridge.errors import WeightBridgeError
from rl_bridge.transports.nixl.agent import Agent, AgentError, Region

MAX_MESSAGE_NBYTES = 1 << 20
"""The largest message between the publisher and this process."""

# Longest time between two calls into the library, while readers need progress.
_LOOK_MS = 1.0
_EPOLL = "anon_inode:[eventpoll]"


class _Mapped:
    """One segment, mapped and registered."""

    def __init__(self, agent: Agent, fd: int, nbytes: int) -> None:
        self._agent = agent
        self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] | None = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self.region: Region = agent.register([(self.address, nbytes)], "DRAM")

    def close(self) -> None:
        self._agent.deregister(self.region)
        self._bytes = None
        self._map.close()


class Serving:
    """Answers the publisher's requests."""

    def __init__(self, line: socket.socket) -> None:
        """Serve the other end of `line`."""
        self._line = line
        self._agent: Agent | None = None
        self._mapped: dict[int, _Mapped] = {}
        self._helping: select.poll | None = None
        """The descriptors to poll while readers need progress; None otherwise."""

    def run(self) -> None:
        """Serve until the publisher hangs up."""
        resting = select.poll()
        resting.register(self._line, select.POLLIN)
        while True:
            if self._helping is None:
                is_asked = bool(resting.poll())
            else:
                ready = self._helping.poll(_LOOK_MS)
                is_asked = any(fd == self._line.fileno() for fd, _ in ready)
            if is_asked and not self._answer():
                return
            if self._helping is not None:
                self._progress()

    def _make_poll(self) -> select.poll:
        """Wait for the publisher, and for everything that UCX waits for."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this listing is closed by now
                if str(path.readlink()) == _EPOLL:
                    poll.register(int(path.name), select.POLLIN)
        return poll

    def _answer(self) -> bool:
        """Do one thing; returns whether the publisher is still there."""
        text, fds, _, _ = socket.recv_fds(self._line, MAX_MESSAGE_NBYTES, 1)
        if not text:
            return False
        message = json.loads(text)
        what = message.pop("do")
        try:
            answer = self._do(what, message, fds)
        except (WeightBridgeError, OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)
        if answer is not None:
            self._line.send(json.dumps({"to": what, **answer}).encode("ascii"))
        return True

    def _do(self, what: str, options: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        match what:
            case "open":
                self._agent = Agent("publisher", **options)
                return {"connection": self._agent.metadata(None).hex()}
            case "map" if self._agent is not None:
                made = _Mapped(self._agent, fds[0], options["nbytes"])
                self._mapped[options["key"]] = made
                metadata = self._agent.metadata(made.region).hex()
                return {"address": made.address, "metadata": metadata}
            case "unmap":
                if (mapped := self._mapped.pop(options["key"], None)) is not None:
                    mapped.close()
                return None
            case "ping":
                return {}
            case "help":
                self._helping = self._make_poll() if options["is_needed"] else None
                return None
            case "progress":
                self._progress()
                return None
        raise ValueError(f"{what!r} cannot be done. Use one release.")

    def _progress(self) -> None:
        try:
            if self._agent is not None:
                self._agent.progress()
        except AgentError:
            return  # a reader may have died in the middle of a read: the publisher notices that


def main() -> None:
    """Run, with the socket as standard input."""
    # A Ctrl-C is the trainer's to handle: when the trainer ends, so does the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # UCX may crash this process: a core file would contain the weights.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ConnectionError):  # the publisher is gone, or does not want the answer
        Serving(socket.socket(fileno=0)).run()
    os._exit(0)  # the kernel releases everything; an orderly close would wait for readers
