"""A side-car's HTTP server: its connections, how many there may be, their deadlines, and TLS.

h11 reads and writes HTTP/1.1, and anyio moves the bytes. Each wait for a client has a deadline.
Where as many connections are open as may be, a new one takes the place of the one that was idle
longest, so that nobody keeps others out by doing nothing. Needs the extra ``remote``.
"""

import logging
import signal
import ssl
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import anyio
import h11
from anyio.abc import Listener, SocketAttribute, SocketStream, TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled
from starlette.types import Message, Scope

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.remote.answers import http_problem
from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.gate import Gate, refusal
from rl_bridge.remote.signing import ANSWER_HEADER
from rl_bridge.transports.wire.tls import TLS, RefusalLog, Session, SpeaksPlain

_MAX_HEAD_NBYTES: Final = 64 * 1024
_MAX_IGNORED_READS: Final = 16
"""So many pieces of a body that nobody wants are read, for its sender to get at the answer."""
_PAUSE_S: Final = 1.0
_SIGNED: Final = ANSWER_HEADER.lower().encode()
_GRACE_S: Final = 10
_LOG = logging.getLogger(__name__)


class HTTPServer:
    """Serves a side-car until the process is told to end.

    A connection is either served, from the moment that its request is whole until its signed answer
    is sent, or idle. Only idle ones are ever aborted for another one.
    """

    def __init__(self, app: Gate, config: SidecarConfig, tls: TLS | None = None) -> None:
        """Prepare; nothing listens yet.

        Args:
            app: gets the requests. It refuses one that is not signed before its body is there.
            config: limits.
            tls: for a server that speaks TLS only.

        """
        self.app, self.config, self.tls = app, config, tls
        self.refusals = RefusalLog()
        self.is_ending = False
        self._idle: dict[_Connection, None] = {}  # the one that is idle longest comes first
        self._served: set[_Connection] = set()

    async def run(self, host: str, port: int) -> signal.Signals:
        """Serve until SIGINT or SIGTERM, which it returns; requests in progress get some time.

        Raises:
            WeightBridgeUnavailableError: this address cannot be listened on.

        """
        async with self.app.lifespan():
            try:
                listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
            except (OSError, UnicodeError) as error:
                raise WeightBridgeUnavailableError(
                    f"cannot listen on {host}, port {port}: {error}. Choose another one."
                ) from error
            async with anyio.create_task_group() as connections:
                with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async with listener, anyio.create_task_group() as accepting:
                        accepting.start_soon(self._accept, listener, connections)
                        self._say_where(host, listener.extra(SocketAttribute.local_port))  # noqa: S610 - not Django
                        told = await anext(signals)
                        accepting.cancel_scope.cancel()
                self.is_ending = True
                for connection in self._idle:
                    connection.scope.cancel()
                connections.cancel_scope.deadline = anyio.current_time() + _GRACE_S
        return told

    def _say_where(self, host: str, port: int) -> None:
        scheme = "http" if self.tls is None else "https"
        _LOG.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)

    async def _accept(self, listener: Listener[SocketStream], connections: TaskGroup) -> None:
        while True:
            try:
                await listener.serve(self._talk, connections)
            except* OSError as errors:
                _LOG.warning("cannot accept connections: %s", errors.exceptions[0])
                await anyio.sleep(_PAUSE_S)  # too many open files, perhaps: some get closed

    async def _talk(self, stream: SocketStream) -> None:
        try:
            async with stream:
                connection = _Connection(self, stream)
                self.rest(connection)
                self._make_room(connection)
                try:
                    await connection.run()
                finally:
                    self._idle.pop(connection, None)
                    self._served.discard(connection)
        except Exception:  # noqa: BLE001 - logged; the others go on
            _LOG.exception("a connection failed")

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than there may be."""
        return len(self._idle) + len(self._served) > self.config.max_connections

    def _make_room(self, newcomer: "_Connection") -> None:
        """Abort the connection that is idle longest; where all others are served, turn away."""
        while self.is_full:
            longest = next(iter(self._idle))
            if longest is newcomer:
                newcomer.is_surplus = True
                return
            del self._idle[longest]
            longest.scope.cancel()

    def rest(self, connection: "_Connection") -> None:
        """Take a connection for idle, for less long than all others."""
        self._served.discard(connection)
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def work(self, connection: "_Connection") -> None:
        """Take a connection for one that is served."""
        self._idle.pop(connection, None)
        self._served.add(connection)


class _Connection:
    """One client's connection, which carries one request after the other.

    Attributes:
        scope: what is cancelled to abort it.
        is_surplus: there is no place for it; its request is told so.

    """

    def __init__(self, server: HTTPServer, stream: SocketStream) -> None:
        self.scope = anyio.CancelScope()
        self.is_surplus = False
        self._server, self._timeout_s = server, server.config.body_timeout_s
        self._socket = stream
        self._peer = stream.extra(SocketAttribute.remote_address, None)  # noqa: S610 - not Django
        tls = server.tls
        self._stream = stream if tls is None else _SealedStream(stream, tls.accept())
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_NBYTES)
        self._is_first = True
        self._is_head = False

    async def run(self) -> None:
        """Answer its requests, until one side ends it or lets a deadline pass."""
        with self.scope, suppress(anyio.BrokenResourceError, anyio.EndOfStream, TimeoutError):
            try:
                while await self._answer_one():
                    self._http.start_next_cycle()
                    self._is_first = False
            except ssl.SSLError as error:
                await self._refuse(error)
            await self._end()

    async def _answer_one(self) -> bool:
        """Answer a request; returns whether another one may come."""
        try:
            with anyio.fail_after(self._timeout_s):
                request = await self._next_event()
        except TimeoutError:
            if self._is_first:
                detail = f"no request came within {self._timeout_s:g} s. Send it again."
                await self._say(408, detail)
            return False
        except h11.RemoteProtocolError as error:
            nbytes = f"a head of less than {_MAX_HEAD_NBYTES} bytes"
            await self._say(400, f"no request: {error}. Expected HTTP/1.1, with {nbytes}.")
            return False
        if not isinstance(request, h11.Request):
            return False
        self._is_head = request.method == b"HEAD"
        if self.is_surplus and self._server.is_full:
            detail = "the side-car has as many connections as it may have. Send it again later."
            await self._say(503, detail)
            return False
        answer: dict[str, Message] = {}

        async def keep(message: Message) -> None:
            answer[message["type"]] = message

        await self._server.app(self._scope_of(request), self._receive, keep)
        start, body = answer["http.response.start"], answer["http.response.body"]["body"]
        if not any(name == _SIGNED for name, _ in start["headers"]):
            self._server.rest(self)  # it may be a stranger, who does not read what is sent
        await self._send(start["status"], start["headers"], body)
        self._server.rest(self)
        return self._http.our_state is self._http.their_state is h11.DONE

    def _scope_of(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "http" if self._server.tls is None else "https",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": self._peer,
            "server": None,
        }

    async def _receive(self) -> Message:
        """Hand over what has come of the body, or word that there is no more to come."""
        body = bytearray()
        try:
            event = await self._next_event()
            while isinstance(event, h11.Data):
                body += event.data
                event = self._http.next_event()
        except (h11.RemoteProtocolError, anyio.EndOfStream, anyio.BrokenResourceError):
            return {"type": "http.disconnect"}
        except ssl.SSLError as error:
            self._note_refusal(error)
            return {"type": "http.disconnect"}
        if event is h11.NEED_DATA:
            return {"type": "http.request", "body": bytes(body), "more_body": True}
        await checkpoint_if_cancelled()  # it may have lost its place while the last bytes came
        self._server.work(self)
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._stream.send(self._http.send(go_on) or b"")
            self._http.receive_data(await self._stream.receive())
            self._server.rest(self)
        return event

    async def _say(self, status: int, detail: str) -> None:
        """Answer in place of the side-car."""
        answer = refusal(http_problem(status, detail))
        await self._send(status, answer.raw_headers, bytes(answer.body))

    async def _send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers = [*headers, (b"date", formatdate(usegmt=True).encode())]
        is_last = self._http.their_state is not h11.DONE or self._server.is_ending
        if is_last and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        reason = HTTPStatus(status).phrase.encode()
        events = (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=b"" if self._is_head else body),
            h11.EndOfMessage(),
        )
        with anyio.fail_after(self._timeout_s):
            await self._stream.send(b"".join(self._http.send(event) or b"" for event in events))

    def _note_refusal(self, error: ssl.SSLError) -> None:
        self._server.refusals.say(self._peer[0] if self._peer else "nobody's address", error)

    async def _refuse(self, error: ssl.SSLError) -> None:
        self._note_refusal(error)
        with anyio.fail_after(self._timeout_s):
            await self._stream.send(b"")  # TLS has its own words for it
        if isinstance(error, SpeaksPlain):
            self._stream = self._socket
            await self._say(400, "this side-car has tls= and the client has not. Give both tls=.")

    async def _end(self) -> None:
        """Say that no more comes, and wait for the other side to end, which may send still.

        To close at once could lose on its way what was said last.
        """
        await self._socket.send_eof()
        with anyio.fail_after(self._timeout_s):
            for _ in range(_MAX_IGNORED_READS):
                await self._socket.receive()


class _SealedStream:
    """A stream of plain bytes over one that carries TLS."""

    def __init__(self, stream: SocketStream, session: Session) -> None:
        self._stream, self._session = stream, session

    async def receive(self) -> bytes:
        found = bytearray()
        while not found:
            if self._session.is_ended:
                raise anyio.EndOfStream
            self._session.feed(await self._stream.receive(), found)
            await self._hand_over()
        return bytes(found)

    async def send(self, data: bytes) -> None:
        if self._session.is_established:  # nobody gets an answer who is not known yet
            self._session.seal(data)
        await self._hand_over()

    async def _hand_over(self) -> None:
        while data := self._session.take():
            await self._stream.send(data)
