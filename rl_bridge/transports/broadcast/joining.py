"""How a receiver gets into a publisher's group: connect, prove that the token is known, join."""

from pydantic import ValidationError

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.transports._wire.caller import Caller
from rl_bridge.transports._wire.channel import Channel
from rl_bridge.transports._wire.messages import Refused
from rl_bridge.transports.broadcast.init_info import MAGIC, BroadcastInitInfo
from rl_bridge.transports.broadcast.messages import (
    FromPublisher,
    Join,
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
    what = "the publisher's broadcast group"
    caller = Caller(what, info.address, info.port, magic=MAGIC, timeout_s=timeout_s)
    channel = caller.connect(bytes.fromhex(info.token), info.identity)
    try:
        _ask(caller, channel, join)
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


def _ask(caller: Caller, channel: Channel, join: Join) -> None:
    channel.send(join)
    message = parsed(caller.wait_for_message(channel))
    if isinstance(message, Refused):
        raise WeightBridgeUnavailableError(
            f"{caller.where} refuses this side; mend that and import again: {message.reason}"
        )
    if not isinstance(message, Welcome):
        msg = f"{caller.where} does not speak this release's language. Use one release."
        raise SegmentError(msg)
