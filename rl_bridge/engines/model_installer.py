"""`ModelInstaller`: installs updates into the model of one rank of an engine, all or nothing.

The next version is made beside the serving one (`rl_bridge.engines.staging`), and the install
exchanges them. Where an engine cannot have that, its own loader writes into the parameters that
serve: then the model is copied aside first, byte for byte, and after any failure the copy is put
back and compared. An engine supplies what is its own: see `EngineCompat` and the overridable steps.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from rl_bridge.engines.evidence import Evidence, Places, Untouched
from rl_bridge.engines.load_checks import (
    check_casts,
    check_dtypes,
    check_finite,
    check_same,
    check_taken,
)
from rl_bridge.engines.load_plan import Kinds, LoadPlan, kinds_of, learn
from rl_bridge.engines.shards import Shard, check_covered, shards_of
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.engines.staging import (
    LEARNING,
    Exchange,
    SpareMemory,
    Staged,
    TensorChange,
    assemble,
    check_budget,
    checked_budget,
    is_alone,
)
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.installers.snapshot import Snapshot, every_engine_tensor
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import checked_threads
from rl_bridge.memory.tensors import tensor_key
from rl_bridge.memory.views import Pin

_LOG = logging.getLogger(__name__)
_PLANS = 4

Tensors = Mapping[str, torch.Tensor]


class ModelInstaller(TransactionalAdapter):
    """Installs updates into one rank's model. Call it between two steps of the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, sliced, tied, padded) is learned once from the engine's own loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compat: EngineCompat,
        *,
        cast: bool = False,
        exchange: bool = True,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Configure; the model is only looked at.

        The budget is for the next version, and a copy of each parameter that is written in place.
        Of a model that is spread over several ranks, whoever asks them all checks that together
        they take every element: see `shards`.
        """
        for name, flag in (("cast", cast), ("exchange", exchange)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r}: expected True or False.")
        self._model = model
        self._compat = compat
        self._cast = cast
        self._may_exchange = exchange
        self._budget = checked_budget(memory_budget_nbytes)
        self._num_threads = checked_threads(num_threads)
        self._num_ranks = num_ranks
        self._plans: OrderedDict[str, LoadPlan] = OrderedDict()
        self._spares = SpareMemory()
        self._room: Pin | None = None  # where the last copy of the model was
        # Of the update that is prepared:
        self._plan: LoadPlan | None = None
        self._evidence: Evidence | None = None
        self._staged: Staged | None = None
        # Of what an undo brings back, from the first install since the last commit:
        self._has_begun = False
        self._exchange = Exchange()
        self._places: Places | None = None
        self._snapshot: Snapshot | None = None
        self._untouched: Untouched | None = None

    # ---- what an engine may have of its own -----------------------------------------------------

    def _check_model(self) -> None:
        """Refuse a model that would go on computing with something of the version before."""

    def _learned(self, kinds: Kinds, admit: Callable[[LoadPlan, int], None]) -> LoadPlan:
        """What the engine's loader does with tensors of these dtypes and shapes: see `learn`."""
        for name, layer in self._model.named_modules():
            reason = self._compat.unsupported(layer)
            if reason is not None:
                msg = f"layer {name!r}: {reason}. Install it by {self._compat.elsewhere}."
                raise IncompatibleUpdate(msg)
        return learn(self._model, kinds, self._compat, admit=admit)

    def _why_not_exchange(self, plan: LoadPlan) -> str | None:
        """Why parameters cannot be exchanged for other memory, or None if they can."""
        del plan
        return None

    def _staging_nbytes(self, plan: LoadPlan) -> int:
        """What the next version takes while it is made."""
        return sum(plan.targets[index].nbytes for index in plan.steps)

    def _stage(
        self, plan: LoadPlan, tensors: Tensors, staged: Staged, evidence: Evidence
    ) -> AbstractSet[str]:
        """Make the next version; the model is only read.

        Returns:
            Tensors whose numbers this has shown to be finite.

        """
        del evidence
        targets = {index: plan.targets[index] for index in plan.steps}
        staged.memory = self._spares.take(targets)
        staged.tensors = [
            TensorChange(target.name, target.serving(), staged.memory[index], index)
            for index, target in targets.items()
            if target.meta.numel()
        ]
        assemble(plan, tensors, staged.memory, num_threads=self._num_threads)
        return frozenset()

    def _keep_attributes(self, freed: Sequence[tuple[torch.nn.Module, object]]) -> None:
        """Keep what layers computed with before, if the next version can use its memory."""

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Make the next version, or the copy that an undo needs; nothing that serves is written.

        Args:
            manifest: the update's.
            tensors: the imported update; empty where the engine's own routes bring it.

        Raises:
            IncompatibleUpdate: names, shapes, dtypes, numbers that are not finite, memory, a model
                that holds what no update reaches; or an install is half-way, whose undo would not
                bring back what this update writes to.
            ProofFailed: what was made is not what the update says.

        """
        self.abandon()
        self._check_model()
        plan = self._plan_of(manifest, is_here=bool(tensors))
        check_taken(plan, manifest)
        check_same(plan, manifest)
        exchanges = self._exchanges(plan, is_here=bool(tensors))
        if not exchanges:
            self._require_loadable(plan, manifest, is_here=bool(tensors))
        self._check_room(plan, manifest, exchanges=exchanges)
        evidence = Evidence(manifest, plan, num_threads=self._num_threads)
        if tensors:
            evidence.expect_of(tensors)
            self._make(plan, tensors, evidence, exchanges=exchanges)
        if not exchanges and self._snapshot is None:
            room, self._room = self._room, None
            self._snapshot = Snapshot(self._model, num_threads=self._num_threads, room=room)
        self._plan, self._evidence = plan, evidence

    def shards(self, manifest: WeightUpdateManifest) -> list[Shard]:
        """The parts of tensors that this model takes, of the update that was prepared."""
        assert self._plan is not None
        return shards_of(self._plan, manifest)

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note what `shards` must hold, where the update was not imported here."""
        if self._evidence is None:
            msg = "nothing was prepared whose parts could be expected. Call prepare first."
            raise ProofFailed(msg)
        self._evidence.expect(parts)

    def begin(self) -> None:
        """The model is written from now on: `undo` brings it back."""
        assert self._plan is not None
        users = (u for index in self._plan.steps for u in self._plan.targets[index].users)
        written = [user.live for user in users]
        written += [] if self._staged is None else [c.live for c in self._staged.tensors]
        if not self._has_begun:
            self._places = Places(self._model)
        self._has_begun = True
        self._untouched = Untouched(
            self._model,
            [tensor for tensor in written if tensor is not None],
            num_threads=self._num_threads,
        )

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Exchange, or load by the engine's own loader. Prepares by itself where it must."""
        if self._evidence is None:
            self.prepare(manifest, tensors)
        self.begin()
        if self._staged is not None:
            self._exchange.apply(self._staged)
            return
        model: Any = self._model
        model.load_weights(iter(tensors.items()))

    def prove(self) -> InstallProof:
        """Read what the engine holds."""
        if self._evidence is None or self._untouched is None:
            msg = "nothing was installed that could be proven. Call install first."
            raise ProofFailed(msg)
        proof = self._evidence.check(self._staged)
        self._untouched.check()
        self._check_model()  # a step of the model may have made a copy since
        return proof

    def undo(self) -> None:
        """Exchange back, or put back what was copied aside: the engine has what it had."""
        if self._has_begun:
            self._exchange.undo()
            if self._snapshot is not None:
                self._snapshot.restore()
            if self._places is not None:
                self._places.check()
            self._has_begun = False
        self.abandon()

    def abandon(self) -> None:
        """Forget what was prepared; what the undo of a begun install needs stays."""
        staged, self._staged = self._staged, None
        self._plan = self._evidence = None
        if self._has_begun:
            return
        if staged is not None:
            memory = list(staged.memory.items())
            del staged  # whose changes look at the memory, too
            self._spares.keep(memory)
        if self._snapshot is not None:
            self._room = self._snapshot.give_room()
        self._snapshot = self._untouched = self._places = None

    def commit(self) -> None:
        """The memory of the version before is the next one's."""
        self._has_begun = False
        staged, self._staged = self._staged, None
        memory, attributes = self._exchange.forget()
        del staged
        self.abandon()
        self._keep_attributes(attributes)
        self._spares.keep(memory)

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update: the engine has memory of its own."""

    # ---- inside ---------------------------------------------------------------------------------

    def _make(
        self, plan: LoadPlan, tensors: Tensors, evidence: Evidence, *, exchanges: bool
    ) -> None:
        """Make the next version of an update that is imported here, and look at its numbers."""
        finite: AbstractSet[str] = frozenset()
        if exchanges:
            self._staged = Staged()  # noted first: what fails half-way is let go of
            try:
                finite = self._stage(plan, tensors, self._staged, evidence)
            except IncompatibleUpdate:
                check_finite(tensors, plan.taken)  # the engine names a layer, these the tensor
                check_casts(plan, tensors)
                raise
        check_finite(tensors, plan.taken - finite, num_threads=self._num_threads)
        check_casts(plan, tensors)
        evidence.seal(tensors, self._staged)

    def _plan_of(self, manifest: WeightUpdateManifest, *, is_here: bool) -> LoadPlan:
        digest = manifest.table.digest
        if digest not in self._plans:
            kinds = kinds_of(manifest)

            def admit(noted: LoadPlan, nbytes: int) -> None:
                exchanges = self._exchanges(noted, is_here=is_here)
                self._check_room(noted, manifest, exchanges=exchanges)
                check_budget(nbytes, self._budget, manifest.weight_version, LEARNING)

            plan = self._learned(kinds, admit)
            if self._num_ranks == 1:
                check_covered(manifest, [shards_of(plan, manifest)])
            if not self._cast:
                check_dtypes(plan, kinds, self._compat.cast_remedy)
            self._plans[digest] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(digest)
        return self._plans[digest]

    def _exchanges(self, plan: LoadPlan, *, is_here: bool) -> bool:
        if not is_here:
            return False
        reason = self._why_not_exchange(plan) if self._may_exchange else "exchange=False"
        if reason is not None:
            _LOG.info("the update is loaded into the memory that serves: %s", reason)
        return reason is None

    def _require_loadable(
        self, plan: LoadPlan, manifest: WeightUpdateManifest, *, is_here: bool
    ) -> None:
        """Make sure that the engine's loader may write, and that there is a way back."""
        if self._exchange.is_begun:
            msg = (
                f"version {manifest.weight_version} would be written by the engine's loader, and "
                "an install is neither undone nor committed, whose undo has no copy of what that "
                "writes to. Call undo first."
            )
            raise IncompatibleUpdate(msg)
        if not is_here or torch.is_inference_mode_enabled():
            return
        for index in plan.steps:  # loaders are in the middle of the model when torch refuses
            if plan.targets[index].serving().is_inference():
                msg = (
                    f"parameter {plan.targets[index].name!r} was made in inference mode, expected "
                    "an ordinary one: torch lets nobody write to it outside of that mode. Load the "
                    "model outside of torch.inference_mode()."
                )
                raise IncompatibleUpdate(msg)

    def _check_room(
        self, plan: LoadPlan, manifest: WeightUpdateManifest, *, exchanges: bool
    ) -> None:
        if exchanges:
            lives = (plan.targets[index].live for index in plan.steps)
            # An install copies aside what it writes in place.
            aside = sum(live.nbytes for live in lives if live is not None and not is_alone(live))
            needed = self._staging_nbytes(plan) + aside
        elif self._snapshot is None:
            # What a second copy of the model takes; what has two names is in it once.
            every = {tensor_key(one): one for one in every_engine_tensor(self._model).values()}
            needed = sum(tensor.numel() * tensor.element_size() for tensor in every.values())
        else:
            return
        check_budget(needed, self._budget, manifest.weight_version)
