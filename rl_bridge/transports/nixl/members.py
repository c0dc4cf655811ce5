"""The readers of one publisher, as it knows them."""

from pydantic import ValidationError

from rl_bridge.transports._wire.channel import Channel
from rl_bridge.transports._wire.peers import Peer
from rl_bridge.transports.nixl.messages import Join, from_reader

__all__ = ["Member", "joining"]


class Member(Peer):
    """One reader, as the publisher knows it. Changed under the server's lock only."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with what it said of itself."""
        super().__init__(
            channel,
            worker=join.worker,
            rank=join.rank,
            pid=join.pid,
            is_observer=join.is_observer,
            reader=join.reader,
        )
        self.needs_help = False
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""


def joining(text: bytes) -> Join | None:
    """Read a reader's first message; None if it is no such."""
    try:
        message = from_reader(text)
    except ValidationError:
        return None
    return message if isinstance(message, Join) else None
