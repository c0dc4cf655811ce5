"""What becomes of an exception in an engine's process: it is told, and keeps nothing alive."""

import traceback

from rl_bridge.bridge.records import is_shortage
from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError

__all__ = ["clear_frames", "told"]


def told(error: Exception) -> dict[str, str]:
    """Type and message of an error, as another process reads them.

    What is no refusal of the update is told as that, whatever raised it: that it may come again
    must not be lost on the way.
    """
    kind, message = type(error).__name__, str(error)
    if is_shortage(error) and not isinstance(error, WeightBridgeError):
        message = f"{kind}: {message.rstrip('.')}. Free some, and try again."
        kind = WeightBridgeUnavailableError.__name__
    return {"type": kind, "message": message}


def clear_frames(error: BaseException) -> None:
    """Who keeps the log's records must not keep the trainer's slot, by tensors in frames."""
    chain: list[BaseException] = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
