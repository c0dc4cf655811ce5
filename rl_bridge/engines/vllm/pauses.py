"""Whose pause an engine is in: this driver's, another one's, or the user's own.

An engine has one pause, whoever asked for it. Its ranks note which driver pauses it for an update,
so that a driver ends its own, what a dead one left, and no other.
"""

from collections.abc import Mapping
from typing import Any

from rl_bridge.engines.vllm.asking import Ranks
from rl_bridge.engines.vllm.client import EngineHandle, PauseMode, Replies

__all__ = [
    "EnginePause",
    "PauseNote",
]


class PauseNote:
    """A rank's note of the driver that pauses the engine; all ranks have the same."""

    def __init__(self) -> None:
        """Nobody pauses it."""
        self.driver: str | None = None
        self._left = 0  # how often another driver has left its own to this one

    def begin(self, driver: str) -> None:
        """This driver pauses it from now on, and lets it go on later."""
        self.driver, self._left = driver, 0

    def leave(self, driver: str) -> bool:
        """A driver that was refused is done: whether it leaves its pause to another one."""
        is_others = self.driver not in {None, driver}
        self._left += is_others
        return is_others

    def end(self, driver: str, heard: int = 0) -> int:
        """A driver has let the engine go on.

        Args:
            driver: which.
            heard: what it was told here before it did. (An answer may be lost on its way.)

        Returns:
            How often others have left their pauses to it, where that is more: it must let the
            engine go on once more, and stays noted until it has. Else 0.

        """
        if self.driver != driver:
            return 0
        if self._left > heard:
            return self._left
        self.clear()
        return 0

    def clear(self) -> None:
        """The engine goes on, and nobody has an update of his own in it any more."""
        self.driver, self._left = None, 0


class EnginePause:
    """The pause of one driver's updates."""

    def __init__(self, handle: EngineHandle, ranks: Ranks, mode: PauseMode | None) -> None:
        """Configure; the engine is not called."""
        self._handle = handle
        self._ranks = ranks
        self._mode = mode
        # Noted before the engine is paused: an interrupt must not leave it so.
        self.is_on = False
        """By this driver, or by one before it that ended in its pause."""
        self._is_noted = False  # by the ranks, although it is over

    @property
    def is_wanted(self) -> bool:
        """Whether the engine is paused for an update."""
        return self._mode is not None

    def look(self, replies: Replies) -> None:
        """Take over the pause that a driver left which ended in it, as the ranks describe it."""
        noted = {reply["pausing"] for reply in replies} - {None}
        if self._is_noted:
            self._tell()
            noted.discard(self._ranks.driver)
        if noted:
            self.is_on |= self._handle.is_paused()
            self._ranks.ask("pauses", {"pauses": self.is_on, "whosever": True})

    def begin(self, meant: Mapping[str, Any], *, undoes: bool = False) -> None:
        """Pause the engine, for the update that is named; unless the user has.

        Raises:
            WeightUpdateRejectedError: another driver has come with its own.

        """
        assert self._mode is not None
        # The user's pause is not ended here. Nor by who takes this update over: not told before,
        # as there was none. Refused where another driver's update is: its pause is not this one's.
        is_on = self.is_on or not self._is_users()
        self._ranks.ask("pauses", {"pauses": is_on, **meant})
        self.is_on, self._is_noted = is_on, False
        # (What the user froze stays frozen. And no request ends with what is to be undone.)
        mode = "keep" if undoes and self._mode == "wait" else self._mode
        self._handle.pause(mode if is_on else "keep")

    def begin_again(self) -> None:
        """Pause it for an undo: it is not known whether it goes on. Not where another one does."""
        said = {reply["pausing"] for reply in self._ranks.ask("describe", {})}
        if self.is_wanted and not said - {None, self._ranks.driver}:
            self.begin({}, undoes=True)

    def require(self, meant: Mapping[str, Any]) -> None:
        """Let the ranks say that the update that is named is this driver's still.

        Raises:
            WeightUpdateRejectedError: another driver has come with its own.

        """
        self._ranks.ask("pauses", {"pauses": self.is_on, **meant})

    def go_on(self) -> None:
        """Let requests go on."""
        if self.is_on:
            self._handle.resume()
            self._is_noted, self.is_on = True, False

    def end(self) -> None:
        """Go on behind what was refused or undone: there is no commit that ends the pause."""
        if self.is_on and any(reply["is_others"] for reply in self._ranks.ask("leaves", {})):
            self.is_on = False  # another driver has paused it for its own: it ends both
            return
        self.go_on()
        if self._is_noted:
            self._tell()

    def settle(self, replies: Replies) -> None:
        """Go on once more, where a driver that was refused left its pause to this one meanwhile."""
        while heard := max(reply["left"] for reply in replies):
            self._handle.resume()
            replies = self._ranks.ask("pauses", {"heard": heard})
        self._is_noted = False

    def _tell(self) -> None:
        self.settle(self._ranks.ask("pauses", {}))

    def _is_users(self) -> bool:
        """Whether it is paused, and by no driver: another one may end its pause at any time."""
        if not self._handle.is_paused():
            return False
        before = self._noted()
        is_paused = self._handle.is_paused()
        return is_paused and before == self._noted() and not any(r["pausing"] for r in before)

    def _noted(self) -> Replies:
        # What changes with each driver's update.
        keys = ("update_id", "pending", "pausing")
        return [{key: reply[key] for key in keys} for reply in self._ranks.ask("describe", {})]
