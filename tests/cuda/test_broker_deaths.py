"""Descriptors between processes that are killed, stopped or forked at each step."""

import os
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from rl_bridge.cuda import broker as client
from rl_bridge.cuda import broker as server
from rl_bridge.cuda.broker import MAGIC, REQUEST, Broker, BrokerRef, fetch_fd, sweep_brokers
from rl_bridge.cuda.host import HostDriver
from rl_bridge.cuda.owners import Descriptor
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    SegmentError,
)
from rl_bridge.memory.segment import process_start_time
from rl_bridge.processes import close_fd
from rl_bridge.testing.processes import Child, until
from tests.cuda.publishers import (
    FOREVER_S,
    Publisher,
    connected,
    fetched,
    shown,
    soon,
)
from tests.helpers import forked, forking, open_fds, stop

# ---- processes that die -------------------------------------------------------------------------


def test_an_exporter_killed_between_sending_and_receiving_leaves_the_bytes(
    driver: HostDriver, root: Path
) -> None:
    with Child(Publisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))
        with connected(ref) as connection:
            connection.send(REQUEST.pack(MAGIC, bytes.fromhex(ref.token), 1))
            assert select.select([connection], [], [], FOREVER_S)[0], "the answer is on its way"
            publisher.kill()
            found = client._receive(connection, ref, 1, soon())
    assert found is not None
    assert shown(driver, *found) == {7}


def test_a_client_sees_that_the_broker_was_killed_while_it_waits(root: Path) -> None:
    before = open_fds()
    with Child(Publisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))
        stop(publisher.pid)  # the kernel still takes connections
        with connected(ref) as connection:
            client._check_peer(connection, ref)
            client._ask(connection, ref, 1, soon())
            publisher.kill()
            assert client._receive(connection, ref, 1, soon()) is None
        with pytest.raises(SegmentError, match="is gone or not visible"):
            fetch_fd(ref, 1, timeout_s=FOREVER_S)
    assert open_fds() == before


def test_a_broker_that_hangs_is_not_waited_for_beyond_the_deadline(root: Path) -> None:
    before = open_fds()
    with Child(Publisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))
        stop(publisher.pid)
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            fetch_fd(ref, 1, timeout_s=0.1)
        waiting = []
        with suppress(BlockingIOError):
            for _ in range(1000):  # until its queue is full, and connecting itself must wait
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(ref.path)
        assert len(waiting) < 1000
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            fetch_fd(ref, 1, timeout_s=0.1)
        for connection in waiting:
            connection.close()
        os.kill(publisher.pid, signal.SIGCONT)
        fd, _ = fetch_fd(ref, 1, timeout_s=FOREVER_S)
        close_fd(fd)
    assert len(open_fds()) == len(before)


def test_a_killed_publishers_directory_is_swept_by_the_next(root: Path) -> None:
    with Child(Publisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))
        assert sweep_brokers(root) == []
        publisher.kill()
    left = Path(ref.path).parent
    assert left.is_dir()
    with pytest.raises(SegmentError, match=r"is gone or not visible.*Publish again"):
        fetch_fd(ref, 1, timeout_s=FOREVER_S)
    made = Broker(root=root)
    assert [path.name for path in root.iterdir()] == [Path(made.ref.path).parent.name]
    made.close()


def test_only_dead_brokers_of_ours_are_swept(root: Path) -> None:
    dead = "rlb-broker-1-1-" + "0" * 16
    alive = f"rlb-broker-{os.getpid()}-{process_start_time(os.getpid())}-" + "0" * 16
    names = [dead, alive, "rlb-broker-1-1-" + "1" * 15, "rlb-broker-1-1-" + "1" * 17, "other"]
    for name in names:
        (root / name).mkdir()
    (root / dead / "s").touch()
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    link = root / ("rlb-broker-1-1-" + "2" * 16)
    link.symlink_to(elsewhere)
    (root / ("rlb-broker-1-1-" + "3" * 16)).touch()
    locked = root / ("rlb-broker-1-1-" + "4" * 16)
    locked.mkdir()
    fd = os.open(locked, os.O_RDONLY)
    assert server._try_lock(fd)
    assert sweep_brokers(root) == [dead]
    assert not (root / dead).exists()
    assert elsewhere.is_dir()
    os.close(fd)
    assert sweep_brokers(root) == [locked.name]


def test_another_users_directory_is_not_swept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = root / ("rlb-broker-1-1-" + "0" * 16)
    dead.mkdir()
    monkeypatch.setattr("rl_bridge.cuda.broker.os.geteuid", lambda: os.getuid() + 1)
    assert sweep_brokers(root) == []
    assert dead.is_dir()


@forking
def test_a_forked_child_serves_nothing_and_removes_nothing(
    driver: HostDriver, broker: Broker
) -> None:
    waiting = connected(broker.ref)
    until(lambda: broker._server._clients, what="the broker has the connection")
    server, targets = broker._server, open_fds()
    assert server._listener is not None
    serving = {targets[end.fileno()] for end in (server._listener, *server._clients)}
    assert len(serving) == 2

    def in_child() -> bool:
        # Other tests' sockets may be open as well: their garbage, not ours.
        there = set(open_fds().values())
        held = [target for target in there if "memfd" in target]
        broker.close()
        try:
            broker.offer(5, Descriptor(os.dup(0)), 1)
        except BridgeClosed:
            return not held and not there & serving and not broker.is_serving
        return False

    assert forked(in_child)
    waiting.close()
    assert broker.is_serving
    assert fetched(driver, broker) == {7}


@forking
def test_a_child_does_not_keep_clients_waiting_for_a_dead_publisher(root: Path) -> None:
    with Child(ForkingPublisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))
        grandchild = publisher.call("fork")
        try:
            publisher.kill()
            with pytest.raises(SegmentError, match="cannot be reached"):
                fetch_fd(ref, 1, timeout_s=FOREVER_S)
            assert sweep_brokers(root) == [Path(ref.path).parent.name]
        finally:
            os.kill(grandchild, signal.SIGKILL)


class ForkingPublisher(Publisher):
    """Has a child that outlives it."""

    def fork(self) -> int:
        ready, is_ready = os.pipe()
        pid = os.fork()
        if pid == 0:  # what it inherited of the broker is closed by now
            for fd, target in open_fds().items():
                if target.startswith("pipe:"):
                    os.close(fd)  # the test waits for these
            while True:
                signal.pause()
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)
        return pid
