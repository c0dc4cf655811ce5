"""The readers of one publisher, as it knows them."""

from collections import OrderedDict

from pydantic import ValidationError

from rl_bridge.memory.control import Record, UpdateReport, legible
from rl_bridge.transports._wire.channel import Channel
from rl_bridge.transports.nixl.messages import Join, from_reader

__all__ = ["Member", "joining"]


class Member:
    """One reader, as the publisher knows it. Changed under the server's lock only."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with what it said of itself."""
        self.channel = channel
        self.worker = join.worker
        self.rank = join.rank
        self.pid = join.pid
        self.is_observer = join.is_observer
        self.is_gone = False
        self.needs_help = False
        self.updates: OrderedDict[str, UpdateReport] = OrderedDict()
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.worker!r} rank {self.rank} (pid {self.pid})"

    def record(self) -> Record:
        """What it reported."""
        return Record(
            worker=legible(self.worker),
            rank=self.rank,
            pid=self.pid,
            updates=tuple(self.updates.values()),
            presence="gone" if self.is_gone else "alive",
        )


def joining(text: bytes) -> Join | None:
    """Read a reader's first message; None if it is no such."""
    try:
        message = from_reader(text)
    except ValidationError:
        return None
    return message if isinstance(message, Join) else None
