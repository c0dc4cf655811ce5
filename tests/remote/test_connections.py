"""Connections as a stranger makes them: by hand, unfinished, endless, and many of them."""

import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.remote import SidecarConfig
from rl_bridge.remote.signing import read_key
from rl_bridge.testing.processes import DEADLINE_S, until
from tests.remote.process import SidecarProcess, make_key

MEBIBYTE = 1024 * 1024
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


def serves(sidecar: SidecarProcess) -> bool:
    with sidecar.client() as engine:
        try:
            return engine.status().transport == "shared-memory"
        except WeightBridgeError:
            return False


def test_idle_connections_do_not_keep_others_out(hasty: SidecarProcess) -> None:
    with ExitStack() as held:
        silent, begun = ([held.enter_context(connected(hasty)) for _ in range(4)] for _ in "ab")
        for link in begun:
            link.sendall(b"GET /status HTTP/1.1\r\nhost: x\r\nauthoriz")
        until(lambda: serves(hasty), what="the side-car serves others")
        for link in (*silent, *begun):
            assert "no request came within 2 s" in problem(rest(link), 408)["detail"]


def test_a_body_that_goes_on_after_its_refusal_ends(hasty: SidecarProcess) -> None:
    until(lambda: serves(hasty), what="others are gone")
    with connected(hasty) as link:
        link.sendall(b"POST /updates HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 401 ")
        link.sendall(b"x")  # so that it does not look idle
        rest(link)


def test_clients_that_read_no_answers_do_not_keep_others_out(hasty: SidecarProcess) -> None:
    until(lambda: serves(hasty), what="others are gone")
    with ExitStack() as held:
        for _ in range(4):
            link = held.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", hasty.port))
            link.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
        until(lambda: serves(hasty), what="the side-car serves others")


def test_more_connections_than_allowed_are_told_so(shared: SidecarProcess) -> None:
    with ExitStack() as held:
        for _ in range(SidecarConfig().max_connections):
            held.enter_context(connected(shared))
        with (
            shared.client() as engine,
            pytest.raises(WeightBridgeUnavailableError, match="as many connections as it may"),
        ):
            engine.status()
        problem(asked(shared, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"), 503)
    until(lambda: serves(shared), what="the side-car serves others")


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
    header = read_key(shared.key_file).sign("POST", "/updates", b"", time=int(time.time())).header()
    head = f"POST /updates HTTP/1.1\r\nhost: x\r\nauthorization: {header}\r\n"
    part = b" " * MEBIBYTE
    with ExitStack() as held:
        links = [held.enter_context(connected(shared)) for _ in range(3)]
        for link in links:
            with suppress(ConnectionError):
                link.sendall(f"{head}content-length: {most}\r\n\r\n".encode())
                for _ in range(most // MEBIBYTE - 4):
                    link.sendall(part)
        ready, _, _ = select.select(links, [], [], DEADLINE_S)
        assert "coming in at once" in problem(rest(ready[0]), 503)["detail"]
    until(lambda: serves(shared), what="the side-car serves others")
