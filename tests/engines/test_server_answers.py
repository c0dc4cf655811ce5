"""What a server answers that is no success: each gets the error that says what to do."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_bridge import DeadlineExceeded, EngineLost, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.integrations.vllm.server import ServerHandle


@contextmanager
def answering(status: int, text: str) -> Iterator[str]:
    """A server that answers everything alike; its URL."""

    class Alike(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
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
        handle = ServerHandle(url, 20)
        with pytest.raises(WeightBridgeError) as caught:
            handle.call("describe")
        handle.close()
    assert type(caught.value) is kind, caught.value
