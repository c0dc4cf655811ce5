"""`VLLMModelInstaller`: installs updates into the model of one vLLM worker, all or nothing.

The next version is made beside the serving one (`rl_bridge.engines.staging`); the install
itself exchanges references and takes microseconds a layer, whatever the model's size. Undoing it
exchanges them back: the engine has the very objects again that it had before.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from rl_bridge.engines.evidence import Evidence, Untouched
from rl_bridge.engines.exchange import Exchange, is_alone, is_looked_at
from rl_bridge.engines.load_checks import (
    check_casts,
    check_landed,
    check_same,
    check_whole,
    refuse_unreached,
)
from rl_bridge.engines.load_plan import Kinds, LoadPlan, learn
from rl_bridge.engines.staging import (
    LEARNING,
    Spares,
    Staged,
    TensorChange,
    check_budget,
    checked_budget,
    stage,
)
from rl_bridge.engines.vllm.compat import RELOAD, unsupported
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import (
    InstallProof,
    TransactionalAdapter,
    check_finite,
    checked_threads,
)
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "VLLMModelInstaller",
]

_LOG = logging.getLogger(__name__)
_PLANS = 4


class VLLMModelInstaller(TransactionalAdapter):
    """Installs updates into one worker's model. Call it from the thread that runs the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, sliced, tied, padded) is learned once from the engine's own loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        cast: bool = False,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the worker's model, loaded by vLLM.
            vllm_config: the engine's configuration.
            cast: True lets an update's dtype differ from the engine's; vLLM's loader casts then.
            memory_budget_nbytes: what staging may take beyond what it holds; None takes what the
                machine has to give.
            num_threads: threads that digest; None takes the usable cores.

        Raises:
            TypeError: `cast` is no bool.
            ValueError: less than one thread, or a negative budget.

        """
        if not isinstance(cast, bool):
            raise TypeError(f"cast={cast!r}: expected True or False.")
        self._model = model
        self._config = vllm_config
        self._cast = cast
        self._budget = checked_budget(memory_budget_nbytes)
        self._num_threads = checked_threads(num_threads)
        self._plans: OrderedDict[str, LoadPlan] = OrderedDict()
        self._spares = Spares()
        self._staged: Staged | None = None
        self._evidence: Evidence | None = None
        self._untouched: Untouched | None = None
        self._exchange = Exchange()
        self._is_committing = False

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the next version beside the serving one; nothing that serves is written.

        Raises:
            IncompatibleUpdate: names, shapes, dtypes, numbers that are not finite, memory, or a
                model that holds what no update reaches.
            ProofFailed: what was made is not what the update says.

        """
        self.abandon()
        refuse_unreached(self._model)
        self._spares.drop(is_looked_at)
        plan = self._plan(manifest)
        check_landed(plan, manifest)
        check_same(plan, manifest)
        self._check_room(plan, manifest)
        evidence = Evidence(manifest, tensors, plan, num_threads=self._num_threads)
        self._staged = staged = Staged()  # noted first: what fails half-way is let go of
        try:
            for assembled in stage(plan, tensors, self._spares, self._config, staged):
                evidence.add(assembled)
        except IncompatibleUpdate:
            check_finite(tensors, plan.landed)  # a canary names the layer, these the tensor
            check_casts(plan, tensors)
            raise
        rest = plan.landed - _asked_about(plan, staged)
        check_finite(tensors, rest, num_threads=self._num_threads)
        check_casts(plan, tensors)
        evidence.seal(staged)
        self._evidence = evidence

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchange. Prepares by itself where that was not done.

        Raises:
            WeightBridgeError: call `undo`.

        """
        if self._evidence is None:
            self.prepare(manifest, tensors)
        assert self._staged is not None
        written = [change.live for change in self._staged.tensors]
        self._untouched = Untouched(self._model, written, num_threads=self._num_threads)
        self._exchange.apply(self._staged)

    def prove(self) -> InstallProof:
        """Read what the engine holds.

        Raises:
            ProofFailed: it is not what was installed.
            IncompatibleUpdate: the model holds what no update reaches.

        """
        if self._staged is None or self._evidence is None or self._untouched is None:
            msg = "nothing was installed that could be proven. Call install first."
            raise ProofFailed(msg)
        proof = self._evidence.check(self._staged)
        self._untouched.check()
        refuse_unreached(self._model)  # a step of the model may have made a copy since
        return proof

    def undo(self) -> None:
        """Exchange back: the engine has the objects and bytes again that it had."""
        if self._is_committing:
            self.commit()  # an interrupt cut it off: half of it is no state to go back to
        self._exchange.undo()
        self.abandon()

    def abandon(self) -> None:
        """Let go of what was staged; its memory is kept for the next update."""
        if self._is_committing:
            self.commit()
        if self._exchange.is_begun:
            return
        staged, self._staged = self._staged, None
        self._evidence = self._untouched = None
        for change in [] if staged is None else staged.tensors:
            self._keep(change, change.fresh)

    def commit(self) -> None:
        """Keep the memory of the version before for the next one.

        An interrupt may come anywhere: from the first line on it is undone by nothing, only ended.
        """
        self._is_committing = True
        self._staged = self._evidence = self._untouched = None
        tensors, attributes = self._exchange.forget()
        self._is_committing = False
        for change, memory in tensors:
            self._keep(change, memory)
        self._spares.keep_packs((change.module, value) for change, value in attributes)

    def _keep(self, change: TensorChange, memory: torch.Tensor) -> None:
        # What serves is never a spare, whatever was cut off where.
        if change.index is not None and memory.data_ptr() != change.live.data_ptr():
            self._spares.keep(change.index, memory)

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update: the engine has memory of its own."""

    # ---- inside ---------------------------------------------------------------------------------

    def _plan(self, manifest: WeightUpdateManifest) -> LoadPlan:
        table = manifest.table
        plan = self._plans.get(table.digest)
        if plan is None:
            self._check_layers()
            kinds = {
                name: (getattr(torch, table.dtypes[row]), table.shapes[row])
                for name, row in table.rows.items()
            }

            def admit(noted: LoadPlan, nbytes: int) -> None:
                self._check_room(noted, manifest)
                check_budget(nbytes, self._budget, manifest.weight_version, LEARNING)

            plan = learn(self._model, kinds, self._config, admit=admit)
            check_whole(plan, kinds, self._config.parallel_config.tensor_parallel_size)
            self._check_dtypes(plan, kinds)
            self._plans[table.digest] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(table.digest)
        return plan

    def _check_room(self, plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
        lives = (plan.targets[index].live for index in plan.steps)
        # An install copies aside what it writes in place.
        aside = sum(live.nbytes for live in lives if live is not None and not is_alone(live))
        needed = self._spares.missing_nbytes(plan) + aside
        check_budget(needed, self._budget, manifest.weight_version)

    def _check_layers(self) -> None:
        for name, layer in self._model.named_modules():
            reason = unsupported(layer)
            if reason is not None:
                msg = (
                    f"layer {name!r}: {reason}, which cannot be made beside the serving layer. "
                    f"Install it by {RELOAD}."
                )
                raise IncompatibleUpdate(msg)

    def _check_dtypes(self, plan: LoadPlan, kinds: Kinds) -> None:
        if self._cast:
            return
        for route in plan.routes():
            target, dtype = plan.targets[route.target], kinds[route.source][0]
            if dtype != target.meta.dtype:
                msg = (
                    f"tensor {route.source!r} is {_name(dtype)}, parameter {target.name!r} is "
                    f"{_name(target.meta.dtype)}. Publish in the engine's dtype, or say cast=True."
                )
                raise IncompatibleUpdate(msg)


def _asked_about(plan: LoadPlan, staged: Staged) -> set[str]:
    """Tensors that need no pass of their own: each of their numbers is in a canary's product."""
    modules = {id(canary.module) for canary in staged.canaries}
    asked: set[str] = set()
    rest: set[str] = set()
    for route in plan.routes():
        users = plan.targets[route.target].users
        is_asked = any(user.leaf == "weight" and id(user.module) in modules for user in users)
        (asked if is_asked else rest).add(route.source)
    return asked - rest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
