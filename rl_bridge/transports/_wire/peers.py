"""A receiver, as its publisher knows it."""

from collections import OrderedDict
from typing import Self

from rl_bridge.memory.control import Record, UpdateReport, legible
from rl_bridge.transports._wire.channel import Channel

__all__ = ["Peer"]


class Peer:
    """What all transports note of a receiver. Changed under the lock of whoever serves it only.

    Attributes:
        channel: its connection.
        worker: its name, as it says.
        rank: its rank, as it says.
        pid: its process, as it says.
        reader: the same for all its connections, one after the other; empty if it says none.
        is_observer: it leaves no record.
        is_gone: its connection ended.
        updates: what it reported, by update.

    """

    def __init__(
        self,
        channel: Channel,
        *,
        worker: str,
        rank: int,
        pid: int,
        is_observer: bool,
        reader: str = "",
    ) -> None:
        """Start with what it said of itself."""
        self.channel = channel
        self.worker = worker
        self.rank = rank
        self.pid = pid
        self.reader = reader
        self.is_observer = is_observer
        self.is_gone = False
        self.updates: OrderedDict[str, UpdateReport] = OrderedDict()

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.worker!r} rank {self.rank} (pid {self.pid})"

    def is_of(self, reader: str, pid: int) -> bool:
        """Whether it is a connection of that reader."""
        return bool(reader) and (self.reader, self.pid) == (reader, pid)

    def take_over(self, gone: list[Self]) -> None:
        """Go on with what it had reported before, by connections that ended, which leave `gone`."""
        if self.is_observer:
            return
        for one in [one for one in gone if one.is_of(self.reader, self.pid)]:
            self.updates = one.updates | self.updates
            gone.remove(one)

    def record(self) -> Record:
        """What it reported."""
        return Record(
            worker=legible(self.worker),
            rank=self.rank,
            pid=self.pid,
            updates=tuple(self.updates.values()),
            presence="gone" if self.is_gone else "alive",
        )
