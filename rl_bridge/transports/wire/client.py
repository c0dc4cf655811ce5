"""The receiver's side of a connection: connect, prove that the token is known, join, ask, report.

`Connector` makes a connection, on which both sides have proven that they know the token. Each
failure has its own error, because each has its own remedy: the publisher is gone, it refuses the
token, the network does not lead there, or too many peers came at once.

`PeerClient` is the counterpart of `PeerServer`, which it joins over such a connection. What else
the two tell each other, a transport adds to both.
"""

import errno
import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeUnavailableError
from rl_bridge.memory.control import UpdateReport
from rl_bridge.transports.wire.channel import (
    GREETING_NBYTES,
    Channel,
    Greeting,
    Leave,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Reported,
    fresh_nonce,
    keep_newest,
)
from rl_bridge.transports.wire.tls import TLS, unlike

# The network failed, or this machine is short of something; the publisher may be well.
_NETWORK = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAFNOSUPPORT)
_HERE = frozenset({*_NETWORK, *_SHORTAGES})
_RETRY_MS = 100

_KEPT_REPORTS = 6
_MOST_OF_A_REPORT_NBYTES = 1 << 20
_GOODBYE_S = 1.0
_Welcomed = TypeVar("_Welcomed", bound=Message)

_OTHER_RELEASE = "speaks another release's protocol. Use one release on both sides."


def _late(where: str, what: str, within_s: float, hint: str = "") -> TransferTimeout:
    return TransferTimeout(
        f"{where} could not {what} within {within_s:g} s{hint}. Check that the publisher runs and "
        "is reachable, then import again, or raise timeout_s."
    )


