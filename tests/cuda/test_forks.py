"""Children that are forked at any moment: they have nothing of what is shared in descriptors."""

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import processes
from rl_bridge.cuda.broker import Broker, fetch_fd, sweep_brokers
from rl_bridge.cuda.host import HostDriver
from rl_bridge.cuda.owners import Allocation
from rl_bridge.processes import close_fd
from rl_bridge.testing.processes import until
from tests.cuda.publishers import FOREVER_S, connected
from tests.cuda.rig import SMALL
from tests.helpers import forked, forking


class Watch:
    """Notes what was opened, and whether another thread could have forked right behind it."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.gaps = 0

    def opened(self, fd: int) -> int:
        thread = threading.Thread(target=self._try)
        thread.start()
        thread.join(FOREVER_S)
        self.fds.append(fd)
        return fd

    def _try(self) -> None:
        if processes._FORKS.acquire(blocking=False):
            processes._FORKS.release()
            self.gaps += 1

    def around(self, function: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, **kwargs: self.opened(function(*args, **kwargs))

    def is_kept_by_a_child(self) -> bool:
        def is_gone() -> bool:
            return not any(_is_open(fd) for fd in self.fds)

        assert self.fds
        assert all(_is_open(fd) for fd in self.fds)
        return self.gaps > 0 or not forked(is_gone)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def sockets(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every socket is noted as it is made, and every connection as it is accepted."""

    class Watched(socket.socket):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watch.opened(self.fileno())

    with monkeypatch.context() as patch:
        patch.setattr("socket.socket", Watched)
        yield


@forking
def test_a_forked_child_keeps_no_new_memory(
    driver: HostDriver, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.host.os.memfd_create", watch.around(os.memfd_create))
        handle = driver.create(SMALL)
    assert not watch.is_kept_by_a_child()
    driver.release(handle)


@forking
def test_a_forked_child_keeps_no_exported_or_imported_descriptor(
    driver: HostDriver, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def watched(fd: int, command: int, *rest: Any) -> Any:
        found = real(fd, command, *rest)
        return watch.opened(found) if command == fcntl.F_DUPFD_CLOEXEC else found

    handle = driver.create(SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.host.fcntl.fcntl", watched)
        fd = driver.export_fd(handle)
        imported = driver.import_fd(fd, SMALL)
    assert len(watch.fds) == 2
    assert not watch.is_kept_by_a_child()
    close_fd(fd)
    driver.release(imported)
    driver.release(handle)


@forking
def test_a_forked_child_keeps_no_descriptor_of_a_broker(
    root: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, sockets: None
) -> None:
    real = os.open

    def watched(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        found = real(path, flags, *rest, **options)
        return watch.opened(found) if flags & os.O_DIRECTORY else found

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.broker.os.eventfd", watch.around(os.eventfd))
        patch.setattr("rl_bridge.cuda.broker.os.open", watched)
        broker = Broker(root=root)
    assert len(watch.fds) == 3
    assert not watch.is_kept_by_a_child()
    broker.close()


@forking
def test_a_forked_child_keeps_no_connection(
    broker: Broker, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener: Any = broker._server._listener

    class Accepting:
        def accept(self) -> Any:
            client, address = listener.accept()
            watch.opened(client.fileno())
            return client, address

        def fileno(self) -> int:
            return int(listener.fileno())

        def close(self) -> None:
            listener.close()

    with monkeypatch.context() as patch:
        patch.setattr(broker._server, "_listener", Accepting())
        with connected(broker.ref):
            until(lambda: broker._server._clients, what="the broker has the connection")
            assert not watch.is_kept_by_a_child()


@forking
def test_a_forked_child_keeps_no_fetched_descriptor(
    broker: Broker, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Receiving(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            watch.fds.append(self.fileno())
            assert not watch.is_kept_by_a_child(), "the connection"
            watch.fds.clear()
            made.append(self)

        def recvmsg(self, *args: Any) -> Any:
            found = super().recvmsg(*args)
            watch.opened(int.from_bytes(found[1][0][2], "little"))
            return found

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.broker.socket.socket", Receiving)
        fd, _ = fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
    assert (made[0].fileno(), watch.fds) == (-1, [fd])
    assert not watch.is_kept_by_a_child()
    close_fd(fd)


@forking
def test_a_forked_child_keeps_no_descriptor_of_a_sweep(
    root: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / ("rlb-broker-1-1-" + "0" * 16)).mkdir()
    kept: list[bool] = []

    def look(fd: int) -> bool:
        watch.fds.append(fd)
        kept.append(watch.is_kept_by_a_child())
        return True

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.cuda.broker._try_lock", look)
        assert len(sweep_brokers(root)) == 1
    assert kept == [False]


def test_an_export_of_memory_does_not_keep_forks_waiting_for_the_drivers_lock() -> None:
    driver = HostDriver()
    allocation = Allocation.create(driver, driver.granularity())
    exported = threading.Event()

    def export() -> None:
        allocation.export().close()
        exported.set()

    thread = threading.Thread(target=export)
    with driver._lock:  # a collection in here may come to close_fd
        thread.start()
        assert not exported.wait(0.1)
        is_free = processes._FORKS.acquire(timeout=5.0)
        if is_free:
            processes._FORKS.release()
    thread.join(FOREVER_S)
    assert is_free
    assert exported.is_set()
    allocation.close()
