"""What a stranger, a thief of requests or a careless client sends: 4xx, and nothing is touched."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rl_bridge import TensorBridge
from rl_bridge.errors import SignatureRefused, WeightBridgeUnavailableError
from rl_bridge.remote import RemoteEngine
from rl_bridge.remote.signing import ANSWER_HEADER, Credentials, Key, read_key
from tests.helpers import weights
from tests.remote.process import SidecarProcess

ID = "0" * 32


class Sender:
    """Signs like the client, but for what a test changes."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.url = sidecar.url
        self.key = read_key(sidecar.key_file)
        self.http = httpx.Client(trust_env=False, timeout=30)

    def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        signed: tuple[str, str, bytes] | None = None,
        key: Key | None = None,
        at: float | None = None,
        change: Callable[[Credentials], Credentials] = lambda given: given,
    ) -> httpx.Response:
        what = signed or (method, path, body)
        when = int(time.time() if at is None else at)
        given = change((key or self.key).sign(*what, time=when))
        return self.raw(method, path, body, given.header())

    def raw(self, method: str, path: str, body: bytes, header: str | None) -> httpx.Response:
        headers = {b"content-type": b"application/json"}
        if header is not None:
            headers[b"authorization"] = header.encode("latin-1")
        return self.http.request(method, self.url + path, content=body, headers=headers)


@pytest.fixture
def sender(shared: SidecarProcess) -> Iterator[Sender]:
    made = Sender(shared)
    yield made
    made.http.close()


def problem(response: httpx.Response, status: int, *said: str) -> dict[str, Any]:
    """The response, which must be a problem document that says these things."""
    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "application/problem+json",
    ), response.text
    found: dict[str, Any] = response.json()
    assert found["status"] == status
    for words in said:
        assert words in found["detail"]
    return found