class Connector(Generic[_Welcomed]):
    """One attempt to reach a publisher, within one deadline.

    Attributes:
        protocol: what both sides agree on.
        where: the publisher and its address, for messages.
        until: the deadline, by `time.monotonic`.
        within_s: seconds from the beginning to the deadline.

    """

    def __init__(
        self,
        what: str,
        address: str,
        port: int,
        protocol: PeerProtocol[Any, _Welcomed],
        *,
        timeout_s: float,
        within_s: float | None = None,
        tls: TLS | None = None,
        has_tls: bool | None = None,
    ) -> None:
        """Begin; nothing is opened yet.

        All of it takes at most `timeout_s`, or `within_s` if that is shorter. Messages name the
        publisher by `what`, such as "the publisher's broadcast group".
        With `tls`, nothing goes over the connection without it, whatever the publisher says of
        itself (`has_tls`; None if it says nothing).
        """
        self._address = address
        self._port = port
        self.protocol = protocol
        self._timeout_s = timeout_s
        self.within_s = timeout_s if within_s is None else min(within_s, timeout_s)
        self._tls = tls
        self._has_tls = has_tls
        self.until = time.monotonic() + self.within_s
        self.where = f"{what} at {address} port {port}"

    def connect(self, token: bytes, identity: str) -> Channel:
        """Connect and greet; for `token` and `identity` see `Greeting`.

        Raises:
            SegmentError: the publisher is gone, or refuses the token.
            TransferTimeout: it does not answer in time.
            CertificateRefused: one side refuses the other's certificate.
            WeightBridgeUnavailableError: the network does not lead there now, this process has no
                descriptor left, only one side has TLS, or the publisher hung up before it looked at
                the token.

        """
        if self._has_tls not in {None, self._tls is not None}:
            raise unlike(self.where, has_tls=self._tls is None)
        for is_last in (False, True):
            channel = Channel(
                self._open(),
                max_message_nbytes=self.protocol.max_message_nbytes,
                timeout_s=self._timeout_s,
                tls=None if self._tls is None else self._tls.connect(self._address),
            )
            try:
                if self._greet(channel, token, identity):
                    return channel
            except BaseException:
                channel.close()
                raise
            channel.close()
            if not is_last:  # a publisher that is dying stops listening within a moment
                left_ms = (self.until - time.monotonic()) * 1e3
                select.poll().poll(max(0, min(_RETRY_MS, left_ms)))
        raise WeightBridgeUnavailableError(
            f"{self.where} hung up in the greeting, before it looked at the token: too many "
            f"receivers came at once, or another program listens there by now{self._hint}. Import "
            "again; if that does not help, raise the publisher's max_consumers, or publish again."
        )

    def _open(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        connection: socket.socket | None = None
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(max(0.001, self.until - time.monotonic()))
            connection.connect((self._address, self._port))
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise _late(self.where, "be reached", self.within_s) from error
            if error.errno in _HERE:
                raise WeightBridgeUnavailableError(
                    f"{self.where} cannot be reached: {error}. Check that the network works, that "
                    "this machine has a route there, and this process descriptors left (ulimit "
                    "-n), then import again; or give the publisher an address= that can be reached."
                ) from error
            raise SegmentError(
                f"{self.where} cannot be reached: {error}. Its bridge was closed, or it died: "
                "publish again."
            ) from error
        return connection

    @property
    def _hint(self) -> str:
        """A side with TLS is silent until the other one speaks, as one without does."""
        return ", or it has tls= and this side has not" if self._tls is None else ""

    def _receive(self, channel: Channel, part: str) -> bytes | None:
        """Wait for one part of the greeting; None if the publisher hung up."""
        data = channel.receive_raw(GREETING_NBYTES[part], until=self.until)
        if channel.failure is not None and self._tls is not None:
            raise self._tls.refusal(self.where, self._address, channel.failure)
        if data is None and not channel.is_lost:
            raise _late(self.where, "greet", self.within_s, self._hint)
        return data

    def _greet(self, channel: Channel, token: bytes, identity: str) -> bool:
        """Prove the token both ways; False if the publisher hung up before it looked at it."""
        hello = self._receive(channel, "hello")
        if hello is None:
            return False
        nonce = Greeting.nonce_of(self.protocol.magic, hello)
        if nonce is None:
            raise SegmentError(
                f"what listens at {self._address} port {self._port} is no publisher of this "
                "transport. Use the manifest or init info of one that runs now."
            )
        greeting = Greeting(self.protocol.magic, token, identity, nonce)
        answer = greeting.answer(fresh_nonce())
        channel.send_raw(answer)
        proof = self._receive(channel, "proof")
        if proof is None:
            return False
        if proof == Greeting.refusal:
            raise SegmentError(
                f"{self.where} refuses this side: the token is not its own. Use the manifest or "
                "init info of the publisher that runs now."
            )
        if not greeting.is_proven_by(proof, answer):
            raise SegmentError(f"{self.where} does not know the token. Use its own init info.")
        return True


class HungUp(SegmentError):
    """The connection ended and the publisher gave no reason: it closed, or died, or lives on."""


_Answered = TypeVar("_Answered", bound=Message)


class PeerClient(Generic[_Welcomed]):
    """One publisher, as a receiver sees it. Asking and waiting are for one thread at a time.

    Attributes:
        where: the publisher and its address, for messages.
        welcome: what the publisher answered to the first message.
        is_observer: this side leaves no record at the publisher.
        reports: the last reports of this side; a later connection repeats them.

    """

    def __init__(
        self,
        connector: Connector[_Welcomed],
        token: bytes,
        identity: str,
        join: PeerJoin,
    ) -> None:
        """Connect, prove that the token is known, and join, all within the connector's deadline.

        Args:
            connector: leads to the publisher.
            token: proves that this side may join.
            identity: the publisher's, which came together with the token.
            join: the first message, which names this side.

        Raises:
            SegmentError: the publisher is gone, refuses the token, or is of another release.
            WeightBridgeUnavailableError: it has no room for this side, or a certificate is refused.
            TransferTimeout: it does not answer in time.

        """
        self.where = connector.where
        self.is_observer = join.is_observer
        self.reports: OrderedDict[str, UpdateReport] = OrderedDict()
        self._join = join
        self._parse = connector.protocol.parse_publisher
        self._max_report_nbytes = min(
            connector.protocol.max_message_nbytes * 3 // 4, _MOST_OF_A_REPORT_NBYTES
        )
        self._channel = connector.connect(token, identity)
        try:
            self.welcome = self._welcomed(connector)
        except BaseException:
            self._channel.close()
            raise

    def _welcomed(self, connector: Connector[_Welcomed]) -> _Welcomed:
        self._channel.send(self._join)
        answer = self._next(connector.until, connector.within_s)
        if isinstance(answer, Refused):
            raise WeightBridgeUnavailableError(
                f"{self.where} refuses this side; mend that and import again: {answer.reason}"
            )
        if not isinstance(answer, connector.protocol.welcome):
            raise SegmentError(f"{self.where} {_OTHER_RELEASE}")
        return answer

    @property
    def is_lost(self) -> bool:
        """Whether the connection ended, as far as this side can know by now."""
        if not self._channel.is_lost:
            self._channel.flush()
            self._channel.fill()
        return self._channel.is_lost

    def follow(self) -> None:
        """Become a full member, which leaves a record."""
        if self.is_observer:
            self.is_observer = False
            self.send(self._join.model_copy(update={"is_observer": False}))

    # ---- sending --------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the publisher reads; never waits."""
        self.send_text(message.model_dump_json().encode("utf-8", "replace"))

    def send_text(self, text: bytes) -> None:
        """Send the text of a message."""
        self._channel.send_bytes(text)

    def report(self, report: UpdateReport) -> None:
        """Send a report to the publisher; never waits."""
        self.reports.pop(report.update_id, None)
        self.reports[report.update_id] = report
        keep_newest(self.reports, _KEPT_REPORTS)
        text = _text_of(report)
        if len(text) > self._max_report_nbytes:
            text = _text_of(report.model_copy(update={"proof": None, "timings_ms": {}}))
        self.send_text(text)

    def take_over(self, other: Self) -> None:
        """Repeat the reports of an earlier connection to the same publisher."""
        for report in list(other.reports.values()):
            self.report(report)

    # ---- asking ---------------------------------------------------------------------------------

    def ask(self, message: Message, kind: type[_Answered], *, within_s: float) -> _Answered:
        """Send a message and wait for its answer; raises as `wait_for` does."""
        try:
            self.send(message)
            answer: _Answered = self.wait_for(kind, within_s=within_s)
        except BaseException:
            self._channel.close()  # a late answer must not pass for that to another question
            raise
        return answer

    def wait_for(
        self,
        kinds: type[Message] | tuple[type[Message], ...],
        *,
        within_s: float,
        is_answer: Callable[[Any], bool] = lambda _: True,
    ) -> Any:
        """Wait for an answer of these kinds, and pass over whatever else comes.

        Raises:
            SegmentError: the publisher ended the connection, as a `HungUp` where it gave no reason,
                or sent what is no message.
            TransferTimeout: no answer in time. This side has hung up: the network may have cut the
                connection silently.

        """
        until = time.monotonic() + within_s
        try:
            while True:
                message = self._checked(self._next(until, within_s))
                if isinstance(message, kinds) and is_answer(message):
                    return message
        except BaseException:
            self._channel.close()
            raise

    def _checked(self, message: Any) -> Any:
        if isinstance(message, Refused):
            raise SegmentError(
                f"{self.where} ended the connection: {message.reason}. Publish again."
            )
        if message is None:
            raise SegmentError(f"{self.where} {_OTHER_RELEASE}")
        return message

    def _next(self, until: float, within_s: float) -> Any:
        """Wait for a message, `within_s` in all; None for a text that is none."""
        text = self._channel.receive(until=until)
        if text is None and self._channel.is_lost:
            raise HungUp(f"{self.where} hung up. Import again, or publish again.")
        if text is None:
            raise _late(self.where, "answer", within_s)
        return self._parse(text)

    # ---- the end --------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection as it is. Idempotent."""
        self._channel.close()

    def leave(self) -> None:
        """Say goodbye, and hang up once the publisher noted it. Idempotent."""
        if not self._channel.is_lost:
            self.send(Leave())
            until = time.monotonic() + _GOODBYE_S
            while not self._channel.is_lost and time.monotonic() < until:
                self._channel.receive_raw(1 << 20, until=until)
        self._channel.close()


def _text_of(report: UpdateReport) -> bytes:
    return Reported(report=report).model_dump_json().encode("utf-8", "replace")
