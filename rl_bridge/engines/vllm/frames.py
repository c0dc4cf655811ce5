"""What becomes of an exception in an engine's process: it is told, and keeps nothing alive."""

import traceback

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.errors import (
    DeadlineExceeded,
    TransferTimeout,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)

__all__ = [
    "clear_frames",
    "told",
]

# Those shortages that another process can make again of a text: it has them, and they take one.
_OF_A_TEXT = (WeightBridgeUnavailableError, DeadlineExceeded, TransferTimeout)


def told(error: Exception) -> dict[str, str]:
    """Type and message of an error, as another process reads them.

    What is no refusal of the update is told as that, whatever raised it: that it may come again
    must not be lost on the way.
    """
    kind, message = type(error).__name__, str(error)
    if is_shortage(error) and type(error) not in _OF_A_TEXT:
        if not isinstance(error, WeightBridgeError):
            said = f"{kind}: {message.rstrip('.')}" if message else kind
            message = f"{said}. Free some, and try again; what was undone, as a later version."
        kind = WeightBridgeUnavailableError.__name__
    return {"type": kind, "message": message}


def clear_frames(error: BaseException) -> None:
    """Who keeps the log's records must not keep the trainer's slot, by tensors in frames."""
    chain: list[BaseException] = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
