"""Descriptors from a publisher to consumers: what is asked, what is served, what stays."""

import array
import errno
import gc
import os
import select
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge.cuda import broker as server
from rl_bridge.cuda.broker import ANSWER, MAGIC, REQUEST, Broker, BrokerRef, Status, fetch_fd
from rl_bridge.cuda.host import HostDriver
from rl_bridge.cuda.owners import Descriptor
from rl_bridge.errors import (
    BridgeClosed,
    SegmentError,
    TransportUnavailable,
)
from rl_bridge.testing.leaks import assert_nothing_leaks
from rl_bridge.testing.processes import Child, until
from tests.cuda.publishers import (
    FOREVER_S,
    Publisher,
    connected,
    fetched,
    shown,
)
from tests.cuda.rig import NBYTES, SMALL, filled
from tests.helpers import open_fds

# ---- the way of a descriptor --------------------------------------------------------------------


def test_a_descriptor_arrives_with_its_size(driver: HostDriver, broker: Broker) -> None:
    before = open_fds()
    fd, nbytes = fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
    assert nbytes == NBYTES
    assert os.get_inheritable(fd) is False
    assert shown(driver, fd, nbytes) == {7}
    until(lambda: open_fds() == before, what="both ends of the connection are closed")


def test_each_key_has_its_own_memory(driver: HostDriver, broker: Broker) -> None:
    other = filled(driver, 9, SMALL)
    broker.offer(2**64 - 1, other.export(), SMALL)
    assert shown(driver, *fetch_fd(broker.ref, 2**64 - 1, timeout_s=FOREVER_S)) == {9}
    assert fetched(driver, broker) == {7}
    other.close()


def test_a_withdrawn_descriptor_is_closed_and_refused(driver: HostDriver, broker: Broker) -> None:
    before = set(open_fds())
    fd, nbytes = fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
    broker.withdraw(1)
    broker.withdraw(1)
    until(lambda: len(before - set(open_fds())) == 1, what="what was offered is closed")
    with pytest.raises(SegmentError, match=r"refuses key 1: it was released\. Import"):
        fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
    assert shown(driver, fd, nbytes) == {7}


def test_a_closed_broker_offers_nothing_and_leaves_nothing(driver: HostDriver, root: Path) -> None:
    before = open_fds()
    made = Broker(root=root)
    allocation = filled(driver, 1)
    made.offer(1, allocation.export(), NBYTES)
    assert made.is_serving is True
    made.close()
    assert [made.is_serving] == [False]
    made.close()
    allocation.close()
    assert open_fds() == before
    assert list(root.iterdir()) == []
    with pytest.raises(SegmentError, match="cannot be reached"):
        fetch_fd(made.ref, 1, timeout_s=FOREVER_S)
    with pytest.raises(BridgeClosed, match="Make a new one"):
        made.offer(2, Descriptor(os.dup(0)), 1)


def test_a_broker_that_is_dropped_closes_itself(root: Path) -> None:
    before = open_fds()
    made = Broker(root=root)
    assert list(root.iterdir()) != []
    del made
    gc.collect()
    assert list(root.iterdir()) == []
    assert open_fds() == before


