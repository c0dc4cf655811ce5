"""Servers close connections that idle, at a moment of their own: no request may fall into it."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_bridge.engines.sglang.client import ServerClient as SGLangServer
from rl_bridge.engines.vllm.client import ServerClient as VLLMServer
from rl_bridge.errors import SignatureRefused
from rl_bridge.remote import RemoteEngine
from tests.remote.process import make_key

WAIT_S = 30
ANSWER = {"is_paused": False, "weight_version": "1", "model_path": "here"}


class Closing(http.server.BaseHTTPRequestHandler):
    """Offers to keep a connection, and closes it when the next request arrives on it."""

    protocol_version = "HTTP/1.1"
    is_used = False

    def do_GET(self) -> None:
        if self.is_used:
            self.close_connection = True
            return
        self.is_used = True
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(WAIT_S)


def ask_vllm(url: str, _home: Path) -> Callable[[], object]:
    return VLLMServer(url, WAIT_S).is_paused


def ask_sglang(url: str, _home: Path) -> Callable[[], object]:
    return SGLangServer(url, WAIT_S).label


def ask_sidecar(url: str, home: Path) -> Callable[[], object]:
    engine = RemoteEngine(url, make_key(home), timeout_s=WAIT_S)

    def ask() -> None:
        with pytest.raises(SignatureRefused):  # it is none: but it answered
            engine.status()

    return ask


@pytest.mark.parametrize("make", [ask_vllm, ask_sglang, ask_sidecar])
def test_a_request_goes_over_a_connection_of_its_own(
    make: Callable[[str, Path], Callable[[], object]], url: str, tmp_path: Path
) -> None:
    ask = make(url, tmp_path)
    for _ in range(3):
        ask()
