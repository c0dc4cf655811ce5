"""Consumers of the bench that fail, for a process of their own."""

import os
import signal

from rl_bridge.errors import SegmentError

__all__ = ["Dies", "Fails", "Hangs"]


class Dies:
    """A consumer that ends when it is asked something."""

    def start(self, way: str) -> None:
        """End."""
        os._exit(3)


class Fails:
    """A consumer that refuses everything."""

    def start(self, way: str) -> None:
        """Refuse."""
        raise SegmentError("gone")


class Hangs:
    """A consumer that answers nothing, and ends for nobody."""

    def start(self, way: str) -> None:
        """Hang."""
        signal.pause()
