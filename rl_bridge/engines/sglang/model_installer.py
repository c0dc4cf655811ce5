"""`SGLangModelInstaller`: installs updates into the model of one SGLang engine, all or nothing.

On the CPU an update that is imported here is made beside the serving version, and exchanged for it.
Else SGLang's loaders write into the parameters that serve: so the model is copied aside first, byte
for byte; after any failure, wherever the loader was, the copy is put back and compared.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from rl_bridge.engines.evidence import Untouched
from rl_bridge.engines.load_plan import LoadPlan, learn
from rl_bridge.engines.sglang import compat as parts
from rl_bridge.engines.sglang.beside import Beside, why_not_beside
from rl_bridge.engines.sglang.cuts import Cut, check_covered, cuts_of, part_digests
from rl_bridge.engines.sglang.proof import LiveEvidence, live_parameter
from rl_bridge.engines.staging import LEARNING, check_budget, checked_budget
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import (
    InstallProof,
    TransactionalAdapter,
    check_finite,
    checked_threads,
)
from rl_bridge.installers.snapshot import Snapshot, every_engine_tensor
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.tensors import tensor_key
from rl_bridge.memory.views import Pin

__all__ = [
    "SGLangModelInstaller",
]

_LOG = logging.getLogger(__name__)
_PLANS = 4
_SHOWN = 5


class SGLangModelInstaller(TransactionalAdapter):
    """Installs updates into one engine's model. Call it between two steps of the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, tied, padded) is learned once from the engine's own loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        exchange: bool = True,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the model that SGLang loaded.
            exchange: whether parameters may get other memory; False lets SGLang's loader write into
                what they have.
            memory_budget_nbytes: what a second copy of the model, which undo needs, may take, and
                two more of each parameter that somebody looks at; None takes what the machine has
                to give.
            num_threads: threads that copy and digest; None takes the usable cores.
            num_ranks: over how many ranks the model is spread. Of more than one, who asks them all
                checks that together they take every element: see `cuts`.

        Raises:
            TypeError: `exchange` is no bool.
            ValueError: less than one thread, or a negative budget.

        """
        if not isinstance(exchange, bool):
            raise TypeError(f"exchange={exchange!r}: expected True or False.")
        self._model = model
        self._may_exchange = exchange
        self._budget = checked_budget(memory_budget_nbytes)
        self._num_threads = checked_threads(num_threads)
        self._num_ranks = num_ranks
        self._plans: OrderedDict[str, LoadPlan] = OrderedDict()
        self._plan: LoadPlan | None = None
        self._evidence: LiveEvidence | None = None
        self._beside = Beside(num_threads=self._num_threads)
        self._snapshot: Snapshot | None = None
        self._room: Pin | None = None  # where the last copy was
        self._untouched: Untouched | None = None
        self._has_begun = False
        self._is_committing = False

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Learn where the tensors go, and make the second copy; nothing that serves is written.

        Args:
            manifest: the update's.
            tensors: the imported update; empty where SGLang's own routes bring it.

        Raises:
            IncompatibleUpdate: names, shapes, dtypes, numbers that are not finite, or memory; or an
                install is half-way, whose undo would not bring back what this update writes to.

        """
        self.abandon()
        plan = self._plan_of(manifest)
        if tensors:
            check_finite(tensors, plan.landed, num_threads=self._num_threads)
        evidence = LiveEvidence(manifest, plan, num_threads=self._num_threads)
        if tensors:
            cuts, threads = cuts_of(plan, manifest), self._num_threads
            evidence.expect(part_digests(manifest, tensors, cuts, num_threads=threads))
        exchanges = bool(tensors) and self._exchanges(plan)
        if tensors and not exchanges:
            _check_writable(plan)
        if self._beside.is_begun and not exchanges:
            msg = (
                f"version {manifest.weight_version} would be written by SGLang's loader, and an "
                "install is neither undone nor committed, whose undo has no copy of what that "
                "writes to. Call undo first."
            )
            raise IncompatibleUpdate(msg)
        # Else an install is not undone: what stands is of before it.
        is_new = self._snapshot is None
        if is_new:
            needed = self._nbytes() + (self._beside.kept_nbytes(plan) if exchanges else 0)
            check_budget(needed, self._budget, manifest.weight_version)
        if exchanges:
            self._beside.stage(plan, tensors)
        if is_new:
            self._snapshot = self._copied_aside()
        self._plan, self._evidence = plan, evidence

    def cuts(self, manifest: WeightUpdateManifest) -> list[Cut]:
        """The parts of tensors that this model takes, of the update that was prepared."""
        assert self._plan is not None
        return cuts_of(self._plan, manifest)

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note what `cuts` must hold, where the update was not imported here.

        Raises:
            ProofFailed: nothing was prepared, or that many parts are not taken.

        """
        if self._evidence is None:
            msg = "nothing was prepared whose parts could be expected. Call prepare first."
            raise ProofFailed(msg)
        self._evidence.expect(parts)

    def begin(self) -> None:
        """The model is written from now on: `undo` puts the copy back."""
        assert self._plan is not None
        written = [
            user.module._parameters[user.leaf]  # noqa: SLF001 - torch has no other way in
            for index in self._plan.steps
            for user in self._plan.targets[index].users
        ]
        self._has_begun = True
        self._untouched = Untouched(
            self._model,
            [item for item in written if item is not None],
            num_threads=self._num_threads,
        )

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchange, or load by the engine's own loader. Prepares by itself where it must.

        Raises:
            Exception: the loader's. Call `undo`.

        """
        if self._evidence is None:
            self.prepare(manifest, tensors)
        self.begin()
        if self._beside.is_staged:
            self._beside.exchange()
            return
        load = getattr(self._model, "load_weights")  # noqa: B009 - only SGLang's modules have it
        load(iter(tensors.items()))

    def prove(self) -> InstallProof:
        """Read what the engine holds.

        Raises:
            ProofFailed: it is not what was installed.

        """
        if self._evidence is None or self._untouched is None:
            msg = "nothing was installed that could be proven. Call install first."
            raise ProofFailed(msg)
        proof = self._evidence.check()
        self._untouched.check()
        return proof

    def undo(self) -> None:
        """Exchange back, and put back what was copied aside.

        Raises:
            TornEngine: a byte does not come back.

        """
        if self._is_committing:
            self.commit()  # an interrupt cut it off: half of it is no state to go back to
        if self._has_begun:
            assert self._snapshot is not None
            self._beside.undo()
            self._snapshot.restore()
            self._has_begun = False
        self.abandon()

    def abandon(self) -> None:
        """Forget what was prepared; what the undo of a begun install needs stays."""
        if self._is_committing:
            self.commit()
        self._evidence = self._plan = None
        self._beside.abandon()
        if not self._has_begun:
            if self._snapshot is not None:
                self._room = self._snapshot.give_room()
            self._snapshot = self._untouched = None

    def commit(self) -> None:
        """Let the version before go: its memory is the next one's.

        An interrupt may come anywhere: from the first line on it is undone by nothing, only ended.
        """
        self._is_committing = True
        self._beside.commit()
        self._has_begun = self._is_committing = False
        self.abandon()

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update: the engine has memory of its own."""

    # ---- inside ---------------------------------------------------------------------------------

    def _exchanges(self, plan: LoadPlan) -> bool:
        reason = why_not_beside(plan) if self._may_exchange else "exchange=False"
        if reason is not None:
            _LOG.info("the update is loaded into the memory that serves: %s", reason)
        return reason is None

    def _nbytes(self) -> int:
        """What a second copy takes; what has two names is in it once."""
        every = {tensor_key(tensor): tensor for tensor in every_engine_tensor(self._model).values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in every.values())

    def _copied_aside(self) -> Snapshot:
        """All that the install may write to: not what gets other memory meanwhile."""
        alone = self._beside.alone()
        every = every_engine_tensor(self._model)
        room, self._room = self._room, None
        return Snapshot(
            self._model,
            without={name for name, tensor in every.items() if id(tensor) in alone},
            num_threads=self._num_threads,
            room=room,
        )

    def _plan_of(self, manifest: WeightUpdateManifest) -> LoadPlan:
        table = manifest.table
        plan = self._plans.get(table.digest)
        if plan is None:
            self._check_layers()
            kinds = {
                name: (getattr(torch, table.dtypes[row]), table.shapes[row])
                for name, row in table.rows.items()
            }

            def admit(_: LoadPlan, nbytes: int) -> None:
                version = manifest.weight_version
                if self._snapshot is None:
                    check_budget(self._nbytes(), self._budget, version)
                check_budget(nbytes, self._budget, version, LEARNING)

            plan = learn(self._model, kinds, None, admit=admit, parts=parts)
            _check_landed(plan, manifest)
            _check_dtypes(plan, kinds)
            if self._num_ranks == 1:
                check_covered(manifest, [cuts_of(plan, manifest)])
            self._plans[table.digest] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(table.digest)
        return plan

    def _check_layers(self) -> None:
        for name, layer in self._model.named_modules():
            reason = parts.unsupported(layer)
            if reason is not None:
                msg = (
                    f"layer {name!r}: {reason}, so what it holds cannot be read. Install it by "
                    f"{parts.RELOAD}."
                )
                raise IncompatibleUpdate(msg)


def _check_landed(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """SGLang's loaders skip what they do not know, with a warning at most."""
    rows = manifest.table.rows
    landed = {rows[name] for name in plan.landed}
    lost = [name for name, row in rows.items() if row not in landed]
    if lost:
        msg = (
            f"the engine's loader puts {len(lost)} tensors of the update nowhere: "
            f"{lost[:_SHOWN]}. Publish the model that the engine serves, and no others."
        )
        raise IncompatibleUpdate(msg)


def _check_writable(plan: LoadPlan) -> None:
    """Loaders are in the middle of the model when torch tells them."""
    if torch.is_inference_mode_enabled():
        return
    for index in plan.steps:
        target = plan.targets[index]
        if live_parameter(target).is_inference():
            msg = (
                f"parameter {target.name!r} was made in inference mode, expected an ordinary one: "
                "torch lets nobody write to it outside of that mode. Load the model outside of "
                "torch.inference_mode()."
            )
            raise IncompatibleUpdate(msg)


def _check_dtypes(plan: LoadPlan, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Loaders cast without a word."""
    for route in plan.routes():
        dtype, target = kinds[route.source][0], plan.targets[route.target]
        if dtype != target.meta.dtype:
            msg = (
                f"tensor {route.source!r} is {_name(dtype)}, parameter {target.name!r} is "
                f"{_name(target.meta.dtype)}. Publish in the engine's dtype."
            )
            raise IncompatibleUpdate(msg)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
