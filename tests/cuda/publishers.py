"""Ends of a broker in processes of their own, and a client that says what it likes."""

import array
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_bridge.cuda.broker import Broker, BrokerRef, fetch_fd
from rl_bridge.cuda.host import HostDriver
from rl_bridge.cuda.owners import AddressRange, Allocation
from tests.cuda.rig import NBYTES, SMALL, filled, peek
from tests.helpers import open_fds

__all__ = [
    "FOREVER_S",
    "FakeBroker",
    "Publisher",
    "connected",
    "fetched",
    "offering",
    "short_folder",
    "shown",
    "soon",
]

FOREVER_S = 20.0


def soon() -> float:
    """The deadline of a wait that should not come to it."""
    return time.monotonic() + FOREVER_S


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's, which pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as name:
        yield Path(name)


@contextmanager
def offering(driver: HostDriver, root: Path) -> Iterator[Broker]:
    """A broker that offers memory full of 7 under key 1, to a few clients at a time."""
    made = Broker(root=root, max_clients=4, client_timeout_s=FOREVER_S)
    allocation = filled(driver, 7)
    made.offer(1, allocation.export(), NBYTES)
    try:
        yield made
    finally:
        made.close()
        allocation.close()


def fetched(driver: HostDriver, broker: Broker) -> set[int]:
    """Which bytes lie in what is under key 1."""
    return shown(driver, *fetch_fd(broker.ref, 1, timeout_s=FOREVER_S))


def shown(driver: HostDriver, fd: int, nbytes: int) -> set[int]:
    """Which bytes lie in received memory; takes `fd`."""
    received = Allocation.received(driver, fd, nbytes)
    window = AddressRange(driver, nbytes)
    window.map(received, writable=False)
    found = peek(window.address, nbytes)
    window.close()
    received.close()
    return found


class Publisher:
    """Offers memory full of 7 under key 1."""

    def __init__(self, root: str) -> None:
        self.driver = HostDriver(granularity=SMALL)
        self.allocation = filled(self.driver, 7)
        self.broker = Broker(root=Path(root))
        self.broker.offer(1, self.allocation.export(), self.allocation.nbytes)

    def ref(self) -> dict[str, Any]:
        return self.broker.ref.model_dump()

    def num_fds(self) -> int:
        return len(open_fds())


def connected(ref: BrokerRef) -> socket.socket:
    """A connection of a client that says what it likes."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(ref.path)
    client.settimeout(FOREVER_S)
    return client


class FakeBroker:
    """Answers each request with given bytes and descriptors, from this process."""

    def __init__(self, folder: Path, data: bytes, num_fds: int) -> None:
        self.path = folder / "fake"
        self._answer = data
        self._fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(num_fds)]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(20)
        self._listener.bind(str(self.path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client:
            client.settimeout(20)
            client.recv(100)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))]
            client.sendmsg([self._answer], rights if self._fds else [])

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()
        for fd in self._fds:
            os.close(fd)
