"""Bounded messages between the benchmark's processes: JSON for commands, tagged bytes for peers."""

import json
from multiprocessing.connection import Connection
from typing import Any

__all__ = [
    "BenchmarkError",
    "PeerFailedError",
    "recv_json",
    "recv_tagged",
    "send_json",
    "send_tagged",
]

DONE = b"D"
FAILED = b"F"
MESSAGE = b"M"
READY = b"R"


class BenchmarkError(RuntimeError):
    """The benchmark could not go on; the message says where and why."""


class PeerFailedError(BenchmarkError):
    """The other process failed first; its own report carries the reason."""


def send_json(conn: Connection, value: dict[str, Any]) -> None:
    """Send ``value`` as JSON."""
    conn.send_bytes(json.dumps(value).encode())


def recv_json(conn: Connection, timeout_s: float, who: str) -> dict[str, Any]:
    """Return the next JSON message or raise after ``timeout_s``."""
    if not conn.poll(timeout_s):
        msg = f"no answer from {who} within {timeout_s:.0f} s"
        raise BenchmarkError(msg)
    try:
        value = json.loads(conn.recv_bytes())
    except EOFError as error:
        msg = f"{who} ended without an answer"
        raise BenchmarkError(msg) from error
    if not isinstance(value, dict):
        msg = f"{who} sent {type(value).__name__}, expected an object"
        raise BenchmarkError(msg)
    return value


def send_tagged(conn: Connection, tag: bytes, body: bytes = b"") -> None:
    """Send one message of the given kind to the other process of the pair."""
    conn.send_bytes(tag + body)


def recv_tagged(conn: Connection, tag: bytes, timeout_s: float) -> bytes:
    """Return the body of the next message, which must be of the given kind."""
    if not conn.poll(timeout_s):
        msg = f"no {tag!r} message from the other process within {timeout_s:.0f} s"
        raise BenchmarkError(msg)
    try:
        message = conn.recv_bytes()
    except EOFError as error:
        msg = f"the other process ended while a {tag!r} message was due"
        raise PeerFailedError(msg) from error
    if message[:1] == FAILED:
        msg = "the other process reported a failure"
        raise PeerFailedError(msg)
    if message[:1] != tag:
        msg = f"expected a {tag!r} message, got {message[:1]!r}"
        raise BenchmarkError(msg)
    return message[1:]
