"""The entry of a side-car: unsigned requests get no further, and no request is too large.

An ASGI application around another one. It reads the body, within limits of size and time, before
anything looks at it; checks signature, time and nonce; and signs the answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_bridge.errors import SignatureRefused, WeightBridgeError
from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.problems import MEDIA_TYPE, Problem, http_problem, problem_of
from rl_bridge.remote.signing import ANSWER_HEADER, SCHEME, Credentials, Key
from rl_bridge.remote.state import NonceBook

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
"""Read without a signature: they tell no weights and change nothing."""

_MANIFEST_PATH = "/updates"
_CHANGES = "/commit"  # nothing else changes an engine
_SMALL_NBYTES = 64 * 1024
_LOG = logging.getLogger(__name__)


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class Gate:
    """Lets each signed request through once.

    Attributes:
        lifespan: begins and ends the application, for a server of our own; others ask for it by
            ASGI.

    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: Key,
        nonces: NonceBook,
        config: SidecarConfig,
        answered: Callable[[str, int], None],
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Stand before `app`.

        Args:
            app: the application that gets the requests.
            key: shared with the clients.
            nonces: of the requests that were answered already.
            config: limits.
            answered: called with the method and status of each answer.
            lifespan: begins and ends `app`.

        """
        self._app, self._key, self._nonces = app, key, nonces
        self._config, self._answered = config, answered
        self.lifespan = lifespan
        # Bytes of bodies that are not whole yet; the one that began first comes first.
        self._coming: dict[anyio.CancelScope, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the start and end of the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send)
        signed_for = ""
        try:
            given = None if _is_open(scope) else self._credentials(scope)
            body = await self._read(scope, receive)
            if given is not None:
                self._key.check(given, scope["method"], _target(scope), body)
                signed_for = given.nonce
                await self._claim(given, scope["path"])
            await self._app(scope, _replay(body), answer)
        except _Refused as refused:
            answer.be(refused.problem)
        except SignatureRefused as error:
            # As it came: the decoded path may have line breaks, which would be lines of the log.
            _LOG.warning("refused %s %r: %s", scope["method"], _target(scope), error)
            answer.be(problem_of(error))
        except Exception as error:  # noqa: BLE001 - answered, and logged unless it is ours
            if not isinstance(error, WeightBridgeError):
                _LOG.exception("%s %r failed", scope["method"], _target(scope))
            answer.be(problem_of(error))
        self._answered(scope["method"], answer.status)
        await answer.send(self._key, signed_for)

    def _credentials(self, scope: Scope) -> Credentials:
        """Check them before the body is read: that of a stranger is not."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        header = b"; ".join(given).decode("latin-1") if given else None
        credentials = Credentials.parse(header)
        self._nonces.check_time(credentials, now=time.time())
        return credentials

    async def _claim(self, given: Credentials, path: str) -> None:
        now = time.time()
        if path.endswith(_CHANGES):
            await asyncio.to_thread(self._nonces.claim, given, now=now)
        else:  # need not outlive the machine: what a replay could reach is gone with it
            self._nonces.claim(given, now=now, sync=False)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        is_manifest = scope["path"] == _MANIFEST_PATH and scope["method"] == "POST"
        limit = self._config.max_body_nbytes if is_manifest else _SMALL_NBYTES
        timeout_s = self._config.body_timeout_s
        with anyio.move_on_after(timeout_s) as coming:
            self._coming[coming] = 0
            try:
                return await self._body(receive, limit, coming)
            finally:
                is_dropped = self._coming.pop(coming, None) is None
        if is_dropped:
            detail = "too many bytes of bodies are coming in at once. Send it again later."
            raise _Refused(http_problem(503, detail))
        detail = f"the body did not arrive, expected all of it within {timeout_s:g} s. Retry."
        raise _Refused(http_problem(408, detail))

    async def _body(self, receive: Receive, limit: int, coming: anyio.CancelScope) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            await checkpoint_if_cancelled()  # another body may have taken its place meanwhile
            if message["type"] == "http.disconnect":
                detail = "the client went away before its body was there."
                raise _Refused(http_problem(400, detail))
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                detail = (
                    f"the body has more than {limit} bytes, expected at most that many. Raise "
                    "max_body_nbytes, or leave the layout out where the side-car knows it."
                )
                raise _Refused(http_problem(413, detail))
            self._coming[coming] = len(body)
            self._make_room()
        return bytes(body)

    def _make_room(self) -> None:
        """Bound all bodies together: until its signature is checked, one may be a stranger's."""
        while sum(self._coming.values()) > 2 * self._config.max_body_nbytes:
            slowest = next(iter(self._coming))
            del self._coming[slowest]
            slowest.cancel()


class _Answer:
    """An answer, held back until it is whole and can be signed."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], list(message.get("headers", []))
            self._body.clear()
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def be(self, problem: Problem) -> None:
        """Become this problem, whatever the answer was before."""
        self.status, self._body = problem.status, bytearray(problem.encoded())
        self._headers = [(b"content-type", MEDIA_TYPE.encode())]
        if problem.status == 401:  # noqa: PLR2004 - RFC 9110 wants the scheme beside it
            self._headers.append((b"www-authenticate", SCHEME.encode()))
        if problem.status in {408, 413, 503}:  # the rest of the body is not read
            self._headers.append((b"connection", b"close"))

    async def send(self, key: Key, nonce: str) -> None:
        """Send it; signed if the request was."""
        body = bytes(self._body)
        mine = {b"content-length": str(len(body)).encode(), b"cache-control": b"no-store"}
        if nonce:
            signature = key.sign_answer(self.status, nonce, body)
            mine[ANSWER_HEADER.encode()] = signature.encode()
        kept = [(name, value) for name, value in self._headers if name.lower() not in mine]
        headers = [*kept, *mine.items()]
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _replay(body: bytes) -> Receive:
    """Give the application the body once, and then a disconnect for ever."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


def _is_open(scope: Scope) -> bool:
    return scope["method"] in {"GET", "HEAD"} and scope["path"] in OPEN_PATHS


def _target(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    return str((path + b"?" + query if query else path).decode("latin-1"))
