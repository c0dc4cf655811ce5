"""Who has a bridge's consuming half: one executor at a time."""

import threading
import weakref

from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["Claim"]


class Claim:
    """Held by one owner until that gives it up, or is dropped without a word."""

    def __init__(self, of: str) -> None:
        """Begin unclaimed; `of` names in errors what is claimed."""
        self._of = of
        self._owner: weakref.ref[object] | None = None
        self._lock = threading.RLock()  # a collection in `take` may run what ends in `give_up`

    def take(self, owner: object) -> None:
        """Take it for `owner`, who may have it already.

        Raises:
            WeightBridgeUnavailableError: another owner has it.

        """
        with self._lock:
            holder = None if self._owner is None else self._owner()
            if holder is not None and holder is not owner:
                msg = (
                    f"{self._of} serves another {type(holder).__name__} already, expected at most "
                    "one. Make a bridge for each, or close() the other one first."
                )
                raise WeightBridgeUnavailableError(msg)
            self._owner = weakref.ref(owner)

    def give_up(self, owner: object) -> None:
        """End the claim of `owner`; another one's stands."""
        with self._lock:
            if self._owner is not None and self._owner() is owner:
                self._owner = None
