"""What a server answers that is no success: each gets the error that says what to do.

And what a driver is short of while the server is well: nobody takes that for the engine's death.
"""

import errno
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from rl_bridge import EngineLost, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.engines.vllm.client import ServerClient
from rl_bridge.errors import DeadlineExceeded

WAIT_S = 20

TRICKLE = b'{"results": [{}]}' + 200 * b" "


def nothing(server: http.server.HTTPServer) -> None:
    """What most servers do while they are asked."""


@contextmanager
def answering(
    status: int, text: str, meanwhile: Callable[[http.server.HTTPServer], None] = nothing
) -> Iterator[str]:
    """A server that answers everything alike; its URL."""

    class Alike(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            meanwhile(server)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Alike) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(20)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (504, "upstream request timeout", DeadlineExceeded),
        (408, "", DeadlineExceeded),
        (500, '{"error": "RPC call to rl_bridge timed out."}', DeadlineExceeded),
        (500, "EngineDeadError", EngineLost),
        (500, "Method 'rl_bridge' is not implemented.", WeightBridgeUnavailableError),
        (500, "anything else", WeightBridgeUnavailableError),
    ],
)
def test_each_status_is_the_error_that_it_stands_for(
    status: int, text: str, kind: type[WeightBridgeError]
) -> None:
    with answering(status, text) as url:
        client = ServerClient(url, 20)
        with pytest.raises(WeightBridgeError) as caught:
            client.call("describe", {}, client.timeout_s)
        client.close()
    assert type(caught.value) is kind, caught.value


@pytest.mark.parametrize(
    "text",
    ["", "<html></html>", "[]", "null", '{"results": 5}', '{"results": []}', '{"results": [5]}'],
)
def test_an_answer_of_something_else_than_vllm_is_told_as_that(text: str) -> None:
    with answering(200, text) as url:
        client = ServerClient(url, WAIT_S)
        for ask in (
            lambda: client.call("describe", {}, client.timeout_s),
            client.replicas,
            client.is_paused,
        ):
            with pytest.raises(WeightBridgeUnavailableError, match="no vLLM server does"):
                ask()
        client.close()


def test_a_server_without_its_development_routes_says_which_variable_is_missing() -> None:
    with (
        answering(404, "") as url,
        closing(ServerClient(url, WAIT_S)) as client,
        pytest.raises(WeightBridgeUnavailableError, match="VLLM_SERVER_DEV_MODE=1"),
    ):
        client.call("describe", {}, client.timeout_s)


def exhausted(*_args: Any, **_kwargs: Any) -> socket.socket:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_driver_without_descriptors_does_not_take_a_living_server_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = threading.Event()

    def looks(*_args: Any, **_kwargs: Any) -> socket.socket:
        looked.set()
        return exhausted()

    def wait(_server: http.server.HTTPServer) -> None:
        monkeypatch.setattr(socket, "create_connection", looks)
        assert looked.wait(WAIT_S)

    with answering(200, '{"results": [{"ok": true}]}', wait) as url:
        client = ServerClient(url, WAIT_S)
        assert client.call("describe", {}, client.timeout_s) == [{"ok": True}]
        client.close()


def test_a_server_that_refuses_connections_in_the_middle_of_a_call_is_dead() -> None:
    told = threading.Event()

    def shut(server: http.server.HTTPServer) -> None:
        server.socket.shutdown(socket.SHUT_RDWR)
        assert told.wait(WAIT_S)

    with answering(200, "{}", shut) as url:
        client = ServerClient(url, WAIT_S)
        with pytest.raises(EngineLost, match="its engine ended"):
            client.call("describe", {}, client.timeout_s)
        told.set()
        client.close()


def test_a_connection_that_could_not_be_opened_for_a_shortage_is_no_lost_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "create_connection", exhausted)
    with (
        closing(ServerClient("http://127.0.0.1:9", WAIT_S)) as client,
        pytest.raises(WeightBridgeUnavailableError, match=r"could not be sent: .*Close files"),
    ):
        client.call("describe", {}, client.timeout_s)


def test_a_server_that_answers_by_the_byte_is_not_waited_for_beyond_the_deadline() -> None:
    """Each byte comes in time: it is the whole that must."""
    is_over, served = threading.Event(), threading.Event()

    class Trickling(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(TRICKLE)))
            self.end_headers()
            for byte in TRICKLE:
                self.wfile.write(bytes([byte]))
                if is_over.wait(0.05):
                    break
            served.set()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = ServerClient(f"http://127.0.0.1:{server.server_port}", 0.5)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
            client.call("describe", {}, client.timeout_s)
        assert not served.is_set(), "it was waited for to its end"
        is_over.set()
        server.shutdown()
        client.close()
