"""The engine's part in an update: it imports, verifies, installs, proves and undoes.

It lives in the scheduler's process, at the model, and is asked by `rl_bridge.engines.sglang
.calls`, between two steps of the model. Several drivers may have one engine: it knows whose the
update is, and the pause, and what the label was before.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.engines.rank_bridges import EngineBridges, acknowledge, let_go
from rl_bridge.engines.sglang import votes
from rl_bridge.engines.sglang.compat import version
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from rl_bridge.engines.sglang.support import require_droppable, require_supported
from rl_bridge.engines.vllm.pauses import PauseNote
from rl_bridge.errors import TornEngine, WeightUpdateRejectedError, describe
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.views import ImportedTensors

__all__ = [
    "SGLangRank",
]

Payload = Mapping[str, Any]
Reply = dict[str, Any]


class SGLangRank:
    """One rank's model with what is under way in it. Not thread-safe: SGLang asks in turn."""

    def __init__(self, model: torch.nn.Module, flush: Callable[[], bool | None]) -> None:
        """Look at the model; nothing is opened before the first update.

        Args:
            model: the rank's.
            flush: drops cached prefixes; whether it did, or None where that is not all there is.

        """
        self._model = model
        self._flush = flush
        self._engine = uuid.uuid4().hex
        self._options: Reply = {}
        self._installer = SGLangModelInstaller(model, num_ranks=votes.world_size())
        self._bridges = EngineBridges("sglang")
        self._active: WeightUpdateManifest | None = None
        self._pending: WeightUpdateManifest | None = None
        self._driver: str | None = None  # whose that is: two may have the same update
        self._pause = PauseNote()
        self._labels: list[str] | None = None  # before the pending update, and with it
        self._label: str | None = None  # of the active one
        self._is_imported = False
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._proof: InstallProof | None = None
        self._timings_ms: dict[str, float] = {}
        self._torn = ""
        self._is_committing = False
        self.is_open = False
        """Whether its model may be a mixture: between the begin of an install and its end."""

    def describe(self, given: Payload) -> Reply:
        """What it holds, and whether what is under way is that driver's who asks."""
        self._settle()
        active, pending = self._active, self._pending
        return {
            "sglang": version(),
            "engine": self._engine,
            "device": self._device(),
            "update_id": None if active is None else active.update_id,
            "weight_version": None if active is None else active.weight_version,
            "root": None if active is None else active.root,
            "pending": None if pending is None else pending.update_id,
            "mine": pending is not None and self._driver == given.get("driver"),
            "pausing": self._pause.driver,
            "labels": self._labels,
            "label": self._label if self._labels is None else self._labels[1],
            "begun": self.is_open,
            "by_sglang": self.is_open and not self._is_imported,
            "torn": self._torn,
            "model": type(self._model).__name__,
        }

    def prepare(self, given: Payload) -> Reply:
        """Import and verify, if this is where the update is imported; make the second copy.

        Raises:
            WeightBridgeError: refused; nothing of the model was written.

        """
        require_supported(self._device())
        if given.get("drops"):
            require_droppable()  # here already: nothing is installed that had to be undone
        self._require_closed()
        self._end(None)  # the driver that staged it may have died, and begin anew
        manifest = WeightUpdateManifest.from_json(str(given.get("manifest", "")))
        self._configure(dict(given.get("options") or {}))
        start, told = time.perf_counter(), {}
        self._driver, self._is_imported = given.get("driver"), bool(given.get("import"))
        self._pending = manifest
        try:
            if self._is_imported:
                bridge = self._bridges.of(manifest, votes.this_rank())
                self._tensors = bridge.import_update(manifest)
                told = bridge.timings(manifest.update_id)
            imported = time.perf_counter()
            self._installer.prepare(manifest, self._tensors)
        except BaseException as error:
            self._end(None if is_shortage(error) else describe(error))
            raise
        self._timings_ms = {
            "import": (imported - start) * 1e3,
            "stage": (time.perf_counter() - imported) * 1e3,
        }
        reply: Reply = {
            "timings_ms": {**told, **self._timings_ms},
            "verified": manifest.root if self._is_imported else "",
        }
        if given.get("cuts"):
            reply["cuts"] = [[cut.to_json() for cut in self._installer.cuts(manifest)]]
        return reply

    def pauses(self, given: Payload) -> Reply:
        """Note right before the engine is paused whose pause it is: that driver alone ends it.

        Without ``"pauses": true`` it is over, or about to be. Who names the update goes on with it,
        or ``"undoes"`` it: a rank that has done so may be asked again, as another one failed to.

        Raises:
            WeightUpdateRejectedError: another driver's update is here.

        """
        if given.get("undoes") and self._pending is None:
            self._require_nobody_elses(str(given["update_id"]))
        elif "update_id" in given:
            self._meant(given)
        driver, left = str(given.get("driver")), 0
        if given.get("pauses"):
            self._pause.begin(driver)
        elif "update_id" not in given:
            left = self._pause.end(driver, int(given.get("heard", 0)))
        elif self._pause.driver == driver:
            self._pause.clear()  # it goes on behind this, which ends what others left to it, too
        return {"left": left}

    def leaves(self, given: Payload) -> Reply:
        """That driver is done with what was refused or undone: whether the engine stays paused.

        It does where another driver has paused it by now, who ends both pauses; and where what is
        half-way could not be taken back.
        """
        driver = str(given.get("driver"))
        is_others = self._pause.leave(driver)
        return {"stays": is_others or (self._pause.driver == driver and self.is_open)}

    def take_over(self, given: Payload) -> Reply:
        """Give what is under way, and its pause, to the driver that ends it; its own is shut out.

        Raises:
            WeightUpdateRejectedError: it was begun since that driver looked.

        """
        if not given.get("begun"):
            self._require_closed()
        self._driver = str(given.get("driver"))
        self._pause.begin(self._driver)
        return {}

    def install(self, given: Payload) -> Reply:
        """Install what was imported; or note that SGLang's own load comes next.

        Raises:
            WeightUpdateRejectedError: another driver came in between.
            Exception: the loader's. The executor asks for the undo.

        """
        manifest = self._meant(given)
        start = time.perf_counter()
        self.is_open = True
        if self._is_imported:
            self._installer.install(manifest, self._tensors)
        else:
            self._installer.begin()
        self._timings_ms["install"] = (time.perf_counter() - start) * 1e3
        return {"timings_ms": self._timings_ms}

    def takes_from(self, driver: str) -> bool:
        """Whether that driver's update is the one whose load comes by SGLang's own routes now."""
        return self.is_open and not self._is_imported and self._driver == driver

    def prove(self, given: Payload) -> Reply:
        """Read what the model holds.

        Raises:
            ProofFailed: not this update.

        """
        manifest = self._meant(given)
        start = time.perf_counter()
        if not self._is_imported:
            parts = list(given.get("parts") or [[]] * votes.world_size())[votes.this_rank()]
            self._installer.expect([bytes.fromhex(part) for part in parts])
        proof = self._installer.prove()
        if proof.root != manifest.root:
            msg = (
                f"the engine holds root {proof.root}, expected {manifest.root}. Install the update "
                "again."
            )
            raise WeightUpdateRejectedError(msg)
        self._proof = proof
        self._timings_ms["prove"] = (time.perf_counter() - start) * 1e3
        return {"proof": proof.to_dict(), "timings_ms": self._timings_ms}

    def is_refused(self, given: Payload) -> None:
        """Another rank has no proof: this one's is worth nothing."""
        if self._is_pending(given):
            self._proof = None

    def resume(self, given: Payload) -> Reply:
        """Let its driver label the proven update; note the label that an undo goes back to.

        Raises:
            WeightUpdateRejectedError: another driver came in between, or it is not proven.

        """
        self._require_proof(self._meant(given))
        self._labels = given.get("labels")
        return {}

    def flush(self, given: Payload) -> Reply:
        """Drop cached prefixes; the memory that they are in stays SGLang's.

        Raises:
            WeightBridgeUnavailableError: ``"all"`` are to go, and some are out of reach.

        """
        if given.get("all"):
            require_droppable()
        return {"flushed": self._flush()}

    def abandon(self, given: Payload) -> Reply:
        """Let go of what was staged and not begun to be installed: that of who names it, or any.

        With ``"reason": null`` the update was not refused, and may come again.
        """
        if not self.is_open and ("update_id" not in given or self._is_pending(given)):
            reason = given.get("reason")
            self._end(None if reason is None else str(reason))
        return {}

    def undo(self, given: Payload) -> Reply:
        """Put back what is not committed; without any, nothing happens.

        Who names no update means whosever is here.

        Raises:
            TornEngine: it could not be put back.
            WeightUpdateRejectedError: that update is committed, or another driver's is begun.

        """
        self._settle()
        update_id = given.get("update_id")
        if self._pending is None or (update_id is not None and not self._is_pending(given)):
            if update_id is not None:
                self._require_nobody_elses(str(update_id))
            return {}
        try:
            self._installer.undo()
        except Exception as error:
            self._torn = describe(error)
            shown = self._pending.weight_version
            msg = f"version {shown}: the undo failed: {self._torn}. Call recover()."
            raise TornEngine(msg) from error
        self._torn = ""
        self.is_open = False
        self._end("undone by the executor")
        return {}

    def commit(self, given: Payload) -> Reply:
        """Acknowledge the proven update; it is what an undo goes back to from now on.

        Raises:
            WeightUpdateRejectedError: there is none, or another one, or it is not proven.

        """
        update_id = given.get("update_id")
        active = None if self._active is None else self._active.update_id
        if update_id is not None and update_id == active and not self._is_pending(given):
            return {}  # asked again, because the answer was lost
        self._require_proof(self._meant(given))
        self._is_committing = True
        return self._settle()

    def _settle(self) -> Reply:
        """End a commit that was begun: it was proven on all ranks, and forward is the only way."""
        manifest, proof = self._pending, self._proof
        if not self._is_committing or manifest is None or proof is None:
            return {}
        self._installer.commit()  # where it fails it is done again: it is proven still
        self._active = manifest
        self._let_go()
        answer: Reply = {}
        if self._is_imported:
            answer = acknowledge(
                self._bridges.of(manifest, votes.this_rank()), manifest, proof, self._timings_ms
            )
        if self._labels is not None:
            self._label, self._labels = self._labels[1], None
        self._pending = self._proof = None
        self.is_open = self._is_committing = False  # last: until here it is done again
        return answer

    # ---- inside ---------------------------------------------------------------------------------

    def _device(self) -> str:
        return next(self._model.parameters()).device.type

    def _configure(self, options: Reply) -> None:
        if options != self._options:
            wanted = dict(options)
            transports, ranks = wanted.pop("transports", {}), votes.world_size()
            self._installer = SGLangModelInstaller(self._model, num_ranks=ranks, **wanted)
            self._bridges.configure(transports)
            self._options = options

    def _require_closed(self) -> None:
        if self.is_open:
            assert self._pending is not None
            msg = (
                f"update {self._pending.update_id} is installed and not committed. Let its driver "
                "end it, or undo it, before the next one."
            )
            raise WeightUpdateRejectedError(msg)

    def _is_pending(self, given: Payload) -> bool:
        asked = given.get("update_id"), given.get("driver")
        return self._pending is not None and asked == (self._pending.update_id, self._driver)

    def _meant(self, given: Payload) -> WeightUpdateManifest:
        if self._pending is None or not self._is_pending(given):
            held = "none" if self._pending is None else self._pending.update_id
            msg = (
                f"update {given.get('update_id')} is not prepared here by this driver: {held} is "
                "prepared. Another driver came in between, or the engine was started anew: let one "
                "driver at a time update an engine, and publish a later version."
            )
            raise WeightUpdateRejectedError(msg)
        return self._pending

    def _require_proof(self, manifest: WeightUpdateManifest) -> None:
        if self._proof is None:
            msg = f"update {manifest.update_id} is not proven. Call prove first."
            raise WeightUpdateRejectedError(msg)

    def _require_nobody_elses(self, update_id: str) -> None:
        """Who takes an update back that is here no more must not go on where another one is."""
        if self._active is not None and self._active.update_id == update_id:
            msg = f"update {update_id} is committed: it cannot be undone. Publish a later version."
            raise WeightUpdateRejectedError(msg)
        if self.is_open and self._pending is not None:
            msg = (
                f"update {update_id} cannot be undone: another driver's, "
                f"{self._pending.update_id}, is installed by now. Let one driver at a time update "
                "an engine, and publish a later version."
            )
            raise WeightUpdateRejectedError(msg)

    def _end(self, reason: str | None) -> None:
        """The pending update is refused or undone, or given up and may come again: None."""
        manifest, self._pending, self._proof = self._pending, None, None
        self._labels = None
        if manifest is None:
            return
        self._let_go()
        bridge = self._bridges.made(manifest) if self._is_imported else None
        let_go(bridge, manifest, reason, self._installer)

    def _let_go(self) -> None:
        tensors, self._tensors = self._tensors, {}
        if isinstance(tensors, ImportedTensors):
            tensors.forget()  # a kept exception's frames must not keep the trainer's slot