FORGED: dict[str, Callable[[Sender], httpx.Response]] = {
    "no signature": lambda sender: sender.raw("GET", "/status", b"", None),
    "another scheme": lambda sender: sender.raw("GET", "/status", b"", "Bearer abc"),
    "bytes that are no text": lambda sender: sender.raw("GET", "/status", b"", "\xff\xfe"),
    "another key": lambda sender: sender.send("GET", "/status", key=Key(b"x" * 32)),
    "another method": lambda sender: sender.send(
        "POST", f"/updates/{ID}/abort", signed=("GET", f"/updates/{ID}/abort", b"")
    ),
    "another path": lambda sender: sender.send("GET", "/status", signed=("GET", "/metrics", b"")),
    "another query": lambda sender: sender.send(
        "GET", "/status?a=1", signed=("GET", "/status", b"")
    ),
    "another body": lambda sender: sender.send(
        "POST", "/updates", b"{}", signed=("POST", "/updates", b"[]")
    ),
    "another time": lambda sender: sender.send(
        "GET",
        "/status",
        change=lambda given: Credentials(
            time=given.time - 1, nonce=given.nonce, signature=given.signature
        ),
    ),
    "another nonce": lambda sender: sender.send(
        "GET",
        "/status",
        change=lambda given: Credentials(
            time=given.time, nonce="f" * 32, signature=given.signature
        ),
    ),
    "an old time": lambda sender: sender.send("GET", "/status", at=time.time() - 40),
    "a time to come": lambda sender: sender.send("GET", "/status", at=time.time() + 40),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_request_is_refused_with(forged: str, sender: Sender) -> None:
    response = FORGED[forged](sender)
    found = problem(response, 401, "expected")
    assert found["error"] == "SignatureRefused"
    assert response.headers["www-authenticate"] == "RLB-HMAC-SHA256"
    assert ANSWER_HEADER not in response.headers


def test_a_request_is_answered_once(sender: Sender) -> None:
    header = sender.key.sign("GET", "/status", b"", time=int(time.time())).header()
    assert sender.raw("GET", "/status", b"", header).status_code == 200
    problem(sender.raw("GET", "/status", b"", header), 401, "replay", "expected a new one")


def test_only_whoever_has_the_key_can_answer(shared: SidecarProcess, sender: Sender) -> None:
    given = sender.key.sign("GET", "/status", b"", time=int(time.time()))
    answer = sender.raw("GET", "/status", b"", given.header())
    signature = answer.headers[ANSWER_HEADER]
    assert sender.key.is_answer(signature, 200, given.nonce, answer.content)
    assert not sender.key.is_answer(signature, 200, "0" * 32, answer.content)
    assert not sender.key.is_answer(signature, 201, given.nonce, answer.content)
    assert not sender.key.is_answer(signature, 200, given.nonce, answer.content + b" ")
    assert not sender.key.is_answer(None, 200, given.nonce, answer.content)
    other = shared.directory / "other-key"
    other.touch(mode=0o600)
    other.write_bytes(b"y" * 32)
    with (
        RemoteEngine(shared.url, other) as engine,
        pytest.raises(SignatureRefused, match="same key file"),
    ):
        engine.status()


BAD: dict[str, tuple[str, str, bytes, int, str]] = {
    "an unknown path": ("GET", "/weights", b"", 404, "openapi.json"),
    "an unknown method": ("DELETE", "/updates", b"", 405, "openapi.json"),
    "an unknown update": ("GET", f"/updates/{ID}", b"", 404, "Send its manifest"),
    "a commit of an unknown update": ("POST", f"/updates/{ID}/commit", b"", 404, "POST /updates"),
    "an abort of an unknown update": ("POST", f"/updates/{ID}/abort", b"", 404, "POST /updates"),
    "an id that is none": ("POST", "/updates/XYZ/commit", b"", 400, "pattern"),
    "a reason that is none": (
        "POST",
        f"/updates/{ID}/abort",
        b'{"reason": [1]}',
        400,
        "valid string",
    ),
    "a body that is no JSON": ("POST", f"/updates/{ID}/abort", b"{", 400, "JSON"),
    "a manifest that is empty": ("POST", "/updates", b"", 422, "this is no manifest"),
    "a manifest that is none": ("POST", "/updates", b'{"format":1}', 422, "this is no manifest"),
    "a manifest that is no text": ("POST", "/updates", b"\xff" * 9, 422, "not ASCII"),
    "a body that is too large": ("POST", f"/updates/{ID}/abort", b" " * 70000, 413, "at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_answer_names_what_was_expected_of(name: str, sender: Sender) -> None:
    method, path, body, status, said = BAD[name]
    before = sender.send("GET", "/status").json()
    problem(sender.send(method, path, body), status, said)
    assert sender.send("GET", "/status").json() == before


def test_a_manifest_that_was_changed_on_its_way_is_refused(
    sender: Sender, trainer: TensorBridge
) -> None:
    document = json.loads(trainer.publish(weights(1), weight_version=1).to_json())
    document["header"]["weight_version"] = 7
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    found = problem(sender.send("POST", "/updates", body), 422, "header")
    assert found["error"] == "DigestMismatch"


def test_a_body_without_an_end_is_cut_off_at_the_limit(sender: Sender) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * 1024 * 1024:
            sent += 65536
            yield b" " * 65536

    header = sender.key.sign("GET", "/status", b"", time=int(time.time())).header()
    try:
        response = sender.http.request(
            "GET", f"{sender.url}/status", content=parts(), headers={"authorization": header}
        )
    except httpx.TransportError:
        pass  # the connection was closed while more came
    else:
        problem(response, 413, "expected at most")
    assert sent < 50 * 1024 * 1024


def test_a_url_of_no_sidecar_is_an_error(shared: SidecarProcess) -> None:
    with (
        RemoteEngine(f"{shared.url}/elsewhere", shared.key_file) as engine,
        pytest.raises(WeightBridgeUnavailableError),
    ):
        engine.status()
