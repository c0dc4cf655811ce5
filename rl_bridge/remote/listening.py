"""A side-car's connections: how many there may be, and how long each may stay idle.

uvicorn has no deadline for a request's head, and none for a client that does not read its answer:
connections that are open and do nothing would keep everybody else out for ever. TLS comes in here
and not by uvicorn: a handshake then has the same deadline and counts as the rest does, and whoever
is refused learns why. Needs the extra ``remote``.
"""

import asyncio
import ssl
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.problems import MEDIA_TYPE, http_problem
from rl_bridge.transports.wire.tls import TLS, RefusalLog, Session, SpeaksPlain

_TIMES: Final = 8
"""Up to so many times the connections that may be served get an answer; the rest are cut off."""


def make_protocol(config: SidecarConfig, tls: TLS | None = None) -> type[asyncio.Protocol]:
    """The protocol of a side-car's connections, for uvicorn's ``http``.

    It is named, since uvicorn's other protocol, its first choice, does not bound a head's size.
    """

    class Bounded(_Connection):
        timeout_s = config.body_timeout_s
        most = config.max_connections

    if tls is None:
        return Bounded
    shared = {"credentials": tls, "refusals": RefusalLog()}
    return type("Secured", (_Secured, Bounded), shared)


class _Connection(H11Protocol):
    """A connection that is closed if no request of it is served for too long."""

    timeout_s: float
    most: int

    _timer: asyncio.TimerHandle | None = None
    _is_unread = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        num_open = len(self.connections)
        if num_open > self.most * _TIMES:
            transport.abort()
        elif num_open > self.most:
            # After its request: an answer to a request that is not read yet may get lost.
            self.app = _turn_away
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_unread = True
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_unread = False
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._say(400, f"{msg} Expected HTTP/1.1, with a head of less than 64 KiB.")

    @property
    def _current(self) -> RequestResponseCycle | None:
        """The last request; uvicorn's types do not say that there may be none yet."""
        return self.cycle

    def _watch(self) -> None:
        """Run the timer while nothing is served; once it runs, only a whole head stops it."""
        cycle = self._current
        if cycle is not None and not cycle.response_complete and not self._is_unread:
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.timeout_s, self._too_late)

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _too_late(self) -> None:
        self._timer = None
        if self._current is None:
            self._say(408, f"no request came within {self.timeout_s:g} s. Send it again.")
        else:
            self.transport.abort()  # a client that has not read its answer by now never will

    def _say(self, status: int, detail: str) -> None:
        """Answer what never became a request, and close."""
        if self._current is None or not self._current.response_started:
            body = http_problem(status, detail).encoded()
            head = "".join(f"{name}: {value}\r\n" for name, value in _headers(body))
            line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            self.transport.write(f"{line}{head}\r\n".encode("ascii") + body)
        self.transport.close()


class _SealedTransport:
    """A connection's transport, for what is written as plain bytes; the rest of it is its own."""

    def __init__(self, transport: Any, session: Session) -> None:
        self._transport, self._session = transport, session

    def write(self, data: bytes) -> None:
        if self._session.is_established:  # nobody gets an answer who is not known yet
            self._session.seal(data)
        self.send()

    def send(self) -> None:
        """Hand over what the session has for the other side."""
        while data := self._session.take():
            self._transport.write(data)

    def get_extra_info(self, name: str) -> Any:
        return self._session if name == "sslcontext" else self._transport.get_extra_info(name)

    @property
    def plain(self) -> Any:
        """The transport itself."""
        return self._transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Secured(_Connection):
    """A connection of which every byte comes by TLS."""

    credentials: TLS
    refusals: RefusalLog

    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        self._session = self.credentials.accept()
        self._sealed = _SealedTransport(transport, self._session)
        super().connection_made(self._sealed)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return  # to close now could lose the alert on its way: the other side closes, or time
        plain = bytearray()
        try:
            self._session.feed(data, plain)
        except ssl.SSLError as error:
            self._refuse(error)
            return
        self._sealed.send()
        if plain:
            super().data_received(bytes(plain))
        if self._session.is_ended:
            self.transport.close()

    def _refuse(self, error: ssl.SSLError) -> None:
        peer = self.client[0] if self.client else "nobody's address"
        self.refusals.say(peer, error)
        self._is_refused = True
        self._sealed.send()
        if isinstance(error, SpeaksPlain):
            self.transport = self._sealed.plain
            self._say(400, "this side-car has tls= and the client has not. Give both tls=.")


async def _turn_away(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer in place of the side-car."""
    detail = "the side-car has as many connections as it may have. Send it again later."
    body = http_problem(503, detail).encoded()
    headers = [(name.encode(), value.encode()) for name, value in _headers(body)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(body: bytes) -> list[tuple[str, str]]:
    return [
        ("content-type", MEDIA_TYPE),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("connection", "close"),
    ]
