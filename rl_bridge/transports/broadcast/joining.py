"""How a receiver gets into a publisher's group: connect, prove that the token is known, join."""

import select
import socket
import time

from pydantic import ValidationError

from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeUnavailableError
from rl_bridge.transports.broadcast.channel import (
    GREETING_NBYTES,
    Channel,
    Greeting,
    fresh_nonce,
)
from rl_bridge.transports.broadcast.init_info import BroadcastInitInfo
from rl_bridge.transports.broadcast.messages import (
    FromPublisher,
    Join,
    Refused,
    Welcome,
    from_publisher,
)

__all__ = ["join_group", "parsed"]


def join_group(info: BroadcastInitInfo, join: Join, *, timeout_s: float) -> Channel:
    """Join a group.

    Args:
        info: where, and how to get in.
        join: who this is.
        timeout_s: longest wait for all of it.

    Raises:
        SegmentError: the publisher is gone, or refuses the token.
        WeightBridgeUnavailableError: it has no room for this side.
        TransferTimeout: it does not answer in time.

    """
    joining = _Joining(info, timeout_s)
    channel = joining.connect()
    try:
        joining.greet(channel)
        joining.ask(channel, join)
    except BaseException:
        channel.close()
        raise
    return channel


def parsed(text: bytes) -> FromPublisher | None:
    """Read a publisher's message; None if it is none."""
    try:
        return from_publisher(text)
    except ValidationError:
        return None


class _Joining:
    def __init__(self, info: BroadcastInitInfo, timeout_s: float) -> None:
        self._info = info
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    @property
    def _where(self) -> str:
        return f"the publisher's broadcast group at {self._info.address} port {self._info.port}"

    def connect(self) -> Channel:
        family = socket.AF_INET6 if ":" in self._info.address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(max(0.001, self._until - time.monotonic()))
            connection.connect((self._info.address, self._info.port))
        except TimeoutError as error:
            connection.close()
            raise self._late("be reached") from error
        except OSError as error:
            connection.close()
            msg = (
                f"{self._where} cannot be reached: {error}. Its bridge was closed, or it died: "
                "publish again; or this machine has no route there: give the publisher an address= "
                "that it has."
            )
            raise SegmentError(msg) from error
        return Channel(connection)

    def _late(self, what: str) -> TransferTimeout:
        return TransferTimeout(
            f"{self._where} could not {what} within {self._timeout_s} s. See that the publisher "
            "runs and is reachable, then import again, or raise timeout_s."
        )

    def _receive(self, channel: Channel, part: str) -> bytes:
        data = channel.receive_raw(GREETING_NBYTES[part], until=self._until)
        if data is None:
            if not channel.is_lost:
                raise self._late("greet")
            msg = (
                f"{self._where} hung up in the greeting: the token is not its own, or another "
                "program listens there by now. Use the manifest or init info of the publisher that "
                "runs now."
            )
            raise SegmentError(msg)
        return data

    def greet(self, channel: Channel) -> None:
        info = self._info
        nonce = Greeting.nonce_of(self._receive(channel, "hello"))
        if nonce is None:
            msg = (
                f"what listens at {info.address} port {info.port} is no publisher of this "
                "transport. Use the manifest or init info of one that runs now."
            )
            raise SegmentError(msg)
        identity = f"{info.publisher_id} {info.group_name}"
        greeting = Greeting(bytes.fromhex(info.token), identity, nonce)
        answer = greeting.answer(fresh_nonce())
        channel.send_raw(answer)
        # Both ways: what a stranger says is not parsed on this side either.
        if not greeting.is_proven_by(self._receive(channel, "proof"), answer):
            msg = f"{self._where} does not know the token. Use its own init info."
            raise SegmentError(msg)

    def ask(self, channel: Channel, join: Join) -> None:
        channel.send(join)
        while (text := channel.take()) is None:
            if channel.is_lost:
                msg = f"{self._where} hung up. Publish again, or make a new bridge."
                raise SegmentError(msg)
            left = self._until - time.monotonic()
            if left <= 0:
                raise self._late("answer")
            poll = select.poll()
            poll.register(channel.socket, select.POLLIN)
            poll.poll(left * 1e3)
            channel.fill()
        message = parsed(text)
        if isinstance(message, Refused):
            raise WeightBridgeUnavailableError(
                f"{self._where} refuses this side; mend that and import again: {message.reason}"
            )
        if not isinstance(message, Welcome):
            msg = f"{self._where} does not speak this release's language. Use one release."
            raise SegmentError(msg)
