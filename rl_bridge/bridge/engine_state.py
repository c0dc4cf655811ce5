"""Where an engine stands: at the version that was proven last, or torn between two.

The executor does things to the engine; this remembers what they made of it, and tells the bridge.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    EngineLost,
    TornEngine,
    WeightBridgeUnavailableError,
    add_note,
    describe,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.lifecycle import Event, State
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "Acknowledgement",
    "FineSteps",
    "Standing",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What an acknowledged update left behind.

    Attributes:
        update_id: the update.
        weight_version: its version.
        root: its root; with the proof it says which bytes the engine holds.
        proof: what was found in the engine.
        timings_ms: phase -> milliseconds: attach, verify, prepare, install, prove,
            resume, total; engines tell more apart (pause, cache, label). All but the total add up
            to it, but for what lies between them.
        total_nbytes: bytes of the update.
        peak_rss_nbytes: this process's peak resident memory so far.

    """

    update_id: str
    weight_version: int
    root: str
    proof: InstallProof
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    total_nbytes: int = 0
    peak_rss_nbytes: int = 0


# ---- The fine steps of a consumer's life cycle, where its bridge keeps them.
#
# A consumer of the user's own needs only the four verbs of `WeightConsumer`: there, these do
# nothing.


class FineSteps:
    """Verify, stage, install, tear and undo, and the question where an update stands."""

    def __init__(self, bridge: WeightConsumer) -> None:
        """Look at an executor's bridge; nothing of it is opened."""
        self._consumer = bridge
        self._bridge = bridge if isinstance(bridge, TensorBridge) else None

    def bring(self, manifest: WeightUpdateManifest, *, reads: bool) -> Mapping[str, torch.Tensor]:
        """Import an update.

        Args:
            manifest: the update.
            reads: False leaves verifying to the engine's own processes, if nothing speaks against
                it; the update is then `State.IMPORTED`, until who asked takes `Event.VERIFY`.

        """
        bridge = self._bridge
        # (What a user's subclass does when it imports, or a group's, is not left out.)
        if reads or bridge is None or type(bridge).import_update is not TensorBridge.import_update:
            return self._consumer.import_update(manifest)
        return bridge._consumer_end().import_update(manifest, reads=False)  # noqa: SLF001 - the bridge's other half

    def advance(
        self, manifest: WeightUpdateManifest, event: Event, *, reason: str | None = None
    ) -> None:
        """Take a step.

        Raises:
            IllegalTransition: the update's state does not allow it.

        """
        if self._bridge is not None:
            self._bridge._consumer_end().advance(manifest.update_id, event, reason=reason)  # noqa: SLF001 - the bridge's other half

    def is_in(self, manifest: WeightUpdateManifest, *states: State) -> bool:
        """Whether an update is known to be in one of `states`."""
        # Not opened for the question: where it cannot be, as on a closed bridge, nothing is known.
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return (
            consumer is not None
            and consumer.knows(manifest.update_id)
            and consumer.state(manifest.update_id) in states
        )

    def holds(self, update_id: str) -> bool:
        """Whether an update that was acknowledged is still to be released."""
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return (
            consumer is not None
            and consumer.knows(update_id)
            and consumer.state(update_id) is State.ACKNOWLEDGED
        )

    def has_acknowledged(self, manifest: WeightUpdateManifest) -> bool:
        """Whether an update was acknowledged; an observer may have released it at once."""
        consumer = None if self._bridge is None else self._bridge._consumer  # noqa: SLF001 - the bridge's other half
        return consumer is not None and consumer.has_acknowledged(manifest.update_id)


# ---- the rest builds on the parts above

_LOG = logging.getLogger(__name__)