def test_a_program_that_just_ends_removes_its_directory(root: Path) -> None:
    code = (
        "import pathlib\n"
        "from rl_bridge.cuda.broker import Broker\n"
        f"kept = Broker(root=pathlib.Path({str(root)!r}))\n"
        "print(kept.ref.path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith(str(root))
    assert list(root.iterdir()) == []
    assert done.stderr == ""


def test_a_thousand_descriptors_grow_nothing(driver: HostDriver, root: Path) -> None:
    with Child(Publisher, root=str(root)) as publisher:
        ref = BrokerRef.model_validate(publisher.call("ref"))

        def cycle() -> None:
            assert shown(driver, *fetch_fd(ref, 1, timeout_s=FOREVER_S)) == {7}

        before = publisher.call("num_fds")
        assert_nothing_leaks(cycle, root, num_cycles=1000)
        until(lambda: publisher.call("num_fds") == before, what="its connections are closed")


# ---- clients that ask for what they may not -----------------------------------------------------

TOKEN = b"t" * 16
HOSTILE = {
    "nothing": (b"", Status.MALFORMED),
    "short": (b"x", Status.MALFORMED),
    "one byte short": (REQUEST.pack(MAGIC, TOKEN, 1)[:-1], Status.MALFORMED),
    "one byte long": (REQUEST.pack(MAGIC, TOKEN, 1) + b"x", Status.MALFORMED),
    "long": (b"x" * 60_000, Status.MALFORMED),
    "another magic": (REQUEST.pack(b"rlb2", TOKEN, 1), Status.MALFORMED),
    "another token": (REQUEST.pack(MAGIC, TOKEN, 1), Status.WRONG_TOKEN),
    "no token": (REQUEST.pack(MAGIC, bytes(16), 1), Status.WRONG_TOKEN),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_request_is_refused_and_the_next_one_is_served(
    driver: HostDriver, broker: Broker, kind: str
) -> None:
    request, status = HOSTILE[kind]
    with connected(broker.ref) as hostile:
        hostile.send(request)
        data, found, _, _ = hostile.recvmsg(100, 100)
        assert ANSWER.unpack(data) == (MAGIC, status, 0)
        assert found == []
        assert hostile.recv(1) == b"", "one request, one answer"
    assert fetched(driver, broker) == {7}


def test_a_token_of_which_one_bit_is_wrong_is_refused(broker: Broker) -> None:
    token = bytearray.fromhex(broker.ref.token)
    token[15] ^= 1
    ref = broker.ref.model_copy(update={"token": token.hex()})
    with pytest.raises(SegmentError, match=r"token is not its own.*Import its latest"):
        fetch_fd(ref, 1, timeout_s=FOREVER_S)


def test_descriptors_that_a_client_sends_are_not_taken(driver: HostDriver, broker: Broker) -> None:
    before = open_fds()
    with connected(broker.ref) as hostile:
        rights = array.array("i", [0] * 100)
        hostile.sendmsg([b"x" * 30], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert ANSWER.unpack(hostile.recv(100))[1] == Status.MALFORMED
    assert fetched(driver, broker) == {7}
    until(lambda: open_fds() == before, what="nothing that it sent is open here")


def test_silent_clients_do_not_keep_others_waiting(driver: HostDriver, broker: Broker) -> None:
    silent = [connected(broker.ref) for _ in range(3 * 4)]
    assert fetched(driver, broker) == {7}
    dropped = [one for one in silent if select.select([one], [], [], 0)[0]]
    assert len(dropped) >= len(silent) - 4, "those who wait longest made room"
    assert dropped == silent[: len(dropped)]
    for one in silent:
        one.close()


def test_a_silent_client_is_dropped_when_its_time_is_over(driver: HostDriver, root: Path) -> None:
    made = Broker(root=root, client_timeout_s=0.01)
    with connected(made.ref) as silent:
        assert silent.recv(1) == b""
    made.close()


def test_a_client_that_hangs_up_without_reading_is_no_trouble(
    driver: HostDriver, broker: Broker
) -> None:
    for _ in range(20):
        with connected(broker.ref) as rude:
            rude.send(REQUEST.pack(MAGIC, bytes.fromhex(broker.ref.token), 1))
    assert fetched(driver, broker) == {7}


def test_another_users_process_is_refused(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "may_talk", lambda _: False)
    with pytest.raises(SegmentError, match=r"expected .* of user|another user"):
        fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)


def test_the_directory_is_private(broker: Broker) -> None:
    folder = Path(broker.ref.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(broker.ref.token) == 32
    others = {broker.ref.token, Path(broker.ref.path).parent.name}
    again = Broker(root=folder.parent)
    assert not others & {again.ref.token, Path(again.ref.path).parent.name}
    again.close()


def test_a_publisher_without_descriptors_serves_again_when_it_has_some(
    driver: HostDriver, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = connected(broker.ref)
    until(lambda: broker._server._clients, what="the broker has the connection")
    listener = broker._server._listener
    assert listener is not None
    tries = []

    def accept() -> object:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return listener.accept()

    monkeypatch.setattr(
        broker._server, "_listener", SimpleNamespace(accept=accept, fileno=listener.fileno)
    )
    assert fetched(driver, broker) == {7}
    assert silent.recv(1) == b"", "it made room"
    silent.close()
    monkeypatch.undo()


# ---- places where no socket can be had ----------------------------------------------------------


def test_a_path_that_is_too_long_says_so(root: Path) -> None:
    deep = root / ("x" * 60)
    deep.mkdir()
    with pytest.raises(TransportUnavailable, match=r"more than 107 bytes.*shorter path"):
        Broker(root=deep)
    assert list(deep.iterdir()) == []


def test_a_missing_root_says_so(root: Path) -> None:
    before = open_fds()
    with pytest.raises(TransportUnavailable, match="no socket can be served in"):
        Broker(root=root / "absent")
    assert open_fds() == before


@pytest.mark.parametrize("what", ["socket.socket", "os.eventfd", "threading.Thread"])
def test_a_start_that_fails_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise (RuntimeError if "Thread" in what else OSError)("not here")

    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr(f"rl_bridge.cuda.broker.{what}", fail)
        with pytest.raises(TransportUnavailable, match="not here"):
            Broker(root=root)
    assert open_fds() == before
    assert list(root.iterdir()) == []


def test_without_a_root_a_private_place_is_found() -> None:
    made = Broker()
    folder = Path(made.ref.path).parent
    assert folder.stat().st_uid == os.geteuid()
    made.close()
    assert not folder.exists()
