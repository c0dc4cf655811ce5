"""What requests see of an update beside the weights: the engine's pause, its prefixes, its label.

Several drivers may have one engine, and SGLang's pause has no owner: whoever ends it ends it for
all. So the engine's half is told whose it is, right before it begins, and nobody else ends it. It
keeps what the label was before, too: who takes an update back may not be the one who labelled it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.engines.sglang.handles import Answer, EngineHandle, PauseMode

__all__ = [
    "Serving",
]


class Serving:
    """One driver's hand on what an engine serves."""

    def __init__(self, handle: EngineHandle, pause: PauseMode) -> None:
        """Use `handle`; nothing is called.

        Args:
            handle: the driver's, of its engine.
            pause: what running requests do in the pause.

        """
        self._handle = handle
        self._pause: PauseMode = pause
        self._is_paused = False  # noted before it is: an interrupt may come in between
        self._labels: list[str] | None = None  # before an update, and with it, till it goes on

    def stop(self, meant: Mapping[str, Any], *, undoes: bool = False) -> None:
        """Pause for an update of this driver's.

        Args:
            meant: names it.
            undoes: it is to be taken back; some ranks may have done so.

        Raises:
            WeightUpdateRejectedError: another driver's is there; nothing was paused.

        """
        self._handle.call("pauses", pauses=True, undoes=undoes, **meant)
        self._is_paused = True
        self._handle.pause(self._pause)

    def stop_and_drop(self) -> Answer:
        """Pause for an undo, and drop prefixes that requests may have made meanwhile.

        Frozen requests would keep theirs: they are computed anew.
        """
        self._is_paused = True
        self._handle.pause("abort" if self._pause == "abort" else "retract")
        return self.drop()

    def take_over(self, *, begun: bool) -> None:
        """End what another driver left, paused perhaps; that one is refused from now on.

        Args:
            begun: whether it has begun to install an update, as the engine said.

        Raises:
            WeightUpdateRejectedError: it has begun by now.

        """
        self._handle.call("take_over", begun=begun)
        self._is_paused = True

    def go_on(self, meant: Mapping[str, Any]) -> None:
        """End the pause of the update that was announced.

        From here on it is nobody's: a driver whose own pause comes too late would leave that to
        this one, which has ended the pause by then. And its label is right, as it is this driver's
        still.

        Raises:
            WeightUpdateRejectedError: another driver came in between.

        """
        self._handle.call("pauses", **meant)
        self._labels = None
        if self._is_paused:
            self._handle.resume()
            self._is_paused = False

    def end_pause(self) -> None:
        """Go on behind what was refused or undone, unless another driver paused meanwhile.

        Nor where what is half-way could not be taken back.
        """
        if self._is_paused:
            if not self._handle.call("leaves")["stays"]:
                self._handle.resume()
                told = self._handle.call("pauses")
                while heard := told["left"]:  # another driver left its pause to this one meanwhile
                    self._handle.resume()
                    told = self._handle.call("pauses", heard=heard)
            self._is_paused = False

    def drop(self, **given: Any) -> Answer:
        """Let the engine drop cached prefixes: whether it did, and what it said."""
        flushed = self._handle.call("flush", **given)["flushed"]
        # SGLang's own route gives memory back as well, which takes it as long as a small update.
        return self._handle.flush() if flushed is None else (flushed, "requests hold some")

    def announce(self, label: str | None, meant: Mapping[str, Any]) -> None:
        """Tell the engine's half that the proven update is to serve, and by which label.

        Raises:
            WeightUpdateRejectedError: another driver came in between.

        """
        self._labels = None if label is None else [self._handle.label(), label]
        self._handle.call("resume", labels=self._labels, **meant)

    def relabel(self, label: str) -> None:
        """Set the label."""
        self._handle.set_label(label)

    def label_back(self, labels: Sequence[str] | None) -> None:
        """Set the label that was there before, unless somebody has set another one since.

        Args:
            labels: the one before, and the update's, as its driver announced it.

        """
        if labels is not None:
            before, given = labels
            if self._handle.label() == given:
                self._handle.set_label(before)

    def label_right(self, right: str | None) -> None:
        """Take back a label that was set when another driver had come in between.

        Args:
            right: of what the engine holds; None: it has none of its own.

        """
        if self._labels is not None:
            before, given = self._labels
            if right != given and self._handle.label() == given:
                self._handle.set_label(before if right is None else right)
            self._labels = None
