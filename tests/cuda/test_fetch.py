"""A consumer that asks for a descriptor: what it is told may be wrong in every way."""

import errno
import os
import select
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rl_bridge.cuda import broker as client
from rl_bridge.cuda.broker import ANSWER, MAGIC, Broker, BrokerRef, Status, fetch_fd
from rl_bridge.cuda.host import HostDriver
from rl_bridge.errors import (
    DeadlineExceeded,
    SegmentError,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.segment import process_start_time
from rl_bridge.testing.processes import until
from tests.cuda.publishers import (
    FOREVER_S,
    FakeBroker,
    connected,
    shown,
    soon,
)
from tests.cuda.rig import NBYTES
from tests.helpers import open_fds

# ---- references that come from anywhere ---------------------------------------------------------

GOOD: dict[str, Any] = {"path": "/run/x/socket", "token": "0" * 32, "pid": 1, "start_time": 0}
BAD: dict[str, dict[str, Any]] = {
    "a relative path": {"path": "socket"},
    "an empty path": {"path": ""},
    "an abstract name": {"path": "\0socket"},
    "a zero byte": {"path": "/run/x\0/socket"},
    "a long path": {"path": "/" + "x" * 107},
    "a long path in bytes": {"path": "/" + "é" * 54},
    "a way up": {"path": "/run/../etc/socket"},
    "no text": {"path": "/\ud800"},
    "a path that is none": {"path": 5},
    "a short token": {"token": "0" * 31},
    "a long token": {"token": "0" * 33},
    "a token with an end": {"token": "0" * 32 + "\n"},
    "a token in capitals": {"token": "A" * 32},
    "a pid of 0": {"pid": 0},
    "a pid below 0": {"pid": -1},
    "a large pid": {"pid": 2**31},
    "a pid in text": {"pid": "1"},
    "a pid that is true": {"pid": True},
    "a time below 0": {"start_time": -1},
    "a large time": {"start_time": 2**63},
    "another field": {"uid": 0},
}


def test_a_good_reference_is_taken_and_frozen() -> None:
    ref = BrokerRef.model_validate(GOOD)
    assert BrokerRef.model_validate(ref.model_dump()) == ref
    with pytest.raises(ValidationError, match="frozen"):
        ref.pid = 2  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reference_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError):
        BrokerRef.model_validate(GOOD | BAD[kind])


@pytest.mark.parametrize("field", ["pid", "start_time"])
def test_another_process_at_the_path_is_not_asked(broker: Broker, field: str) -> None:
    wrong = broker.ref.model_copy(update={field: getattr(broker.ref, field) + 1})
    with pytest.raises(SegmentError, match=r"belongs to process .*; expected"):
        fetch_fd(wrong, 1, timeout_s=FOREVER_S)


def test_another_users_socket_is_not_asked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "may_talk", lambda _: False)
    with pytest.raises(SegmentError, match="belongs to process"):
        fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)


@pytest.mark.parametrize("kind", ["file", "directory", "fifo", "stream", "absent"])
def test_a_path_that_is_no_broker_is_refused(root: Path, kind: str) -> None:
    path = root / "it"
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if kind == "file":
        path.touch()
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "stream":
        stream.bind(str(path))
        stream.listen(1)
    before = open_fds()
    with pytest.raises(SegmentError, match="cannot be reached"):
        fetch_fd(BrokerRef(**GOOD | {"path": str(path)}), 1, timeout_s=FOREVER_S)
    assert open_fds() == before
    stream.close()


OK = ANSWER.pack(MAGIC, Status.SERVED, NBYTES)
ANSWERS = {
    "no descriptor": (OK, 0, "sent 0 descriptors"),
    "two descriptors": (OK, 2, "sent 1 descriptors"),
    "a descriptor with a refusal": (
        ANSWER.pack(MAGIC, Status.UNKNOWN_KEY, 0),
        1,
        "it was released",
    ),
    "no size": (ANSWER.pack(MAGIC, Status.SERVED, 0), 1, "for 0 bytes"),
    "a size beyond 63 bits": (ANSWER.pack(MAGIC, Status.SERVED, 2**63), 1, "descriptors for 9"),
    "another magic": (ANSWER.pack(b"rlb2", Status.SERVED, NBYTES), 1, "something else"),
    "an unknown status": (ANSWER.pack(MAGIC, 99, NBYTES), 1, "something else"),
    "a short answer": (OK[:-1], 1, "something else"),
    "a long answer": (OK + b"x", 1, "something else"),
    "a very long answer": (OK + b"x" * 1000, 1, "something else"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_bad_answer_is_refused_and_its_descriptors_are_closed(root: Path, kind: str) -> None:
    data, num_fds, told = ANSWERS[kind]
    fake = FakeBroker(root, data, num_fds)
    pid = os.getpid()
    ref = BrokerRef(
        **GOOD | {"path": str(fake.path), "pid": pid, "start_time": process_start_time(pid) or 0}
    )
    before = open_fds()
    with pytest.raises(SegmentError, match=told):
        fetch_fd(ref, 1, timeout_s=FOREVER_S)
    fake.close()
    assert set(open_fds()) <= set(before)


def dropping(broker: Broker, monkeypatch: pytest.MonkeyPatch, times: float) -> list[int]:
    """The broker hangs up on the first of its clients, as it does in a crowd."""
    dropped: list[int] = []
    server = broker._server
    answer = server._answer

    def crowded(one: socket.socket) -> None:
        if len(dropped) < times:
            dropped.append(one.fileno())
            server._drop(one)
        else:
            answer(one)

    monkeypatch.setattr(server, "_answer", crowded)
    return dropped


def test_a_client_that_is_dropped_in_a_crowd_asks_again(
    driver: HostDriver, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = dropping(broker, monkeypatch, 3)
    assert shown(driver, *fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)) == {7}
    assert len(dropped) == 3


def test_a_client_that_is_always_dropped_gives_up_in_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    dropped = dropping(broker, monkeypatch, float("inf"))
    with pytest.raises(DeadlineExceeded, match="did not answer in time"):
        fetch_fd(broker.ref, 1, timeout_s=0.1)
    assert dropped
    until(lambda: open_fds() == before, what="both ends of the connections are closed")


def test_a_receiver_without_descriptors_says_so(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection = connected(broker.ref)
    client._ask(connection, broker.ref, 1, soon())
    assert select.select([connection], [], [], FOREVER_S)[0]
    highest = max(open_fds())
    fillers: list[int] = []
    while not fillers or fillers[-1] < highest:
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1, hard))
    try:
        with pytest.raises(WeightBridgeUnavailableError, match="no descriptor left"):
            client._receive(connection, broker.ref, 1, soon())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    connection.close()


def test_a_client_without_sockets_says_so(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: int) -> Any:
        def call(*_: object) -> object:
            raise OSError(code, os.strerror(code))

        return call

    monkeypatch.setattr("rl_bridge.cuda.broker.socket.socket", fail(errno.EAFNOSUPPORT))
    with pytest.raises(TransportUnavailable, match="Let the sandbox allow AF_UNIX"):
        fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
    monkeypatch.setattr("rl_bridge.cuda.broker.socket.socket", fail(errno.EMFILE))
    with pytest.raises(WeightBridgeUnavailableError, match="Free some and try again"):
        fetch_fd(broker.ref, 1, timeout_s=FOREVER_S)
