"""The receiver's side of a new connection: connect, and prove both ways that the token is known.

Each failure has its own error, because each has its own remedy: the publisher is gone, it refuses
the token, the network does not lead there, or too many peers came at once.
"""

import errno
import select
import socket
import time

from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeUnavailableError
from rl_bridge.transports.wire.channel import (
    GREETING_NBYTES,
    MAX_MESSAGE_NBYTES,
    Channel,
    Greeting,
    fresh_nonce,
)
from rl_bridge.transports.wire.tls import TLS, unlike

# The network failed; the publisher may be well.
_NETWORK = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
_RETRY_MS = 100


class Connector:
    """One attempt to reach a publisher, within one deadline."""

    def __init__(
        self,
        what: str,
        address: str,
        port: int,
        *,
        magic: bytes,
        timeout_s: float,
        within_s: float | None = None,
        tls: TLS | None = None,
        has_tls: bool | None = None,
    ) -> None:
        """Begin; nothing is opened yet.

        All of it takes at most `timeout_s`, or `within_s` if that is shorter. Messages name the
        publisher by `what`, such as "the publisher's broadcast group". For `magic` see `Greeting`.
        With `tls`, nothing goes over the connection without it, whatever the publisher says of
        itself (`has_tls`; None if it says nothing).
        """
        self._address = address
        self._port = port
        self._magic = magic
        self._timeout_s = timeout_s
        self._within_s = timeout_s if within_s is None else min(within_s, timeout_s)
        self._tls = tls
        self._has_tls = has_tls
        self._until = time.monotonic() + self._within_s
        self.where = f"{what} at {address} port {port}"

    def connect(
        self, token: bytes, identity: str, *, max_message_nbytes: int = MAX_MESSAGE_NBYTES
    ) -> Channel:
        """Connect and greet.

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
                max_message_nbytes=max_message_nbytes,
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
                left_ms = (self._until - time.monotonic()) * 1e3
                select.poll().poll(max(0, min(_RETRY_MS, left_ms)))
        msg = (
            f"{self.where} hung up in the greeting, before it looked at the token: too many "
            f"receivers came at once, or another program listens there by now{self._hint}. Import "
            "again; if that does not help, raise the publisher's max_consumers, or publish again."
        )
        raise WeightBridgeUnavailableError(msg)

    def _open(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            msg = (
                f"{self.where} cannot be reached: this process gets no socket ({error}). Raise its "
                "limit of open files (ulimit -n), or check that the machine has this kind of "
                "address, then import again."
            )
            raise WeightBridgeUnavailableError(msg) from error
        try:
            connection.settimeout(max(0.001, self._until - time.monotonic()))
            connection.connect((self._address, self._port))
        except TimeoutError as error:
            connection.close()
            raise self._late("be reached") from error
        except OSError as error:
            connection.close()
            if error.errno in _NETWORK:
                msg = (
                    f"{self.where} cannot be reached: {error}. Check that the network works and "
                    "that this machine has a route there, then import again; or give the publisher "
                    "an address= that can be reached."
                )
                raise WeightBridgeUnavailableError(msg) from error
            msg = (
                f"{self.where} cannot be reached: {error}. Its bridge was closed, or it died: "
                "publish again."
            )
            raise SegmentError(msg) from error
        return connection

    def _late(self, what: str) -> TransferTimeout:
        hint = self._hint if what == "greet" else ""
        return TransferTimeout(
            f"{self.where} could not {what} within {self._within_s:g} s{hint}. Check that the "
            "publisher runs and is reachable, then import again, or raise timeout_s."
        )

    @property
    def _hint(self) -> str:
        """A side with TLS is silent until the other one speaks, as one without does."""
        return ", or it has tls= and this side has not" if self._tls is None else ""

    def _receive(self, channel: Channel, part: str) -> bytes | None:
        """Wait for one part of the greeting; None if the publisher hung up."""
        data = channel.receive_raw(GREETING_NBYTES[part], until=self._until)
        if channel.failure is not None and self._tls is not None:
            raise self._tls.refusal(self.where, self._address, channel.failure)
        if data is None and not channel.is_lost:
            raise self._late("greet")
        return data

    def _greet(self, channel: Channel, token: bytes, identity: str) -> bool:
        """Prove the token both ways; False if the publisher hung up before it looked at it."""
        hello = self._receive(channel, "hello")
        if hello is None:
            return False
        nonce = Greeting.nonce_of(self._magic, hello)
        if nonce is None:
            msg = (
                f"what listens at {self._address} port {self._port} is no publisher of this "
                "transport. Use the manifest or init info of one that runs now."
            )
            raise SegmentError(msg)
        greeting = Greeting(self._magic, token, identity, nonce)
        answer = greeting.answer(fresh_nonce())
        channel.send_raw(answer)
        proof = self._receive(channel, "proof")
        if proof is None:
            return False
        if proof == Greeting.refusal:
            msg = (
                f"{self.where} refuses this side: the token is not its own. Use the manifest or "
                "init info of the publisher that runs now."
            )
            raise SegmentError(msg)
        if not greeting.is_proven_by(proof, answer):
            msg = f"{self.where} does not know the token. Use its own init info."
            raise SegmentError(msg)
        return True

    def wait_for_message(self, channel: Channel) -> bytes:
        """Wait for one message's text.

        Raises:
            SegmentError: the publisher hung up.
            TransferTimeout: it does not answer in time.

        """
        while (text := channel.take()) is None:
            if channel.is_lost:
                msg = f"{self.where} hung up. Publish again, or make a new bridge."
                raise SegmentError(msg)
            left = self._until - time.monotonic()
            if left <= 0:
                raise self._late("answer")
            poll = select.poll()
            # The question may not have left as a whole yet.
            wants = select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0)
            poll.register(channel.socket, wants)
            poll.poll(left * 1e3)
            channel.flush()
            channel.fill(is_polled=True)
        return text