class Standing:
    """The version that an engine holds, and the updates that tore it."""

    def __init__(self, bridge: WeightConsumer, steps: FineSteps) -> None:
        """Begin with an engine of which nothing is known."""
        self._bridge = bridge
        self._steps = steps
        self.active: WeightUpdateManifest | None = None
        """What was installed and proven last; a torn engine goes back to it."""
        self.update_id: str | None = None
        """The active update; None before the first and after its release."""
        self.weights: Mapping[str, torch.Tensor] = {}
        """Its imported mapping; empty before the first and after its release."""
        self.last_ack: Acknowledgement | None = None
        """What the last acknowledged update left behind."""
        self.superseded: dict[str, None] = {}
        """Updates that were active and are to be let go of; each stays until it is."""
        self.uncommitted: str | None = None
        """Why the adapter did not commit the active version; None if it did."""
        self._is_overtaken = False
        # What was active when it was overtaken, and its `update_id`.
        self._lost: tuple[WeightUpdateManifest, str | None] | None = None
        # The updates that tore the engine, each with its reason, the last one last.
        self._torn: OrderedDict[str, tuple[WeightUpdateManifest, str]] = OrderedDict()

    @property
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another."""
        return bool(self._torn)

    @property
    def version(self) -> int | None:
        """The version that the engine holds; None before the first and while it is torn."""
        return None if self._torn or self.active is None else self.active.weight_version

    @property
    def last_torn(self) -> tuple[WeightUpdateManifest, str]:
        """The update that tore it last, and how."""
        return next(reversed(self._torn.values()))

    def is_torn_by(self, manifest: WeightUpdateManifest) -> bool:
        """Whether this update is one of those that tore it."""
        return manifest.update_id in self._torn

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            TornEngine: it may not.
            WeightBridgeUnavailableError: it never got a verified version.

        """
        if self._torn:
            manifest, reason = self.last_torn
            msg = (
                f"the engine is torn by version {manifest.weight_version}: {reason}. "
                "Call recover(), or install a later version in full."
            )
            raise TornEngine(msg)
        if self.active is None:
            msg = "the engine has no verified version yet. Install one with update_weights first."
            if self._is_overtaken:
                msg = f"{self._told()} Leave it to the other one, or install a version in full."
            raise WeightBridgeUnavailableError(msg)

    def refused(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """An update failed before a byte of the engine changed."""
        if not self.is_torn_by(manifest):
            self._reject(manifest, describe(error))
        add_note(
            error,
            f"version {manifest.weight_version} was refused before the engine was "
            f"touched; {self._told()}",
        )

    def given_back(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """An update was given up before a byte of the engine changed: it may come again."""
        if not self.is_torn_by(manifest):
            try:
                if isinstance(self._bridge, TensorBridge):
                    self._bridge.release_imported(manifest.update_id)
                else:
                    self._bridge.release(manifest.update_id)
            except Exception:  # noqa: BLE001 - logged in full
                _LOG.exception("version %d could not be released", manifest.weight_version)
        told = self._told()
        if isinstance(error, EngineLost):
            told = "what the engine holds is not known before recover() has asked it."
        add_note(
            error,
            f"version {manifest.weight_version} was given up before the engine was "
            f"touched, and may be installed again; {told}",
        )

    def undone(self, manifest: WeightUpdateManifest, error: BaseException) -> None:
        """An update failed at the engine, which is back at what it held before."""
        was_torn = self.is_torn_by(manifest)
        if not was_torn or self._steps.is_in(manifest, State.INSTALLED):
            self._reject(manifest, f"rollout weight install failed: {describe(error)}")
        if was_torn:
            self.healed()
        add_note(error, f"version {manifest.weight_version} was undone; {self._told()}")

    def torn(
        self, manifest: WeightUpdateManifest, error: BaseException, undo: BaseException
    ) -> None:
        """An update failed at the engine, and so did its undo."""
        reason = f"{describe(error)}; undo: {describe(undo)}"
        # It is in the books all the time: between two lines an interrupt may come.
        self._torn[manifest.update_id] = (manifest, reason)
        self._torn.move_to_end(manifest.update_id)
        add_note(error, f"the undo failed too ({describe(undo)}); the engine is torn.")
        # (Else it is torn already, or was released meanwhile, by whoever shares the bridge.)
        if self._steps.is_in(manifest, State.STAGED, State.INSTALLED):
            self._steps.advance(manifest, Event.TEAR, reason=reason)

    def healed(self) -> None:
        """The undo of all that tore the engine is complete."""
        while self._torn:  # one at a time: an interrupt must not lose the others
            self.given_up(self.last_torn[0])

    def activated(
        self, manifest: WeightUpdateManifest, weights: Mapping[str, torch.Tensor]
    ) -> list[WeightUpdateManifest]:
        """An update is installed in full; returns those that tore the engine before it.

        They are in the books until each is given up.
        """
        if self.update_id not in {None, manifest.update_id}:
            self.superseded[str(self.update_id)] = None
        self.active, self._is_overtaken, self._lost = manifest, False, None
        self.update_id = manifest.update_id
        self.weights = weights
        self._torn.pop(manifest.update_id, None)
        return [other for other, _ in self._torn.values()]

    def given_up(self, manifest: WeightUpdateManifest) -> None:
        """Of an update that tore the engine, nothing is left there."""
        self._reject(manifest, "it had torn the engine")
        self._torn.pop(manifest.update_id, None)

    def require_committed(self) -> None:
        """After an undo: make sure that it led back to the active version, and not further.

        Raises:
            TornEngine: the adapter never committed that version.

        """
        if self.uncommitted is not None and self.active is not None:
            msg = (
                f"the adapter's commit of version {self.active.weight_version} had failed "
                f"({self.uncommitted}), so its undo may lead back to the version before. Mend "
                "commit(), and install a later version in full."
            )
            raise TornEngine(msg)

    def overtaken(self) -> None:
        """The engine does not hold the active version any more, by nobody's failure here."""
        self._is_overtaken = True
        if self.active is not None:
            self._lost = self.active, self.update_id
        if self.update_id is not None:
            self.released(self.update_id)
        # (Of a version that the engine has no more, nothing is left to commit.)
        self.active = self.uncommitted = None

    def found_again(self) -> None:
        """The engine is back at what was active before it was overtaken."""
        if self._is_overtaken and self._lost is not None:
            (self.active, self.update_id), self._lost = self._lost, None
            self._is_overtaken = False

    def released(self, update_id: str) -> None:
        """An update is to be let go of; the engine goes on with the bytes that it has."""
        self.superseded[update_id] = None
        if self.update_id == update_id:
            self.weights = {}
            self.update_id = None

    def _reject(self, manifest: WeightUpdateManifest, reason: str) -> None:
        """Tell the bridge. The engine is as it should be, whatever the bridge makes of it."""
        if self._steps.is_in(manifest, State.REJECTED, State.RELEASED):
            return  # by an observer, or a trainer that shares the bridge
        try:
            if self._steps.is_in(manifest, State.TORN):
                self._steps.advance(manifest, Event.UNDO)
            else:
                self._bridge.reject(manifest.update_id, reason)
        except Exception:  # noqa: BLE001 - logged in full
            _LOG.exception("version %d could not be rejected: %s", manifest.weight_version, reason)

    def _told(self) -> str:
        if self._torn:
            return "the engine is still torn."
        if self._is_overtaken:
            return (
                "the engine holds nothing of this executor's any more: another driver has updated "
                "it, or it was started anew."
            )
        if self.active is None:
            return "this executor has installed nothing yet."
        return f"the engine holds version {self.active.weight_version}."
