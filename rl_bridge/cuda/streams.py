"""Questions to a device's streams: whether one is captured, and which work is still to do.

The stream is torch's current one of the device, in the thread that asks.
"""

import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import WeightBridgeUnavailableError

_LOG = logging.getLogger(__name__)
_POLL_S = 20e-6


def refuse_capture(device: torch.device) -> None:
    """Refuse before anything is put on a stream that is captured into a CUDA graph.

    Each replay of that graph would do it again: write to a version that was published since, or to
    an engine's weights.

    Raises:
        WeightBridgeUnavailableError: the stream is captured.

    """
    if _is_capturing(device):
        raise WeightBridgeUnavailableError(
            "the stream is being captured into a CUDA graph, whose replays would repeat what is "
            "done now. Call publish, import or install outside of the capture."
        )


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def has_come(event: Any, deadline: float) -> bool:
    """Wait for an event, until a time of the monotonic clock at the latest; whether it came."""
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def table_on(device: torch.device, table: npt.NDArray[np.int64]) -> torch.Tensor:
    """Bring a table to a device, on its current stream; the host does not wait for it."""
    found = torch.from_numpy(table)
    if device.type != "cuda" or not table.size:
        return found.to(device)
    # From memory that is not pinned the copy would wait, on the host, for all that is before it.
    return found.pin_memory().to(device, non_blocking=True)


def _mark(device: torch.device) -> Any:
    """Make an event that is true once all that is on the stream is done; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _go_behind(device: torch.device, mark: Any) -> None:
    """Have the next work on the stream wait, on the device, for an event of another stream."""
    torch.cuda.current_stream(device).wait_event(mark)


class Writes:
    """A publisher's writes to its slots, which a device makes in its own time.

    A publish that fails half-way, at its deadline or by an interrupt, may leave writes behind that
    the device has yet to make. The next publish may use the same slot, on another stream: without
    this, those writes could change what it published.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with none."""
        self._device = device
        self._left: Any = None

    @property
    def are_over(self) -> bool:
        """Whether the device no longer writes, so that slots can be unmapped."""
        try:
            return self._left is None or bool(self._left.query())
        except RuntimeError as error:
            _LOG.warning("nothing more will be written: the device does not answer: %s", error)
            return True

    def begin(self) -> None:
        """Put the next work behind the work that a failed publish left; the host does not wait.

        Raises:
            WeightBridgeUnavailableError: the stream is captured; nothing was put there.

        """
        refuse_capture(self._device)
        if self._left is not None:
            _go_behind(self._device, self._left)

    def fail(self) -> None:
        """Note the work that the publish that fails now leaves behind."""
        try:
            # Work that was left before is covered: `begin` put this stream behind it.
            self._left = _mark(self._device)
        except RuntimeError as error:
            _LOG.warning("nothing more will be written: the device does not answer: %s", error)

    def end(self) -> None:
        """Note that a publish is through: its digests have arrived, from behind all the others."""
        self._left = None
