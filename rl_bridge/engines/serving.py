"""What requests see of an update beside the weights: the pause, cached prefixes, the label.

An engine has one pause, whoever asked for it. Right before a driver pauses its engine for an
update, the ranks note it: so the driver that takes over ends a pause that a dead driver left, and
no pause of the user's. In an undo, caches and label go before the weights: a driver that finds the
old weights lets requests go on, and does nothing else.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rl_bridge.engines.rpc import EngineClient, Replies
from rl_bridge.errors import TornEngine, WeightUpdateRejectedError
from rl_bridge.manifest.model import WeightUpdateManifest

_LOG = logging.getLogger(__name__)

LabelMaker = Callable[[WeightUpdateManifest], str]
"""Makes the version label of an update."""


KEPT = 2
"""Versions of an adapter that stay by default: the active one, and the one before."""


def default_label(manifest: WeightUpdateManifest) -> str:
    """``version@root``: the label on outputs tells which weights made them, not only a number."""
    return f"{manifest.weight_version}@{manifest.root}"


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What requests see of updates; each engine says which pauses and caches it has.

    Attributes:
        pause: what running requests do meanwhile; None does not pause.
        cache: what becomes of what the old weights cached.
        label: makes the version label on outputs; None leaves the label alone.
        keep: versions of each LoRA adapter that stay while nothing is installed.

    """

    pause: str | None
    cache: str
    label: LabelMaker | None = default_label
    keep: int = KEPT

    def check(self, pauses: tuple[str | None, ...], caches: tuple[str, ...]) -> None:
        """Refuse what the engine does not have."""
        for name, given, known in (("pause", self.pause, pauses), ("cache", self.cache, caches)):
            if given not in known:
                *most, last = map(repr, known)
                raise ValueError(f"{name}={given!r}: expected {', '.join(most)} or {last}.")
        if self.label is not None and not callable(self.label):
            raise TypeError(f"label={self.label!r}: expected a function of the manifest, or None.")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep!r}: expected 1 or more: the active version stays.")


class Serving:
    """One driver's hand on what its engine serves."""

    def __init__(self, client: EngineClient, options: ServingOptions) -> None:
        """Configure; the engine is not called."""
        self._client = client
        self._options = options
        self._is_on = False  # the engine is paused, and this driver ends that
        self._is_noted = False  # the ranks may have noted that a driver pauses it
        self._before: str | None = None  # the label, and what it was set to
        self._now: str | None = None

    @property
    def pauses(self) -> bool:
        """Whether the engine is paused for an update."""
        return self._options.pause is not None

    def forget(self) -> None:
        """Nothing is left of the last update: it is committed, or another driver has come."""
        self._is_on = self._is_noted = False
        self._before = None

    # ---- the pause ------------------------------------------------------------------------------

    def adopt(self, replies: Replies) -> None:
        """Take over a pause that an earlier driver began, and did not live to end."""
        if any(reply["paused"] for reply in replies):
            self._is_noted = True
            self._is_on = self._client.is_paused() is not False

    def stop(self, *, undoes: bool = False) -> None:
        """Pause the engine, maybe for weights that it `undoes`; a pause of the user's stays one."""
        is_on = self._is_on or (self.pauses and not self._client.is_paused())
        self._is_noted |= is_on
        self._client.ask("pauses", on=is_on)
        if self._options.pause is not None:
            self._is_on = is_on  # before the pause: its answer may be lost
            self._client.pause(self._options.pause if is_on else None, undoes=undoes)

    def go_on(self) -> None:
        """Let requests go on; the commit that follows ends the ranks' note."""
        if self._is_on:
            self._client.resume()
            self._is_on = False

    def end_pause(self) -> None:
        """Go on after what was refused or undone: no commit follows."""
        self.go_on()
        if self._is_noted:
            self._client.ask("pauses", on=False)
            self._is_noted = False

    # ---- caches ---------------------------------------------------------------------------------

    def drop_old(self, *, everything: bool = False) -> None:
        """Drop what the old weights cached, as the policy says, or `everything`."""
        kept = self._client.drop_caches(None if everything else self._options.cache)
        if kept:
            raise WeightUpdateRejectedError(
                f"what the old weights cached could not be dropped: {kept}. Use a pause that ends "
                "or recomputes requests, or cache='keep' if they may go on from it."
            )

    def drop_undone(self) -> None:
        """Drop everything: requests may have cached keys and values of what is undone."""
        kept = self._client.drop_caches(None)
        if kept:
            raise TornEngine(
                f"the engine keeps what the version that is undone cached: {kept}. Call recover() "
                "when its requests are done."
            )

    # ---- the label ------------------------------------------------------------------------------

    def label_of(self, manifest: WeightUpdateManifest) -> str | None:
        """The label of a version; None if it is left alone."""
        if self._options.label is None:
            return None
        label: object = self._options.label(manifest)
        # An engine takes whatever it is given, and then answers no request any more.
        if not isinstance(label, str):
            raise TypeError(
                f"label of version {manifest.weight_version} is {label!r}, a "
                f"{type(label).__name__}: expected a str. Let label= return one."
            )
        return label

    def set_label(self, label: str | None) -> None:
        """Set it, if the engine has labels; `take_label_back` may follow."""
        before = None if label is None else self._client.label()
        if label is not None and before is not None:
            self._before, self._now = before, label
            self._client.set_label(label)

    def take_label_back(self) -> None:
        """Bring back the label before, unless somebody has set another one since."""
        if self._before is not None:
            if self._client.label() == self._now:
                self._client.set_label(self._before)
            self._before = None

    def keep_label(self) -> None:
        """What is set stands from now on."""
        self._before = None
