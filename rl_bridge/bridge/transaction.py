"""One update on its way into an engine: every step, and the way back from each.

An interrupt may come between any two steps, also between a failure and its undo. A transaction
therefore knows how far it got, and `end` may be called at any time, as often as it takes.
"""

import logging
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch

from rl_bridge.bridge.consumer import UnreadTensors, is_shortage, require_verified
from rl_bridge.bridge.engine_state import Acknowledgement, FineSteps, Standing
from rl_bridge.bridge.protocols import WeightConsumer
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import EngineLost, ProofFailed, TornEngine, add_note, describe
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.lifecycle import Event, State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.views import ImportedTensors

__all__ = [
    "PhaseClock",
    "Transaction",
    "commit",
    "let_go",
    "look_whose",
    "settle",
    "undo",
]

T = TypeVar("T")


class PhaseClock:
    """Milliseconds of each phase."""

    def __init__(self) -> None:
        """Start with no phase."""
        self.timings_ms: dict[str, float] = {}
        self._split: set[str] = set()

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Time `action` as `phase`, also if it fails."""
        start = time.perf_counter()
        try:
            return action()
        finally:
            self._add(phase, (time.perf_counter() - start) * 1e3)

    def leave(self, name: str) -> None:
        """A phase of this name was told already: `split` leaves it where it is."""
        self._split.add(name)

    def split(self, phase: str, inner: Mapping[str, float]) -> None:
        """Tell phases inside of `phase` apart from it, each once: all together stay its time."""
        for name, ms in inner.items():
            if name not in self._split:
                self._split.add(name)
                self._add(name, ms)
                self._add(phase, -ms)

    def _add(self, phase: str, ms: float) -> None:
        self.timings_ms[phase] = self.timings_ms.get(phase, 0.0) + ms


def peak_rss_nbytes() -> int:
    """Peak resident memory of this process (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- Letting go of what came before an active version.

_LOG = logging.getLogger(__name__)


def settle(version: int, steps: Mapping[str, Callable[[], object]]) -> None:
    """Take each step, whatever becomes of the others; one that fails is taken once more.

    The version is installed, proven and acknowledged: telling the caller that his update failed
    would be wrong. What could not be let go is said in the log.

    Args:
        version: the active one.
        steps: name -> what to do.

    Raises:
        BaseException: an interrupt, after the last step.

    """
    interrupt: BaseException | None = None
    for name, step in steps.items():
        try:
            _take(step)
        except Exception:  # noqa: BLE001 - logged in full
            _LOG.exception(
                "version %d is active, but the old one was not let go: its %s failed", version, name
            )
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt  # else its traceback would hold this frame, and this frame it


def _take(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:  # noqa: BLE001 - of the second one
        # What a shortage stopped would hold a slot, and with all of them held there is no next
        # update that could let go of it.
        step()


# ---- the rest builds on the parts above

_NOT_IMPORTED: Mapping[str, torch.Tensor] = MappingProxyType({})


class Transaction:
    """One update, from its import to its end.

    Attributes:
        manifest: the update.
        tensors: as imported; empty before.
        is_staged: every reason to refuse was looked for; what is left is to install.
        is_over: nothing is left to do about it.

    """

    def __init__(
        self,
        manifest: WeightUpdateManifest,
        *,
        bridge: WeightConsumer,
        standing: Standing,
        adapter: TransactionalAdapter,
    ) -> None:
        """Begin; nothing is asked of bridge and engine yet."""
        self.manifest = manifest
        self.tensors = _NOT_IMPORTED
        self.is_staged = self.is_over = False
        self._bridge = bridge
        self._steps = FineSteps(bridge)
        self._standing = standing
        self._adapter = adapter
        self._clock = PhaseClock()
        self._proof = InstallProof(method="unproven")
        self._spent_s = 0.0  # in its steps, and not between them
        # How far it got; each is noted before the step that it tells of.
        self._brings_it = False
        self._is_preparing = self._is_installing = self._is_acknowledging = False
        self._has_acknowledged = False

    @property
    def is_acknowledged(self) -> bool:
        """Whether the point of no return is behind it."""
        # Of a bridge of the user's own nothing but its return tells. An interrupt may come before.
        return self._has_acknowledged or (
            self._is_acknowledging and self._steps.has_acknowledged(self.manifest)
        )

    def acknowledgement(self) -> Acknowledgement:
        """What an acknowledged update leaves behind."""
        manifest, timings_ms = self.manifest, dict(self._clock.timings_ms)
        if isinstance(self._bridge, TensorBridge):
            timings_ms = {**self._bridge.timings(manifest.update_id), **timings_ms}
        return Acknowledgement(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
            proof=self._proof,
            timings_ms=timings_ms,
            total_nbytes=manifest.total_nbytes,
            peak_rss_nbytes=peak_rss_nbytes(),
        )

    @property
    def leaves_a_mixture(self) -> bool:
        """Whether the engine may hold parts of it, as long as `end` was not called."""
        return self._is_installing and not self.is_over and not self.is_acknowledged

    def run(self, look: Callable[[WeightUpdateManifest], None]) -> None:
        """Import, prepare, install, prove, resume, acknowledge.

        Args:
            look: refuses what is suspicious, as soon as it is imported and verified.

        Raises:
            Exception: whatever went wrong; call `end` with it.

        """
        self.bring(look, reads=not self._adapter.imports_itself)
        self.stage()
        self.install()

    def bring(self, look: Callable[[WeightUpdateManifest], None], *, reads: bool = True) -> None:
        """The first step of `run`: import and verify. The engine is not asked.

        Args:
            look: as for `run`.
            reads: False leaves it to `stage` to have the bytes verified, by the engine itself.

        Raises:
            Exception: whatever went wrong; call `end` with it.

        """
        manifest, start = self.manifest, time.perf_counter()
        # Else somebody imported it before: then a refusal at the door is not about that one.
        self._brings_it = not self._steps.is_in(manifest, State.IMPORTED, State.VERIFIED)
        self.tensors = self._steps.bring(manifest, reads=reads)
        look(manifest)
        self._spent_s += time.perf_counter() - start

    def stage(self) -> None:
        """The second step of `run`: prepare. Behind it the engine is what it was.

        What was not verified before is verified by then, or refused.

        Raises:
            Exception: whatever went wrong; call `end` with it.

        """
        manifest, tensors, start = self.manifest, self.tensors, time.perf_counter()
        self._is_preparing = True
        self._clock.run("prepare", lambda: self._adapter.prepare(manifest, tensors))
        if self._adapter.imports_itself:
            self._take_over_verified()
        if not self._standing.is_torn_by(manifest):
            self._steps.advance(manifest, Event.STAGE)
        self.is_staged = True
        self._spent_s += time.perf_counter() - start

    def install(self) -> None:
        """The last step of `run`: install, prove, resume, acknowledge.

        Raises:
            Exception: whatever went wrong; call `end` with it.

        """
        manifest, tensors, run = self.manifest, self.tensors, self._clock.run
        start = time.perf_counter()
        self._is_installing = True
        run("install", lambda: self._adapter.install(manifest, tensors))
        self._clock.split("install", self._adapter.phases_ms)
        self._steps.advance(manifest, Event.INSTALL)
        self._proof = run("prove", self._prove)
        run("resume", self._adapter.resume)
        self._clock.split("resume", self._adapter.phases_ms)
        self._spent_s += time.perf_counter() - start
        self._clock.timings_ms["total"] = self._spent_s * 1e3
        self._is_acknowledging = True
        self._acknowledge()
        self._has_acknowledged = True

    def activate(self) -> None:
        """Make an acknowledged update the active one, and let go of what was before."""
        manifest = self.manifest
        steps: dict[str, Callable[[], object]] = {}
        for other in self._standing.activated(manifest, self.tensors):
            steps[f"undo of update {other.update_id}"] = partial(self._standing.given_up, other)
        steps["commit"] = partial(commit, self._adapter, self._standing)
        for update_id in list(self._standing.superseded):
            steps[f"release of update {update_id}"] = partial(self._let_go, update_id)
        settle(manifest.weight_version, steps)
        self._standing.last_ack = ack = self.acknowledgement()
        self.is_over = True
        _LOG.info(
            "version %d is active: %s, %.1f ms",
            manifest.weight_version,
            self._proof.method,
            ack.timings_ms.get("total", 0.0),
        )

    def end(self, error: BaseException, *, was_cut_off: bool = False) -> None:
        """Bring an update that did not come through to its end, whatever that is.

        Args:
            error: what is told as the cause.
            was_cut_off: it is an interrupt's doing, although `error` is none.

        Raises:
            TornEngine: it could not be undone. Not raised beside an `error` that is an interrupt.

        """
        if self.is_over:
            return
        if self.is_acknowledged:
            # An interrupt right behind the point of no return: the update stands.
            self.activate()
            return
        if self._is_installing:
            self._undo(error)
        else:
            if self._is_preparing:
                self._abandon()
                look_whose(self._adapter, self._standing, self._bridge)
            if self.tensors is not _NOT_IMPORTED or (
                self._brings_it and self._steps.is_in(self.manifest, State.IMPORTED, State.VERIFIED)
            ):
                # An engine that is gone says nothing of the update: a fresh one may take it.
                is_given_back = was_cut_off or isinstance(error, EngineLost) or is_shortage(error)
                (self._standing.given_back if is_given_back else self._standing.refused)(
                    self.manifest, error
                )
        self._forget()
        self.is_over = True

    # ---- its steps ------------------------------------------------------------------------------

    def _take_over_verified(self) -> None:
        """The engine's own processes verified the update; only that lets it be staged here."""
        if self._steps.is_in(self.manifest, State.IMPORTED):
            require_verified(self.manifest, self._adapter.verified_root)
            self._steps.advance(self.manifest, Event.VERIFY)
        else:
            self._clock.leave("verify")  # that of this process is told; theirs is in `prepare`
        self._clock.split("prepare", self._adapter.phases_ms)

    def _prove(self) -> InstallProof:
        manifest = self.manifest
        proof = self._adapter.prove()
        given: object = proof
        if not isinstance(given, InstallProof):
            msg = (
                f"version {manifest.weight_version}: the adapter's prove() returned a "
                f"{type(given).__name__}, expected an InstallProof. Give one; where the engine "
                'cannot be read, InstallProof(method="unproven").'
            )
            raise ProofFailed(msg)
        if proof.method != "unproven" and proof.root != manifest.root:
            msg = (
                f"version {manifest.weight_version}: the proof is for root {proof.root}, expected "
                f"{manifest.root}. Let the adapter's prove() read what the engine holds."
            )
            raise ProofFailed(msg)
        return proof

    def _acknowledge(self) -> None:
        manifest = self.manifest
        if not isinstance(self._bridge, TensorBridge):
            self._bridge.acknowledge(manifest.update_id)
            return
        evidence: dict[str, JSONValue] = {
            **self._proof.to_dict(),
            "total_nbytes": manifest.total_nbytes,
            "peak_rss_nbytes": peak_rss_nbytes(),
        }
        timings_ms = self._clock.timings_ms
        self._bridge.acknowledge(manifest.update_id, proof=evidence, timings_ms=timings_ms)

    def _abandon(self) -> None:
        try:
            self._adapter.abandon()
        except Exception:  # noqa: BLE001 - logged in full
            # The update is refused for another reason, which the caller gets.
            _LOG.exception("abandon failed for version %d", self.manifest.weight_version)

    def _undo(self, error: BaseException) -> None:
        """Failed while or after the engine changed: bring it back, or declare it torn."""
        manifest = self.manifest
        try:
            undo(self._adapter, self._standing, self._bridge)
        except BaseException as second:
            self._standing.torn(manifest, error, second)
            self.is_over = True
            if not isinstance(second, Exception):
                add_note(
                    second,
                    f"this interrupted the undo of version {manifest.weight_version}; "
                    "the engine is torn: call recover().",
                )
                raise
            if isinstance(error, Exception):
                msg = (
                    f"version {manifest.weight_version} failed to install ({describe(error)}) and "
                    f"its undo failed too ({describe(second)}). The engine must not serve: call "
                    "recover(), or install a later version in full."
                )
                raise TornEngine(msg) from error
            return
        self._standing.undone(manifest, error)

    def _let_go(self, update_id: str) -> None:
        """Let go of a version that was active; one that stays imported is due again next time."""
        try:
            let_go(update_id, adapter=self._adapter, bridge=self._bridge)
        except Exception:
            if not self._steps.holds(update_id):  # the adapter's affair, then: told once
                self._standing.superseded.pop(update_id, None)
            raise
        self._standing.superseded.pop(update_id, None)

    def _forget(self) -> None:
        """Give a refused update's memory back, although the frames of its exception hold it."""
        # Where the bridge did not take the refusal, they are another one's.
        is_refused = self._steps.is_in(self.manifest, State.REJECTED, State.RELEASED)
        if self._standing.is_torn_by(self.manifest) or not is_refused:
            return
        if isinstance(self.tensors, ImportedTensors | UnreadTensors):
            self.tensors.forget()


def commit(adapter: TransactionalAdapter, standing: Standing) -> None:
    """Have the adapter drop what its undo would need to go back before the active version."""
    try:
        standing.uncommitted = "it was cut off"
        adapter.commit()
        standing.uncommitted = None
    except Exception as error:
        standing.uncommitted = describe(error)
        raise


def undo(adapter: TransactionalAdapter, standing: Standing, bridge: WeightConsumer) -> None:
    """Bring the engine back to the active version, or to another driver's.

    Raises:
        TornEngine: it could not be brought back, or not to that.

    """
    adapter.undo()
    look_whose(adapter, standing, bridge)
    standing.require_committed()


def look_whose(adapter: TransactionalAdapter, standing: Standing, bridge: WeightConsumer) -> None:
    """Where the engine holds something else than the active version, none is active any more."""
    update_id = standing.update_id
    if not adapter.is_overtaken:
        standing.found_again()
        return
    if standing.active is None:
        return
    _LOG.warning("version %d is not in the engine any more", standing.active.weight_version)
    standing.overtaken()
    if update_id is None:
        return
    try:
        let_go(update_id, adapter=adapter, bridge=bridge)  # at once: the engine may need it again
        standing.superseded.pop(update_id, None)
    except Exception:  # noqa: BLE001 - logged in full; it is due again with the next version
        _LOG.exception("update %s could not be let go of", update_id)


def let_go(update_id: str, *, adapter: TransactionalAdapter, bridge: WeightConsumer) -> None:
    """Release an update on both sides; an adapter that raises does not keep it in the bridge."""
    try:
        adapter.release(update_id)
    finally:
        if isinstance(bridge, TensorBridge):
            bridge.release_imported(update_id)  # where it publishes too, others may be reading
        else:
            bridge.release(update_id)
