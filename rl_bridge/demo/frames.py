"""Messages between trainer and rollout: a JSON header and raw arrays, over a pipe.

One frame is the header's length (4 bytes, little endian), the header as JSON, and the arrays one
after the other. Nothing is pickled: a frame is parsed and checked before any byte of it is used.
Every send and every receive has a deadline.
"""

import json
import math
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_bridge.demo.failures import BadFrame, PeerGone
from rl_bridge.errors import DeadlineExceeded

__all__ = ["Array", "Channel", "Frame", "bound_sends", "decode", "encode"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
_LENGTH_BYTES = 4
_SEND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: plain values and arrays by name."""

    values: Mapping[str, Any]
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """Write a frame as bytes."""
    arrays = {
        name: np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name])
        for name, array in frame.arrays.items()
    }
    header = {
        "values": dict(frame.values),
        "arrays": [[name, array.dtype.name, array.shape] for name, array in arrays.items()],
    }
    text = json.dumps(header).encode()
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, text, *(array.tobytes() for array in arrays.values())])


def decode(data: bytes) -> Frame:
    """Read a frame, or raise `BadFrame` without having used any of it."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < end:
        raise BadFrame(f"a frame of {len(data)} bytes cannot hold a header that ends at {end}")
    try:
        header = json.loads(data[_LENGTH_BYTES:end])
        values, listed = header["values"], header["arrays"]
        described = [(str(name), _DTYPES[dtype], tuple(shape)) for name, dtype, shape in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise BadFrame(f"unreadable frame header: {error}") from error
    if not isinstance(values, dict):
        raise BadFrame(f"a frame's values are an object, not {type(values).__name__}")
    arrays: dict[str, Array] = {}
    for name, dtype, shape in described:
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise BadFrame(f"array {name!r} has the impossible shape {shape}")
        count = math.prod(shape)
        start, end = end, end + count * dtype.itemsize
        if end > len(data):
            raise BadFrame(f"array {name!r} ends at {end}, the frame at {len(data)}")
        # A copy: the frame's buffer is read-only, and torch wants memory that it may write.
        arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape).copy()
    if end != len(data):
        raise BadFrame(f"{len(data) - end} bytes follow the last array")
    return Frame(values, arrays)


def bound_sends(connection: Connection, timeout_s: float) -> None:
    """Let no send over a two-way pipe wait longer than `timeout_s` for its peer to make room.

    A send that waited so long raises `BlockingIOError`; a part of the message may be under way.
    """
    seconds, rest = divmod(timeout_s, 1)
    # Such a pipe is a pair of sockets, and the kernel keeps the time. The option belongs to the
    # socket, so it holds for the connection although it is set by way of a duplicate.
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        value = struct.pack("@ll", int(seconds), int(rest * 1e6))
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Channel:
    """A pipe end that speaks frames.

    Requests and replies alternate, so a frame never waits behind another one.
    """

    def __init__(
        self, connection: Connection, *, peer: str, send_timeout_s: float = _SEND_TIMEOUT_S
    ) -> None:
        """Take over one end of a pipe; `peer` is the other end's name in messages."""
        self._connection = connection
        self._peer = peer
        self._send_timeout_s = send_timeout_s
        bound_sends(connection, send_timeout_s)

    def send(self, frame: Frame) -> None:
        """Send a frame; a peer that reads nothing for long is a `DeadlineExceeded`."""
        try:
            self._connection.send_bytes(encode(frame))
        except BlockingIOError as error:
            raise DeadlineExceeded(
                f"the {self._peer} took no message within {self._send_timeout_s:g} s. End it, and "
                "start anew."
            ) from error
        except OSError as error:
            raise PeerGone(f"the {self._peer} process has ended: {error}") from error

    def receive(self, *, timeout_s: float) -> Frame:
        """Wait for the next frame, at most `timeout_s` seconds."""
        try:
            if not self._connection.poll(timeout_s):
                raise DeadlineExceeded(f"the {self._peer} did not answer within {timeout_s:g} s")
            return decode(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise PeerGone(f"the {self._peer} process has ended") from error

    def close(self) -> None:
        """Close this end; the peer's next receive then raises `PeerGone`."""
        self._connection.close()
