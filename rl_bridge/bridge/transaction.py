"""One update on its way into an engine: every step, and the way back from each.

`Transaction.step` is written before the step that it names is taken, and says what has to be taken
back. An exception is taken back at once. What stops a call is not: a second Ctrl-C, or SystemExit.
It leaves an engine torn whose install has begun, and an engine as it was whose install has not. An
update that is acknowledged stands.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import IntEnum
from types import MappingProxyType

import torch

from rl_bridge.bridge.engine_state import Acknowledgement, EngineState, InstalledUpdate
from rl_bridge.errors import (
    ChecksumMismatch,
    EngineLost,
    ProofFailed,
    SessionRefused,
    TornEngine,
    add_note,
    describe,
    is_shortage,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.lifecycle import OVER, Event, State
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.parts import Scope
from rl_bridge.memory.views import ImportedTensors

_LOG = logging.getLogger(__name__)
_NOT_IMPORTED: Mapping[str, torch.Tensor] = MappingProxyType({})
_IMPORTED = frozenset({State.IMPORTED, State.VERIFIED})


class Step(IntEnum):
    """How far an update got."""

    IMPORT = 0
    PREPARE = 1
    PREPARED = 2
    INSTALL = 3
    ACKNOWLEDGE = 4
    OVER = 5


class _PhaseClock:
    """Milliseconds of each phase."""

    def __init__(self) -> None:
        self.timings_ms: dict[str, float] = {}
        self._start = 0.0
        self._split: set[str] = set()

    def start(self) -> None:
        """Begin a phase."""
        self._start = time.perf_counter()

    def stop(self, phase: str) -> None:
        """The phase that was begun last is over, and is called `phase`."""
        self._add(phase, (time.perf_counter() - self._start) * 1e3)

    def leave(self, name: str) -> None:
        """A phase of this name is known already: `split` leaves it as it is."""
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


class Transaction:
    """One update, from its import to its end.

    Attributes:
        manifest: the update.
        installed: what goes into the engine: the update, or what was assembled of its parts.
        tensors: as imported; empty before.
        step: how far it got.
        engine: where it goes.
        result: what it left behind; None unless it came through.

    """

    def __init__(
        self, manifest: WeightUpdateManifest, engine: EngineState, known_as: State | None
    ) -> None:
        """Begin; nothing is asked yet. The bridge knows the update in the state `known_as`."""
        self.manifest = self.installed = manifest
        self.tensors = _NOT_IMPORTED
        self.step = Step.IMPORT
        self.engine = engine
        self.result: InstalledUpdate | None = None
        self._adapter = engine.adapter
        self._imports_itself = engine.adapter.imports_itself
        self._consumer = engine.consumer
        # An update that somebody else imported through this bridge stays his if it is refused here.
        self._is_imported_here = known_as not in _IMPORTED
        self._clock = _PhaseClock()
        self._proof = InstallProof(method="unproven")
        self._started = 0.0
        self._spent_s = 0.0  # in its steps, and not between them

    @property
    def name(self) -> str:
        """For messages."""
        return f"version {self.manifest.weight_version} (update {self.manifest.update_id})"

    def run(self, *steps: Callable[[], None]) -> None:
        """Take some steps; if one fails, take back what was done, and raise its error.

        Raises:
            TornEngine: what was done could not be taken back.
            Exception: a step's own.

        """
        self._started = time.perf_counter()
        try:
            for step in steps:
                step()
        except (Exception, asyncio.CancelledError) as error:
            self.end(error)  # a task that was cancelled has the time to undo
            raise
        except BaseException as error:
            self.cut_off(error)
            raise
        self._spent_s += time.perf_counter() - self._started

    # ---- its steps ------------------------------------------------------------------------------

    def bring(self, *, reads: bool = False) -> None:
        """Import, and look for what is suspicious. The engine is not asked.

        The bytes are verified here, or in `stage` by the processes of an engine that imports them
        itself, unless this side `reads` them too.
        """
        manifest = self.manifest
        scope = Scope.ALL if reads or not self._imports_itself else Scope.LEASE
        self.tensors = self._consumer.import_update(manifest, scope=scope)
        if not self._imports_itself and isinstance(self.tensors, ImportedTensors):
            self.installed = manifest = self.tensors.manifest or manifest
        if self.engine.watch.is_on:
            self.engine.watch.judge(manifest)

    def stage(self) -> None:
        """Find every reason to refuse. Behind it the engine is what it was."""
        manifest, adapter, clock = self.installed, self._adapter, self._clock
        self.step = Step.PREPARE
        clock.start()
        adapter.prepare(manifest, self.tensors)
        clock.stop("prepare")
        if self._imports_itself:
            if self._consumer.state(manifest.update_id) is State.IMPORTED:
                _require_verified(manifest, adapter.verified_root)
                self._consumer.advance(manifest.update_id, Event.VERIFY)
            else:
                clock.leave("verify")  # that of this process; the engine's is inside of `prepare`
            clock.split("prepare", adapter.phases_ms)
        if manifest.update_id not in self.engine.torn_by:
            self._consumer.advance(manifest.update_id, Event.STAGE)
        self.step = Step.PREPARED

    def install(self) -> None:
        """Install, prove, let the engine serve it, acknowledge."""
        manifest, adapter, clock = self.installed, self._adapter, self._clock
        self.step, self.engine.changing = Step.INSTALL, manifest
        clock.start()
        adapter.install(manifest, self.tensors)
        clock.stop("install")
        clock.split("install", adapter.phases_ms)
        self._consumer.advance(manifest.update_id, Event.INSTALL)
        clock.start()
        self._proof = self._checked_proof(adapter.prove())
        clock.stop("prove")
        clock.start()
        adapter.resume()
        clock.stop("resume")
        clock.split("resume", adapter.phases_ms)
        self.step = Step.ACKNOWLEDGE
        self._acknowledge()

    def activate(self) -> None:
        """Make the acknowledged update the active one, and release what was before."""
        ack = self._acknowledgement()
        self.result = self.engine.activate(self.installed, self.tensors, ack)
        if self.engine.watch.is_on:
            self.engine.watch.note(self.installed)
        self.step = Step.OVER
        total = ack.timings_ms.get("total", 0.0)
        _LOG.info("version %d is active: %s, %.1f ms", ack.weight_version, ack.proof.method, total)

    # ---- its end, if it did not come through ----------------------------------------------------

    def end(self, error: BaseException) -> None:
        """End the update as far as it got: refuse it, take it back, or activate it.

        What was acknowledged stands, and is activated; what had begun to be installed is taken
        back; all else is refused before the engine changes.

        Args:
            error: the cause.

        Raises:
            TornEngine: it could not be undone.
            SessionRefused: another driver has the engine by now.

        """
        step = self.step
        if step is Step.OVER:
            return
        if step >= Step.INSTALL and self._consumer.has_acknowledged(self.manifest.update_id):
            self.activate()  # it failed behind the point of no return: the update stands
            return
        self.step = Step.OVER
        if step >= Step.INSTALL:
            self._undo(error)
        else:
            self._refuse(error, step)
        self._forget()

    def cut_off(self, error: BaseException) -> None:
        """Something stops the call at once: nothing is undone that takes long."""
        manifest = self.manifest
        if self.step < Step.INSTALL or self._consumer.has_acknowledged(manifest.update_id):
            self.end(error)
        elif self.step is not Step.OVER:
            self.step = Step.OVER
            add_note(
                error,
                f"this stopped the install of version {manifest.weight_version}; the engine is "
                "torn: call recover().",
            )
            self.engine.note_torn(manifest, f"{describe(error)} stopped its install")

    def _refuse(self, error: BaseException, step: Step) -> None:
        """It failed before a byte of the engine changed."""
        manifest = self.manifest
        if step >= Step.PREPARE:
            try:
                self._adapter.abandon()
            except Exception:  # noqa: BLE001 - logged in full; the caller gets the first failure
                _LOG.exception("abandon failed for version %d", manifest.weight_version)
            self.engine.check_owner()
        if self.tensors is not _NOT_IMPORTED or (
            self._is_imported_here and self._consumer.state(manifest.update_id) in _IMPORTED
        ):
            # An engine that is gone says nothing of the update: a fresh one may take it.
            may_come_again = isinstance(error, EngineLost) or is_shortage(error)
            self.engine.note_refused(manifest, error, may_come_again=may_come_again)

    def _undo(self, error: BaseException) -> None:
        """It failed while or after the engine changed: bring it back, or declare it torn."""
        manifest = self.manifest
        try:
            self.engine.undo()
        except SessionRefused as second:
            # Whoever has the engine now ends what was left in it; nothing is torn for this side.
            self.engine.note_healed()
            self.engine.note_taken()
            self.engine.note_undone(manifest, second, may_come_again=True)
            self._forget()
            raise second from error
        except Exception as second:  # noqa: BLE001 - reported by a `TornEngine`
            # (A driver's undo says so of a lost engine by a TornEngine with that as its cause.)
            for one in (second, second.__cause__):
                if isinstance(one, EngineLost):
                    self.engine.note_lost(one)
                    break
            self.engine.note_torn(manifest, f"{describe(error)}; undo: {describe(second)}")
            add_note(error, f"the undo failed too ({describe(second)}); the engine is torn.")
            raise TornEngine(
                f"version {manifest.weight_version} failed to install ({describe(error)}) and "
                f"its undo failed too ({describe(second)}). The engine must not serve: call "
                "recover(), or install a later version in full."
            ) from error
        except BaseException as second:
            self.engine.note_torn(manifest, f"{describe(error)}; undo: {describe(second)}")
            add_note(
                second,
                f"this stopped the undo of version {manifest.weight_version}; the engine is torn: "
                "call recover().",
            )
            raise
        self.engine.note_undone(manifest, error, may_come_again=is_shortage(error))

    def _forget(self) -> None:
        """Give a refused update's memory back, although the frames of its exception hold it."""
        # Where the bridge did not take the refusal, it is another one's import.
        is_refused = self._consumer.state(self.manifest.update_id) in OVER
        if not is_refused or self.manifest.update_id in self.engine.torn_by:
            return
        if isinstance(self.tensors, ImportedTensors):
            self.tensors.forget()

    # ---- inside ---------------------------------------------------------------------------------

    def _checked_proof(self, proof: InstallProof) -> InstallProof:
        manifest = self.installed
        given: object = proof
        if not isinstance(given, InstallProof):
            raise ProofFailed(
                f"version {manifest.weight_version}: the adapter's prove() returned a "
                f"{type(given).__name__}, expected an InstallProof. Give one; where the engine "
                'cannot be read, InstallProof(method="unproven").'
            )
        if proof.method != "unproven" and proof.root != manifest.root:
            raise ProofFailed(
                f"version {manifest.weight_version}: the proof is for root {proof.root}, expected "
                f"{manifest.root}. Let the adapter's prove() read what the engine holds."
            )
        return proof

    def _acknowledge(self) -> None:
        spent_s = self._spent_s + time.perf_counter() - self._started
        self._clock.timings_ms["total"] = spent_s * 1e3
        evidence = {
            **asdict(self._proof),
            "total_nbytes": self.installed.table.total_nbytes,
            "peak_rss_nbytes": _peak_rss_nbytes(),
        }
        self._clock.timings_ms = self._consumer.acknowledge(
            self.installed.update_id, proof=evidence, timings_ms=self._clock.timings_ms
        )

    def _acknowledgement(self) -> Acknowledgement:
        manifest = self.installed
        return Acknowledgement(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            root=manifest.root,
            proof=self._proof,
            timings_ms=self._clock.timings_ms,
            total_nbytes=manifest.table.total_nbytes,
            peak_rss_nbytes=_peak_rss_nbytes(),
        )


def _require_verified(manifest: WeightUpdateManifest, root: str) -> None:
    """Take an engine's word that its processes verified an update, if it is about this one."""
    if root != manifest.root:
        raise ChecksumMismatch(
            f"version {manifest.weight_version}: the engine's processes verified root {root!r}, "
            f"expected {manifest.root!r}. Use the same release of rl_bridge in all of them; an "
            "adapter that imports_itself must tell what they verified."
        )


def _peak_rss_nbytes() -> int:
    """Peak resident memory of this process (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
