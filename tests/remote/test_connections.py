"""Connections as a stranger makes them: by hand, unfinished, endless, and many of them."""

import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from rl_bridge import TensorBridge
from rl_bridge.errors import EngineLost, WeightBridgeUnavailableError
from rl_bridge.remote import RemoteEngine, SidecarConfig
from rl_bridge.remote.signing import read_key
from rl_bridge.testing.processes import DEADLINE_S, until
from tests.helpers import weights
from tests.remote.engines import BEGUN, DEATH
from tests.remote.process import SidecarProcess, make_key

MEBIBYTE = 1024 * 1024
IN_TIME_S = SidecarConfig().body_timeout_s / 2
"""A client that has to wait for the end of another connection does not get its answer in time."""
END = b"connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One that waits for few, and not for long."""
    directory = tmp_path_factory.mktemp("hasty")
    made = SidecarProcess(directory, make_key(directory))
    made.start(body_timeout_s=2, max_connections=4)
    yield made
    made.stop()
    assert not made.is_alive


def connected(sidecar: SidecarProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", sidecar.port), DEADLINE_S)


def rest(link: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = bytearray()
    with suppress(ConnectionError):
        while part := link.recv(65536):
            found += part
    return bytes(found)


def asked(sidecar: SidecarProcess, request: bytes) -> bytes:
    with connected(sidecar) as link, suppress(ConnectionError):
        link.sendall(request)
        return rest(link)
    return b""


def problem(answer: bytes, status: int) -> dict[str, Any]:
    """The answer, which must be a problem document."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert b"content-type: application/problem+json" in head
    found: dict[str, Any] = json.loads(body)
    assert found["status"] == status
    return found


BEGUN_HEAD = b"GET /status HTTP/1.1\r\nhost: x\r\nauthoriz"


def test_a_connection_on_which_nothing_is_asked_is_told_so_and_ends(hasty: SidecarProcess) -> None:
    with ExitStack() as held:
        links = [held.enter_context(connected(hasty)) for _ in range(4)]
        for link in links[2:]:
            link.sendall(BEGUN_HEAD)
        for link in links:
            assert "no request came within 2 s" in problem(rest(link), 408)["detail"]


def test_a_connection_on_which_nothing_more_is_asked_ends(hasty: SidecarProcess) -> None:
    with connected(hasty) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        answers = rest(link)
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1 ") == 2


def test_a_body_that_goes_on_after_its_refusal_ends(hasty: SidecarProcess) -> None:
    with connected(hasty) as link:
        link.sendall(b"POST /updates HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 401 ")
        link.sendall(b"x")  # so that it does not look idle
        rest(link)


def test_a_refusal_is_not_lost_because_its_request_goes_on(shared: SidecarProcess) -> None:
    with connected(shared) as link:
        link.sendall(b"POST /updates HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
        problem(rest(link), 401)
        for _ in range(9):  # a connection that is closed in full would be reset by the first
            link.sendall(b"x" * 9999)


def body_to_come(sidecar: SidecarProcess, nbytes: int = 999) -> bytes:
    """A request as far as its head, with all that can be checked of it before its body is there."""
    given = read_key(sidecar.key_file).sign("POST", "/updates", b"", time=int(time.time()))
    head = f"POST /updates HTTP/1.1\r\nhost: x\r\nauthorization: {given.header()}\r\n"
    return f"{head}content-length: {nbytes}\r\n\r\n".encode()


FLOODS: dict[str, Callable[[SidecarProcess], bytes]] = {
    "nothing": lambda _: b"",
    "half a head": lambda _: BEGUN_HEAD,
    "a head without its body": body_to_come,
    "one request": lambda _: b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "requests whose answers are not read": lambda _: (
        b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_client_is_served_at_once_whoever_else_holds_connections(
    flood: str, shared: SidecarProcess
) -> None:
    said = FLOODS[flood](shared)
    with ExitStack() as held, shared.client(timeout_s=IN_TIME_S) as engine:
        for number in range(2 * SidecarConfig().max_connections + 1):
            link = held.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", shared.port))
            link.sendall(said)
            if number % 8 == 0:
                assert engine.status().transport == "shared-memory"


def is_gone(engine: RemoteEngine) -> bool:
    try:
        engine.status()
    except EngineLost:
        return True
    except WeightBridgeUnavailableError:
        return False
    return False


def test_a_connection_that_is_served_is_kept_when_others_come_and_when_the_process_ends(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("waiting", max_connections=1)
    manifest = trainer.publish(weights(1), weight_version=1)
    with (
        ExitStack() as held,
        sidecar.client() as engine,
        sidecar.client() as other,
        ThreadPoolExecutor() as threads,
    ):
        updated = threads.submit(engine.update_weights, manifest)
        until((sidecar.directory / BEGUN).exists, what="the commit has begun")
        assert asked(sidecar, b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n").startswith(
            b"HTTP/1.1 503 "
        )
        for _ in range(3):
            held.enter_context(connected(sidecar))
            with pytest.raises(WeightBridgeUnavailableError, match="as many connections as it may"):
                other.status()
        os.kill(sidecar.pid, signal.SIGTERM)
        until(lambda: is_gone(other), what="nobody else is let in")
        (sidecar.directory / DEATH).touch()
        assert updated.result(DEADLINE_S).root == manifest.root
        sidecar.died()


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    "no host": b"GET /status HTTP/1.1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
    "a line break": b"GET /sta\ntus HTTP/1.1\r\nhost: x\r\n\r\n",
    "a head without an end": b"GET /status HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_a_problem_document(name: str, shared: SidecarProcess) -> None:
    assert "Expected HTTP/1.1" in problem(asked(shared, MALFORMED[name]), 400)["detail"]


HEALTHZ = b" /healthz HTTP/1.1\r\nhost: x\r\n"
SPOKEN = {
    "a head alone": (b"HEAD" + HEALTHZ + END, rb"HTTP/1.1 405 [^{]*\r\n\r\n"),
    "an older version": (b"GET /healthz HTTP/1.0\r\n\r\n", rb"HTTP/1.1 200 .*}"),
    "one after the other": (
        b"GET" + HEALTHZ + b"\r\nGET" + HEALTHZ + END,
        rb"HTTP/1.1 200 .*}HTTP/1.1 200 .*}",
    ),
    "a body in chunks": (
        b"GET" + HEALTHZ + b"transfer-encoding: chunked\r\n" + END + b"2\r\n{}\r\n0\r\n\r\n",
        rb"HTTP/1.1 200 .*}",
    ),
    "chunks that are none": (
        b"GET" + HEALTHZ + b"transfer-encoding: chunked\r\n" + END + b"x\r\n",
        rb"HTTP/1.1 400 .*went away.*}",
    ),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_http_is_spoken_with(name: str, shared: SidecarProcess) -> None:
    said, expected = SPOKEN[name]
    assert re.fullmatch(expected, asked(shared, said), re.DOTALL)


def test_a_body_that_waits_to_be_asked_for_is_asked_for(shared: SidecarProcess) -> None:
    with connected(shared) as link:
        link.sendall(b"GET" + HEALTHZ + b"content-length: 2\r\nexpect: 100-continue\r\n" + END)
        assert link.recv(65536).startswith(b"HTTP/1.1 100 ")
        link.sendall(b"{}")
        assert rest(link).startswith(b"HTTP/1.1 200 ")


def test_strangers_write_no_lines_of_their_own_into_the_log(shared: SidecarProcess) -> None:
    target = b"/x%0AERROR%20version%207%20is%20torn%1b[31m"
    problem(asked(shared, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n" + END), 401)
    log = shared.log.read_text()
    assert target.decode() in log
    assert "\nERROR version" not in log
    assert "\x1b[31m" not in log


def test_no_answer_sends_a_client_elsewhere(shared: SidecarProcess) -> None:
    signed = read_key(shared.key_file).sign("GET", "/status/", b"", time=int(time.time()))
    head = f"GET /status/ HTTP/1.1\r\nhost: evil\r\nauthorization: {signed.header()}\r\n"
    answer = asked(shared, head.encode() + END)
    problem(answer, 404)
    assert b"evil" not in answer


def test_bodies_of_strangers_fill_no_memory(shared: SidecarProcess) -> None:
    """Their form and time are right; that their signature is not will show at their ends."""
    most = SidecarConfig().max_body_nbytes
    part = b" " * MEBIBYTE
    with ExitStack() as held:
        links = [held.enter_context(connected(shared)) for _ in range(3)]
        for link in links:
            with suppress(ConnectionError):
                link.sendall(body_to_come(shared, most))
                for _ in range(most // MEBIBYTE - 4):
                    link.sendall(part)
        ready, _, _ = select.select(links, [], [], DEADLINE_S)
        assert ready == [links[0]]  # it began first
        assert "coming in at once" in problem(rest(ready[0]), 503)["detail"]


def test_a_body_in_tiny_chunks_keeps_nobody_waiting(shared: SidecarProcess) -> None:
    head = body_to_come(shared).replace(b"content-length: 999", b"transfer-encoding: chunked")
    with connected(shared) as link, shared.client(timeout_s=IN_TIME_S) as engine:
        link.sendall(head)
        with suppress(ConnectionError):  # it is too large in the end
            for _ in range(40):
                link.sendall(b"1\r\nx\r\n" * 10_000)
                assert engine.status().transport == "shared-memory"


def test_a_client_is_served_at_once_whoever_else_sends_bodies(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    most = SidecarConfig().max_body_nbytes
    with ExitStack() as held, shared.client(timeout_s=IN_TIME_S) as engine:
        for _ in range(2):
            link = held.enter_context(connected(shared))
            link.sendall(body_to_come(shared, most) + b" " * (most - 1))
        manifest = trainer.publish(weights(1), weight_version=1)
        assert engine.import_weights(manifest).stage == "imported"
