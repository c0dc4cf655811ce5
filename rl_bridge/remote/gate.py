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
from anyio.lowlevel import checkpoint
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_bridge.errors import SignatureRefused, WeightBridgeError
from rl_bridge.remote.answers import MEDIA_TYPE, Problem, http_problem, problem_of
from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.signing import ANSWER_HEADER, SCHEME, Credentials, Key
from rl_bridge.remote.state import NonceBook

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
"""Read without a signature: they tell no weights and change nothing."""

_MANIFEST_PATH = "/updates"
_CHANGES = "/commit"  # nothing else changes an engine
_SMALL_NBYTES = 64 * 1024
_LOG = logging.getLogger(__name__)


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
        signed_for = ""
        try:
            given = None if _is_open(scope) else self._credentials(scope)
            body = await self._read(scope, receive)
            if given is not None:
                self._key.check(given, scope["method"], _target(scope), body)
                signed_for = given.nonce
                await self._claim(given, scope["path"])
            answer = await _answer_by(self._app, scope, body)
        except HTTPException as refused:
            answer = refusal(http_problem(refused.status_code, refused.detail))
        except SignatureRefused as error:
            # As it came: the decoded path may have line breaks, which would be lines of the log.
            _LOG.warning("refused %s %r: %s", scope["method"], _target(scope), error)
            answer = refusal(problem_of(error))
        except Exception as error:  # noqa: BLE001 - answered, and logged unless it is ours
            if not isinstance(error, WeightBridgeError):
                _LOG.exception("%s %r failed", scope["method"], _target(scope))
            answer = refusal(problem_of(error))
        self._answered(scope["method"], answer.status_code)
        answer.headers["cache-control"] = "no-store"
        if signed_for:
            signature = self._key.sign_answer(answer.status_code, signed_for, bytes(answer.body))
            answer.headers[ANSWER_HEADER] = signature
        await answer(scope, receive, send)

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
            raise HTTPException(503, detail)
        detail = f"the body did not arrive, expected all of it within {timeout_s:g} s. Retry."
        raise HTTPException(408, detail)

    async def _body(self, receive: Receive, limit: int, coming: anyio.CancelScope) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            await checkpoint()  # others have their turn, and one may have taken this one's place
            if message["type"] == "http.disconnect":
                detail = "the client went away before its body was there."
                raise HTTPException(400, detail)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                detail = (
                    f"the body has more than {limit} bytes, expected at most that many. Raise "
                    "max_body_nbytes, or leave the layout out where the side-car knows it."
                )
                raise HTTPException(413, detail)
            self._coming[coming] = len(body)
            self._make_room()
        return bytes(body)

    def _make_room(self) -> None:
        """Bound all bodies together: until its signature is checked, one may be a stranger's."""
        while sum(self._coming.values()) > 2 * self._config.max_body_nbytes:
            slowest = next(iter(self._coming))
            del self._coming[slowest]
            slowest.cancel()


async def _answer_by(app: ASGIApp, scope: Scope, body: bytes) -> Response:
    """Have `app` answer; it gets the body once, and its answer is held back until it is whole."""
    answer, parts = Response(), bytearray()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status_code, answer.raw_headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            parts.extend(message.get("body", b""))

    await app(scope, receive, keep)
    answer.body = bytes(parts)
    return answer


def refusal(problem: Problem) -> Response:
    """The answer that carries a problem."""
    headers = {"cache-control": "no-store"}
    if problem.status == 401:  # noqa: PLR2004 - RFC 9110 wants the scheme beside it
        headers["www-authenticate"] = SCHEME
    if problem.status in {408, 413, 503}:  # the rest of the body is not read
        headers["connection"] = "close"
    return Response(problem.encoded(), problem.status, headers, MEDIA_TYPE)


def _is_open(scope: Scope) -> bool:
    return scope["method"] in {"GET", "HEAD"} and scope["path"] in OPEN_PATHS


def _target(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    return str((path + b"?" + query if query else path).decode("latin-1"))
