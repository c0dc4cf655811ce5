"""Consumers of the bench that fail.

A module of their own, without torch: the processes that they are start in no time.
"""

import json
import os
import signal
from multiprocessing.connection import Connection

__all__ = ["dies", "fails", "hangs"]


def dies(connection: Connection) -> None:
    """A consumer that ends when it is asked something."""
    connection.recv_bytes()
    os._exit(3)


def fails(connection: Connection) -> None:
    """A consumer that refuses everything."""
    connection.recv_bytes()
    connection.send_bytes(json.dumps({"error": "SegmentError: gone"}).encode())


def hangs(connection: Connection) -> None:
    """A consumer that answers nothing, and ends for nobody."""
    del connection
    signal.pause()
