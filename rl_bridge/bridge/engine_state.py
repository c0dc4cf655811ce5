"""What an engine holds: the version that was proven last, or a mixture of two.

The bytes of an engine change between `EngineState.changing` being set and being cleared again. If
a call ends in between, because a second Ctrl-C stopped it, the engine is torn: it must not serve
until an undo is complete or a later version is installed in full.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial

import torch

from rl_bridge.bridge.consumer import AnyConsumer, PlainConsumer
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    EngineLost,
    SessionRefused,
    TornEngine,
    WeightBridgeUnavailableError,
    add_note,
    describe,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.lifecycle import OVER, Event, State
from rl_bridge.manifest.compare import Policy, Watch
from rl_bridge.manifest.model import WeightUpdateManifest

_LOG = logging.getLogger(__name__)
_TEARABLE = frozenset({State.STAGED, State.INSTALLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What an acknowledged update left behind.

    Attributes:
        update_id: the update.
        weight_version: its version.
        root: its root; with the proof it says which bytes the engine holds.
        proof: what was found in the engine.
        timings_ms: phase -> milliseconds: attach, verify, prepare, install, prove,
            resume, total; engines tell more apart (pause, cache, label). The phases sum to roughly
            `total`.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class InstalledUpdate(Acknowledgement, Mapping[str, torch.Tensor]):
    """What `update_weights` returns: the acknowledgement, and the update's tensors by name.

    It is true, whether or not the tensors are here: the update is installed. It equals every
    acknowledgement that says the same.

    Attributes:
        tensors: the imported mapping, which this is, too; None where another process installed the
            update. Then asking for names or tensors is a `WeightBridgeUnavailableError`.

    """

    tensors: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def of(
        cls, ack: Acknowledgement, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> "InstalledUpdate":
        """What an acknowledgement is of, with the tensors that were imported for it here."""
        told = {item.name: getattr(ack, item.name) for item in fields(Acknowledgement)}
        return cls(**told, tensors=tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._here()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._here()  # without reading its tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._here())

    def __len__(self) -> int:
        return len(self._here())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Acknowledgement):
            return NotImplemented
        told = (item.name for item in fields(Acknowledgement))
        return all(getattr(self, name) == getattr(other, name) for name in told)

    def __hash__(self) -> int:
        return hash(self.update_id)

    def __repr__(self) -> str:
        held = "tensors in another process" if self.tensors is None else repr(self.tensors)
        return f"<version {self.weight_version} installed: proof by {self.proof.method}, {held}>"

    def _here(self) -> Mapping[str, torch.Tensor]:
        if self.tensors is None:
            raise WeightBridgeUnavailableError(
                f"version {self.weight_version} was installed by another process, which has its "
                "tensors, expected one that this process imported: here are its proof, root and "
                "timings. Import the manifest over a bridge of this process to get its tensors."
            )
        return self.tensors


@dataclass(slots=True)
class Losses:
    """What is known of an engine's life, by all of its streams of versions together.

    Attributes:
        count: how often the engine was gone when a stream asked it.
        seen: so many of these losses lie before an answer of the engine.

    """

    count: int = 0
    seen: int = 0


class EngineState:
    """The version that an engine holds, and the updates that tore it; the bridge hears of both.

    Attributes:
        bridge: the consumer's bridge.
        adapter: how tensors get into the engine.
        busy: held while a call of the executor may change the engine.
        changing: the update whose bytes the engine may hold in part. It is set before its install
            begins, and cleared when the update is active or undone.
        active: what was installed and proven last; a torn engine goes back to it.
        update_id: the active update; None before the first and after its release.
        weights: its imported mapping; empty before the first and after its release.
        last_ack: what the last acknowledged update left behind.
        watch: what its updates have been so far.
        torn_by: the updates that tore it, each with the reason, the last one last.
        losses: of the engine, whichever of its streams notices them.

    """

    def __init__(
        self,
        bridge: TensorBridge | PlainConsumer,
        adapter: TransactionalAdapter,
        suspicious: Policy,
        losses: Losses | None = None,
    ) -> None:
        """Begin with an engine of which nothing is known; another stream's `losses` are its own."""
        self.bridge = bridge
        self.adapter = adapter
        self.busy = threading.Lock()
        self.changing: WeightUpdateManifest | None = None
        self.active: WeightUpdateManifest | None = None
        self.update_id: str | None = None
        self.weights: Mapping[str, torch.Tensor] = {}
        self.last_ack: Acknowledgement | None = None
        self.watch = Watch(suspicious)
        self._uncommitted: str | None = None  # why the adapter did not commit the active version
        self._superseded: dict[str, None] = {}  # were active, and are still to be released
        self.torn_by: dict[str, tuple[WeightUpdateManifest, str]] = {}
        self._is_taken = False  # by another driver
        self.losses = losses or Losses()
        self._seen = 0  # losses that lie before an answer to this stream

    @cached_property
    def consumer(self) -> AnyConsumer:
        """The bridge's consuming half; opened when it is first asked for."""
        return self.bridge.consumer

    @property
    def is_torn(self) -> bool:
        """Whether the engine is neither at its version nor at another."""
        # Another thread may look at it in the middle of an update, which is not torn.
        return bool(self.torn_by) or (self.changing is not None and not self.busy.locked())

    @property
    def version(self) -> int | None:
        """The version that the engine holds; None before the first, while it is torn, or gone."""
        if self.is_torn or self.is_lost or self.active is None:
            return None
        return self.active.weight_version

    @property
    def is_lost(self) -> bool:
        """Whether the engine was gone when it was asked last, by whichever stream of versions."""
        return max(self._seen, self.losses.seen) < self.losses.count

    @property
    def last_torn(self) -> tuple[WeightUpdateManifest, str]:
        """The update that tore it last, and how."""
        if self.torn_by:
            return next(reversed(self.torn_by.values()))
        assert self.changing is not None
        return self.changing, "an interrupt stopped its install"

    def check_servable(self) -> None:
        """Refuse to serve what is no verified version. See `RolloutExecutor`."""
        if self.is_torn:
            manifest, reason = self.last_torn
            raise TornEngine(
                f"the engine is torn by version {manifest.weight_version}: {reason}. "
                "Call recover(), or install a later version in full."
            )
        self.check_there()
        if self.active is None:
            msg = "the engine has no verified version yet. Install one with update_weights first."
            if self._is_taken:
                msg = f"{self._held()} Leave it to the other one, or install a version in full."
            raise WeightBridgeUnavailableError(msg)

    def check_there(self) -> None:
        """Refuse to speak for an engine that was gone when it was asked last."""
        if self.is_lost:
            raise EngineLost(
                "the engine was lost when it was asked last, and what it holds is not known. Call "
                "recover(), which asks it again; or start a fresh engine, and install the current "
                "version in it."
            )

    # ---- what became of an update ---------------------------------------------------------------

    def activate(
        self,
        manifest: WeightUpdateManifest,
        weights: Mapping[str, torch.Tensor],
        ack: Acknowledgement,
    ) -> InstalledUpdate:
        """An update is acknowledged: commit it, and release what came before.

        Nothing of this may look like the update's failure, so it is logged. Each step is tried
        twice: what a shortage stopped would hold a slot, and with all of them held there is no next
        update that could release it.
        """
        if self.update_id not in {None, manifest.update_id}:
            self._superseded[str(self.update_id)] = None
        self.active, self.update_id, self.weights = manifest, manifest.update_id, weights
        self.changing, self._is_taken = None, False
        if self.losses.count:
            # An engine that was started anew in between holds nothing of the other streams.
            self.note_answer(is_same=not self.adapter.is_overtaken)
        self.torn_by.pop(manifest.update_id, None)
        steps: dict[str, Callable[[], object]] = {"undo": self.note_healed, "commit": self._commit}
        for update_id in self._superseded:
            steps[f"release of update {update_id}"] = partial(self.release, update_id)
        for name, step in steps.items():
            for is_last in (False, True):
                try:
                    step()
                    break
                except Exception:  # noqa: BLE001 - logged in full
                    if is_last:
                        _LOG.exception(
                            "version %d is active, but the old one was not released: its %s failed",
                            manifest.weight_version,
                            name,
                        )
        self.last_ack = ack
        return InstalledUpdate.of(ack, weights)

    def note_refused(
        self, manifest: WeightUpdateManifest, error: BaseException, *, may_come_again: bool
    ) -> None:
        """An update failed before a byte of the engine changed."""
        what = "refused before the engine was touched"
        if may_come_again:
            what = "given up before the engine was touched, and may be installed again"
        if manifest.update_id not in self.torn_by:
            if may_come_again:
                self._give_back(manifest)
            else:
                self._reject(manifest, describe(error))
        held = self._held()
        if isinstance(error, EngineLost):
            self.note_lost(error)
            held = "what the engine holds is not known before recover() has asked it."
        add_note(error, f"version {manifest.weight_version} was {what}; {held}")

    def note_undone(
        self, manifest: WeightUpdateManifest, error: BaseException, *, may_come_again: bool
    ) -> None:
        """An update failed at the engine, which is back at what it held before."""
        self.changing = None
        was_torn = manifest.update_id in self.torn_by
        state = self.consumer.state(manifest.update_id)
        if may_come_again and not was_torn and state in {State.STAGED, State.INSTALLED}:
            if state is State.INSTALLED:
                self.consumer.advance(manifest.update_id, Event.UNDO)
            self._give_back(manifest)
        elif not was_torn or state is State.INSTALLED:
            self._reject(manifest, f"rollout weight install failed: {describe(error)}")
        if was_torn:
            self.note_healed()
        # (Another driver may have ended it otherwise.)
        what = "given up" if isinstance(error, EngineLost) else "undone"
        if isinstance(error, EngineLost):
            self.note_lost(error)
        else:
            self.note_answer(is_same=not self.adapter.is_overtaken)
        add_note(error, f"version {manifest.weight_version} was {what}; {self._held()}")

    def note_torn(self, manifest: WeightUpdateManifest, reason: str) -> None:
        """The engine holds parts of an update, and is not back at what it held before."""
        self.torn_by.pop(manifest.update_id, None)
        self.torn_by[manifest.update_id] = (manifest, reason)
        self.changing = None
        # An update in another state is torn already, or was released through the bridge meanwhile.
        if self.consumer.state(manifest.update_id) in _TEARABLE:
            self.consumer.advance(manifest.update_id, Event.TEAR, reason=reason)

    def note_healed(self) -> None:
        """Nothing of the updates that tore it is left in the engine."""
        while self.torn_by:
            manifest, _ = self.last_torn
            self._reject(manifest, "it had torn the engine")
            del self.torn_by[manifest.update_id]

    def note_lost(self, error: EngineLost) -> None:
        """The engine was gone, for all of its streams; or it answered, and refused this driver."""
        if isinstance(error, SessionRefused):
            self.note_answer(is_same=False)
        else:
            self.losses.count += 1

    def note_answer(self, *, is_same: bool) -> None:
        """The engine has answered this stream; where it is the same as before, to all of them."""
        self._seen = self.losses.count
        if is_same:
            self.losses.seen = self.losses.count

    def note_taken(self) -> None:
        """Another driver has the engine, or it was started anew: it holds none of our versions."""
        if self.active is not None:
            _LOG.warning("version %d is not in the engine any more", self.active.weight_version)
        update_id, self.active, self._uncommitted, self._is_taken = self.update_id, None, None, True
        self.note_answer(is_same=False)
        if update_id is not None:
            try:
                self.release(update_id)  # at once: the engine may need it again
            except Exception:  # noqa: BLE001 - logged in full
                _LOG.exception("update %s could not be released", update_id)

    # ---- the adapter ----------------------------------------------------------------------------

    def _commit(self) -> None:
        """Have the adapter drop what its undo would need to go back before the active version."""
        try:
            self.adapter.commit()
            self._uncommitted = None
        except Exception as error:
            self._uncommitted = describe(error)
            raise

    def undo(self) -> None:
        """Bring the engine back to the active version."""
        self.adapter.undo()
        self.check_owner()
        if self._uncommitted is not None and self.active is not None:
            raise TornEngine(
                f"the adapter's commit of version {self.active.weight_version} had failed "
                f"({self._uncommitted}), so its undo may lead back to the version before. Mend "
                "commit(), and install a later version in full."
            )

    def check_owner(self) -> None:
        """If another driver has updated the engine, none of our versions is active any more."""
        if self.active is not None and self.adapter.is_overtaken:
            self.note_taken()

    # ---- releasing ------------------------------------------------------------------------------

    def release(self, update_id: str) -> None:
        """Release an update on both sides; if the adapter raises, the bridge releases it too."""
        if self.update_id == update_id:
            self.weights, self.update_id = {}, None
        self._superseded[update_id] = None
        try:
            self.adapter.release(update_id)
        finally:
            if "consumer" in vars(self):  # otherwise nothing came by here
                self.consumer.release(update_id)
            else:
                self.bridge.release_imported(update_id)
            del self._superseded[update_id]

    def release_superseded(self) -> None:
        """Release what was active before, and could not be released then."""
        for update_id in list(self._superseded):
            self.release(update_id)

    def _give_back(self, manifest: WeightUpdateManifest) -> None:
        """Release an update that may be imported again."""
        try:
            self.consumer.release(manifest.update_id)
        except Exception:  # noqa: BLE001 - logged in full
            _LOG.exception("version %d could not be released", manifest.weight_version)

    def _reject(self, manifest: WeightUpdateManifest, reason: str) -> None:
        """Tell the bridge. The engine is as it should be, whatever the bridge makes of it."""
        state = self.consumer.state(manifest.update_id)
        if state in OVER:
            return  # by an observer, or a trainer that shares the bridge
        try:
            if state is State.TORN:
                self.consumer.advance(manifest.update_id, Event.UNDO)
            else:
                self.consumer.reject(manifest.update_id, reason)
        except Exception:  # noqa: BLE001 - logged in full
            _LOG.exception("version %d could not be rejected: %s", manifest.weight_version, reason)

    def _held(self) -> str:
        if self.torn_by:
            return "the engine is still torn."
        if self._is_taken:
            return (
                "the engine holds nothing of this executor's any more: another driver has updated "
                "it, it was started anew, or it threw its weights away to sleep."
            )
        if self.active is None:
            return "this executor has installed nothing yet."
        return f"the engine holds version {self.active.weight_version}."
