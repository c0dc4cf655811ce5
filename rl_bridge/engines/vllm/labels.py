"""The version label that vLLM puts on outputs: bound to the weights, and taken back with them."""

from collections.abc import Callable

from rl_bridge.engines.vllm.client import EngineHandle
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "EngineLabel",
    "LabelMaker",
    "checked_label",
    "default_label",
    "label_of",
]

LabelMaker = Callable[[WeightUpdateManifest], str]


def default_label(manifest: WeightUpdateManifest) -> str:
    """``version@root``: the label on outputs tells which weights made them, not only a number."""
    return f"{manifest.weight_version}@{manifest.root}"


def checked_label(make: LabelMaker | None) -> LabelMaker | None:
    """The function that makes labels, as it was given.

    Raises:
        TypeError: it is none.

    """
    if make is not None and not callable(make):
        raise TypeError(f"label={make!r}: expected a function of the manifest, or None.")
    return make


def label_of(manifest: WeightUpdateManifest, make: LabelMaker) -> str:
    """The label that `make` gives a version.

    Raises:
        TypeError: it is no text. vLLM takes whatever it is given, and answers no request any more.

    """
    label: object = make(manifest)
    if not isinstance(label, str):
        msg = (
            f"label of version {manifest.weight_version} is {label!r}, a {type(label).__name__}: "
            "expected a str. Let label= return one."
        )
        raise TypeError(msg)
    return label


class EngineLabel:
    """The label of one engine, as one driver sets it."""

    def __init__(self, handle: EngineHandle, make: LabelMaker | None) -> None:
        """Configure; the engine is not called.

        Args:
            handle: the engine.
            make: makes the label of a version; None leaves it alone.

        Raises:
            TypeError: `make` is no function.

        """
        self._handle = handle
        self._make = checked_label(make)
        self._before: str | None = None
        self._now: str | None = None
        self._kept: str | None = None
        self._taken_back_to: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether updates set it."""
        return self._make is not None

    def of(self, manifest: WeightUpdateManifest) -> str:
        """The label of a version.

        Raises:
            TypeError: it is no text.

        """
        assert self._make is not None
        return label_of(manifest, self._make)

    def set(self, label: str) -> None:
        """Set it, if the engine has labels."""
        before = self._handle.label()
        if before is not None:
            self._before, self._now = before, label
            self._kept = self._taken_back_to = None
            self._handle.set_label(label)

    def keep(self) -> str | None:
        """What is set stands from now on.

        Returns:
            The one before, for `take_back_to`; called again, the same.

        """
        if self._before is not None:
            self._before, self._kept = None, self._before
        return self._kept

    def take_back(self) -> None:
        """Bring back the one before; called again, nothing happens."""
        self.take_back_to(self._before)
        if self._before is not None:
            self._before, self._taken_back_to = None, self._before

    def stand(self) -> None:
        """It is no more to be taken back, and is set again where it was taken back already.

        What it is of cannot be undone: another driver has committed it.
        """
        before, self._before, self._taken_back_to = self._taken_back_to, None, None
        if before is not None and self._now is not None and self._handle.label() == before:
            self._handle.set_label(self._now)

    def take_back_to(self, before: str | None) -> None:
        """Bring back this one, unless somebody has set another one since."""
        if before is not None and self._handle.label() == self._now:
            self._handle.set_label(before)
