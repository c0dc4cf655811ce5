"""Whoever holds a publisher's registered memory: an agent here, or a process of its own."""

from collections.abc import Sequence
from typing import Protocol

from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.transports.nixl.agent import Counters, Kind, Region

__all__ = ["Host"]


class Host(Protocol):
    """What `Agent` and `ServingProcess` have in common."""

    @property
    def made(self) -> Counters:
        """What was made so far."""

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""

    @property
    def serves_itself(self) -> bool:
        """Whether it makes progress by itself, once `help` says so; else `progress` does."""

    @property
    def epoch(self) -> int:
        """Grows when somebody else takes over."""

    @property
    def is_lost(self) -> bool:
        """Whether it died."""

    def fileno(self) -> int:
        """What becomes readable when it dies; -1 where nothing does."""

    def look(self) -> None:
        """Take note of its end."""

    def ensure(self, *, is_sure: bool = False) -> bool:
        """Replace it if it died; returns whether everything has to be registered anew.

        Args:
            is_sure: a living one that does not answer is replaced, too.

        Raises:
            AgentError: nobody can take its place.

        """

    def register(self, ranges: Sequence[tuple[int, int]], kind: Kind, device: int = 0) -> Region:
        """Register ranges (address, size) of this process.

        Raises:
            AgentError: it cannot.

        """

    def register_segment(self, segment: OwnedSegment) -> Region:
        """Register a segment.

        Raises:
            AgentError: it cannot.

        """

    def deregister(self, region: Region) -> None:
        """Take memory back. Idempotent."""

    def metadata(self, region: Region | None) -> bytes:
        """What a peer needs to read a region; None: to reach the host at all."""

    def progress(self) -> None:
        """Serve peers that read, a little."""

    def help(self, *, is_needed: bool) -> None:
        """Serve peers that read, from here on or no longer."""

    def close(self) -> None:
        """End it. Idempotent."""
