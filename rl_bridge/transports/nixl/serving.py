"""The program of the process that serves reads: an agent, and the publisher's segments, read-only.

UCX answers reads over TCP in software, and ends its own process where the reader is killed in the
middle. So that this is not the trainer's, a process of its own has the agent. It knows no versions,
leases or tokens: those stay with the publisher, which tells it over a Unix socket what to map, and
when readers want it to make progress. It ends with that socket.

It imports neither torch nor the rest of the library, so that it starts quickly and stays small.
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

__all__ = ["MAX_MESSAGE_NBYTES", "Serving", "main"]

MAX_MESSAGE_NBYTES = 1 << 20
"""Of what travels between the publisher and this process."""

# Longest time between two calls into the library, while readers need them.
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
    """Does what the publisher says."""

    def __init__(self, line: socket.socket) -> None:
        """Serve the other end of `line`."""
        self._line = line
        self._agent: Agent | None = None
        self._mapped: dict[int, _Mapped] = {}
        self._helping: select.poll | None = None
        """What to wait for while readers need progress; None while they do not."""

    def run(self) -> None:
        """Serve until the publisher hangs up."""
        resting = select.poll()
        resting.register(self._line, select.POLLIN)
        while True:
            if self._helping is None:
                is_told = bool(resting.poll())
            else:
                ready = self._helping.poll(_LOOK_MS)
                is_told = any(fd == self._line.fileno() for fd, _ in ready)
            if is_told and not self._answer():
                return
            if self._helping is not None:
                self._progress()

    def _look_out(self) -> select.poll:
        """What becomes readable when there is progress to make, or the publisher says something.

        UCX waits for its sockets by epoll, and NIXL does not tell by which. A process that called
        it all the time would take a core from readers, trainers, and the processes of other ranks.
        What no epoll tells of (shared memory, for instance) waits until the next look.
        """
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of this very look is closed by now
                if str(path.readlink()) == _EPOLL:
                    poll.register(int(path.name), select.POLLIN)
        return poll

    def _answer(self) -> bool:
        """Do one thing; returns whether the publisher is there still."""
        text, fds, _, _ = socket.recv_fds(self._line, MAX_MESSAGE_NBYTES, 1)
        if not text:
            return False
        try:
            message = json.loads(text)
            answer = self._do(message.pop("do"), message, fds)
        except (WeightBridgeError, OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)
        if answer is not None:
            self._line.send(json.dumps(answer).encode("ascii"))
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
                return {}  # one that is gone, too: an interrupt may have lost that answer
            case "ping":
                return {}
            case "help":
                self._helping = self._look_out() if options["is_needed"] else None
                return None
            case "progress":
                self._progress()
                return None
        raise ValueError(f"{what!r} cannot be done. Use one release.")

    def _progress(self) -> None:
        try:
            if self._agent is not None:
                self._agent.progress()  # as far as it goes
        except AgentError:
            # A reader that died in the middle is one reason; the publisher hears of that itself.
            return


def main() -> None:
    """Run, with the socket as standard input."""
    # Whether to stop at a Ctrl-C is the trainer's decision, and the socket tells of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # UCX may end this process; a core file with the weights in it helps nobody.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ConnectionError):  # the publisher is gone, or does not want the answer
        Serving(socket.socket(fileno=0)).run()
    # The kernel gives everything back. Closing in good order would wait for readers.
    os._exit(0)
