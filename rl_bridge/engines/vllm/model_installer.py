"""`VLLMModelInstaller`: installs updates into the model of one vLLM worker, all or nothing.

On the CPU vLLM packs most weights when it has loaded them, and drops what it packed. So the next
version of such a layer is made by vLLM's own code on a stand-in of the layer: the serving one is
only read. What is left for the install is to exchange parameters, and the packs that layers compute
with.

A version that is written through into the memory that serves is made in the same way, one layer at
a time: of each layer the pack that served goes before the next one is made.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_plan import LoadPlan, Route
from rl_bridge.engines.model_installer import (
    Layer,
    ModelInstaller,
    Tensors,
    Written,
    groups_of,
    is_as_loaded,
    writable,
)
from rl_bridge.engines.shards import digests_of
from rl_bridge.engines.skeleton import EngineCompat, Target, User
from rl_bridge.engines.staging import (
    Assembled,
    AttributeChange,
    Canary,
    SpareMemory,
    Staged,
    Staging,
    TensorChange,
    assemble,
)
from rl_bridge.engines.vllm.canary import PackCanary, check_experts
from rl_bridge.engines.vllm.compat import VLLMCompat, refuse_unreached, repacks
from rl_bridge.errors import IncompatibleUpdate, ProofFailed

# The attribute by which a layer computes with its packed weight.
_PACK = "cpu_linear"
# What a stand-in has of its own, so that processing it cannot reach the serving layer.
_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "quant_method"}
)


class VLLMModelInstaller(ModelInstaller):
    """Installs updates into one worker's model. Call it from the thread that runs the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, sliced, tied, padded) is learned once from the engine's own loader.

    With several ranks, each installs its own part and cannot see that no rank takes the rest of a
    tensor that is too long: whoever prepares an update on all of them checks that together they
    take every element, by `shards` and `rl_bridge.engines.check_covered`, as `VLLMEngineAdapter`
    and vLLM's own calls do.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        cast: bool = False,
        staging: Staging | None = None,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the worker's model, loaded by vLLM.
            vllm_config: the engine's configuration.
            cast: True lets an update's dtype differ from the engine's; vLLM's loader casts then.
            staging: ``beside`` makes the next version beside the serving one, ``through`` writes it
                into the memory that serves; None takes ``beside`` where the budget allows it.
            memory_budget_nbytes: what the next version may take, or the copy of the model that an
                undo needs; None takes what the machine has to give.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.

        Raises:
            TypeError: `cast` is no bool.
            ValueError: less than one thread, a negative budget, or no such staging.

        """
        super().__init__(
            model,
            VLLMCompat(vllm_config),
            cast=cast,
            staging=staging,
            memory_budget_nbytes=memory_budget_nbytes,
            num_threads=num_threads,
            num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        )
        self._packs = _Packs()
        self._renewed: set[int] = set()  # modules whose pack is made anew

    def _check_model(self) -> None:
        refuse_unreached(self._model)

    def _staging_nbytes(self, plan: LoadPlan) -> int:
        return self._packs.staging_nbytes(plan)

    def _stage(
        self, plan: LoadPlan, tensors: Tensors, staged: Staged, evidence: Evidence
    ) -> AbstractSet[str]:
        for assembled in self._making(plan, tensors, staged).run(self._spares):
            evidence.add(assembled)
        return _asked_about(plan, staged.canaries)

    def _making(self, plan: LoadPlan, tensors: Tensors, staged: Staged) -> "_Making":
        return _Making(plan, tensors, staged, self._packs, self._compat, self._num_threads)

    def _through_nbytes(self, plan: LoadPlan) -> int:
        return self._packs.through_nbytes(plan)

    def _copy_nbytes(self, plan: LoadPlan) -> int:
        """The packs that serve stay as well: nobody can read the weights back of which they are."""
        return super()._copy_nbytes(plan) + self._packs.packed_nbytes(plan)

    def _rehearse(self, written: Written) -> None:
        plan, self._renewed = written.plan, set()
        self._packs.keep([])
        for group in groups_of(plan):
            # (Experts take their own memory to be assembled in, which serves until the install.)
            if any(repacks(user.module) for i in group for user in plan.targets[i].users):
                continue
            staged = Staged()
            making = replace(self._making(plan, written.tensors, staged), lends=True)
            for assembled in making.make(group):
                written.evidence.add(assembled)
            changed = (one for one in staged.attributes if one.key == _PACK)
            self._renewed.update(id(one.module) for one in changed)
            del staged, making, changed  # before the next group is made

    def _write(self, written: Written, layer: Layer) -> Staged:
        every = Staged()
        for group in layer:
            staged = self._write_group(written, group)
            if self._snapshot is None:
                for attribute in staged.attributes:
                    vars(attribute.module)[attribute.key] = attribute.value
            else:
                self._exchange.replace(staged.attributes)
            every.extend(staged)
        return every

    def _write_group(self, written: Written, group: Sequence[int]) -> Staged:
        plan, staged = written.plan, Staged()
        targets = {i: plan.targets[i] for i in group}
        lives = {i: one.serving().data for i, one in targets.items() if not one.is_consumed}
        staged.memory = {i: live for i, live in lives.items() if is_as_loaded(targets[i], live)}
        if self._snapshot is None:
            for user in (user for target in targets.values() for user in target.users):
                if id(user.module) in self._renewed:
                    vars(user.module)[_PACK] = None  # its memory is the next one's
        making = self._making(plan, written.tensors, staged)
        with writable(lives.values()):
            making.assemble(staged.memory)
            for assembled in making.make(group):
                written.evidence.add(assembled)
            written.evidence.note(staged)
            for change in staged.tensors:
                live = change.live.data
                if change.fresh.data_ptr() != live.data_ptr():
                    live.copy_(change.fresh)
                change.fresh = change.live  # a view would be one more that looks at it
        staged.memory = {}
        return staged

    def _keep_attributes(self, freed: Sequence[tuple[torch.nn.Module, object]]) -> None:
        self._packs.keep(freed)


def _asked_about(plan: LoadPlan, canaries: Sequence[Canary]) -> set[str]:
    """Tensors that need no pass of their own: each of their numbers is in a canary's product."""
    modules = {id(canary.module) for canary in canaries}
    asked: set[str] = set()
    rest: set[str] = set()
    for route in plan.routes:
        users = plan.targets[route.target].users
        is_asked = any(user.leaf == "weight" and id(user.module) in modules for user in users)
        (asked if is_asked else rest).add(route.source)
    return asked - rest


class _Packs:
    """Memory beside the parameters': what layers compute with, and what is assembled to be packed.

    The packs of the version before are kept until each layer gets its next: freed at once they
    would go back to the system, and the next ones would touch it anew page by page.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[int, list[object]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def keep(self, packs: Sequence[tuple[torch.nn.Module, object]]) -> None:
        """Keep what layers computed with before."""
        self._kept = {}
        for module, value in packs:
            self._kept.setdefault(id(module), []).append(value)

    def make_room(self, module: torch.nn.Module) -> None:
        """A layer gets its next pack now."""
        self._kept.pop(id(module), None)

    def scratch(self, target: Target) -> torch.Tensor:
        """Memory for a parameter that is packed at once and not kept; valid until the next call."""
        if self._scratch.numel() < target.nbytes:
            self._scratch = torch.empty(target.nbytes, dtype=torch.uint8, device="cpu")
        flat = self._scratch[: target.nbytes].view(target.meta.dtype)
        return torch.as_strided(flat, tuple(target.meta.shape), target.meta.stride())

    def _has(self, target: Target) -> bool:
        """Whether a parameter needs no room for a pack: there is some, or it gets none."""
        # (Heads and embeddings keep their weight beside the pack.)
        packing = [
            user.module
            for user in target.users
            if target.is_consumed or (user.leaf == "weight" and _PACK in vars(user.module))
        ]
        return all(id(layer) in self._kept for layer in packing)

    def packed_nbytes(self, plan: LoadPlan) -> int:
        """Bytes of what layers compute with beside their parameters, and is not kept here."""
        targets = (plan.targets[index] for index in plan.steps)
        return sum(target.nbytes for target in targets if not self._has(target))

    def through_nbytes(self, plan: LoadPlan) -> int:
        """Bytes that one layer takes at most while it is written through, or rehearsed."""
        most = 0
        for group in groups_of(plan):
            needed = 0
            for target in (plan.targets[index] for index in group):
                # A parameter of its own, and the pack of it.
                needed += target.nbytes if self._has(target) else 2 * target.nbytes
            most = max(most, needed)
        return most

    def staging_nbytes(self, plan: LoadPlan) -> int:
        """Bytes that the next version takes: parameters, packs, scratch."""
        kept = packed = scratch = 0
        experts: dict[int, int] = {}
        for index in plan.steps:
            target = plan.targets[index]
            nbytes = target.nbytes
            packed += 0 if self._has(target) else nbytes
            if target.is_consumed:
                scratch = max(scratch, nbytes)
                continue
            kept += nbytes
            if repacks(layer := target.users[0].module):
                # Assembled, and packed: what stays is the pack.
                experts[id(layer)] = experts.get(id(layer), 0) + nbytes
        scratch = max(0, scratch - self._scratch.numel())
        return kept + packed + scratch + max(experts.values(), default=0)


# ---- making the next version --------------------------------------------------------------------

Given = Mapping[str, tuple[int, torch.Tensor, Target]]
"""What a layer's parameters are made of: leaf -> position of the target, memory, target."""

_Made = tuple[list[AttributeChange], list[PackCanary]]
"""What a layer computes with, and what answers for it."""


@dataclass(frozen=True, slots=True)
class _Making:
    """Makes the next version of a model, one layer after another."""

    plan: LoadPlan
    tensors: Tensors
    staged: Staged
    packs: _Packs
    compat: EngineCompat
    num_threads: int | None
    lends: bool = False  # whether also what an engine keeps may be the imported tensor itself

    def run(self, spares: SpareMemory) -> Iterator[Assembled]:
        """Make it; the serving model is only read.

        Yields:
            Each parameter when it is assembled and before it is processed: the one moment at which
            the bytes of a packed parameter can be read. Once more what processing replaced by
            tensors of its own (the weights of packed experts): what was read to make them.

        """
        targets = {index: self.plan.targets[index] for index in self.plan.steps}
        lasting = {i: one for i, one in targets.items() if not _is_packed(one)}
        self.staged.memory = spares.take(lasting)
        self.assemble(self.staged.memory)
        for group in groups_of(self.plan):
            yield from self.make(group)

    def make(self, group: Sequence[int]) -> Iterator[Assembled]:
        """Make parameters that vLLM processes at once; yields as `run`."""
        consumed = [i for i in group if self.plan.targets[i].is_consumed]
        fresh: dict[int, torch.Tensor] = {}
        for i in group:
            assembled = self._assembled(i, alone=len(consumed) == 1)
            fresh[i] = assembled.tensor
            yield assembled
        self._process(fresh)
        for i in consumed:
            del fresh[i]
        kept = {change.index for change in self.staged.tensors}
        for i in [i for i in fresh if i not in kept]:
            yield Assembled(i, fresh.pop(i), borrowed=False, replaced=True)

    def _assembled(self, index: int, *, alone: bool) -> Assembled:
        if index in self.staged.memory:
            return Assembled(index, self.staged.memory[index], borrowed=False)
        target = self.plan.targets[index]
        if target.is_consumed or self.lends:
            steps = [step for step in self.plan.steps[index] if step.target_view.numel]
            step = steps[0] if len(steps) == 1 else None
            # A part is packed from a copy: only whole tensors are looked at again after the pack.
            if isinstance(step, Route) and (
                step.is_whole if target.is_consumed else step.source_view.is_contiguous
            ):
                part = step.source_view.of(self.tensors[step.source])
                if part.dtype == target.meta.dtype and part.shape == target.meta.shape:
                    return Assembled(index, part, borrowed=step.is_whole)
        memory = self.packs.scratch(target) if target.is_consumed and alone else target.empty()
        self.assemble({index: memory})
        return Assembled(index, memory, borrowed=False)

    def assemble(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Write parameters into memory."""
        assemble(self.plan, self.tensors, memory, num_threads=self.num_threads)

    def _process(self, fresh: Mapping[int, torch.Tensor]) -> None:
        staged, plan = self.staged, self.plan
        users = {id(user.module): user for i in fresh for user in plan.targets[i].users}
        known: dict[object, _Made] = {}
        for user in users.values():
            given = _given(plan, user.module, fresh)
            # Tied layers compute with the same weight: one pack serves them all.
            kind = type(getattr(user.module, "quant_method", None))
            key = (kind, frozenset((leaf, i) for leaf, (i, _, _) in given.items()))
            if key not in known:
                for other in users.values():
                    self.packs.make_room(other.module)
                with self.compat.context(), torch.no_grad():
                    known[key] = _process(user, given, staged)
            attributes, canaries = known[key]
            place: dict[str, Any] = {"path": user.path, "module": user.module}
            staged.attributes += [replace(change, **place) for change in attributes]
            staged.canaries += [replace(canary, **place) for canary in canaries]


def _is_packed(target: Target) -> bool:
    """Whether what is assembled of a parameter goes when it is packed."""
    return target.is_consumed or any(repacks(user.module) for user in target.users)


def _given(plan: LoadPlan, module: torch.nn.Module, fresh: Mapping[int, torch.Tensor]) -> Given:
    return {
        user.leaf: (index, memory, plan.targets[index])
        for index, memory in fresh.items()
        for user in plan.targets[index].users
        if user.module is module
    }


def _process(user: User, given: Given, staged: Staged) -> _Made:
    """Let vLLM process a stand-in that has the fresh parameters, and note which these become."""
    module = user.module
    live: Mapping[str, torch.Tensor | None] = module._parameters  # noqa: SLF001 - torch has no other way in
    # What is packed twice is there once at a time.
    first = _digests(processed(module, given)) if repacks(module) else None
    state = processed(module, given)
    _check_derived(user, state)
    repacked = {}
    for leaf, fresh in state["_parameters"].items():
        if fresh is not None and fresh is not live.get(leaf):
            _note_tensor(User(user.path, module, leaf), fresh, given, staged)
            if leaf in given and fresh.numel() and not _is_kept(given[leaf][1], fresh):
                repacked[leaf] = fresh
    if repacked:
        second = first if first is not None else _digests(processed(module, given))
        _check_repacked(user, _digests(state), second, repacked)
        check_experts(user.path, state, {leaf: memory for leaf, (_, memory, _) in given.items()})
    attributes = [
        AttributeChange(user.path, module, key, value)
        for key, value in state.items()
        if key not in _OWN and vars(module).get(key, _OWN) is not value
    ]
    canaries = []
    for change in attributes:
        if change.key == _PACK and "weight" in given:
            # (In a comprehension, a failure's kept frames would keep what it closes over.)
            weight = state["_parameters"]["weight"]
            plain = weight if weight.numel() else given["weight"][1]
            canaries.append(PackCanary.make(user.path, module, change.value, plain))
    return attributes, canaries


def processed(module: torch.nn.Module, given: Given) -> dict[str, Any]:
    """State of a stand-in for a layer, with fresh parameters, after vLLM's processing."""
    stand_in: torch.nn.Module = object.__new__(type(module))
    state: dict[str, Any] = vars(stand_in)
    state.update(vars(module))
    for own in _OWN - {"quant_method"}:
        state[own] = copy.copy(state[own])
    # Objects of their own: processing may give them other memory.
    state["_parameters"].update(
        {leaf: target.like(memory) for leaf, (_, memory, target) in given.items()}
    )
    method: Any = getattr(module, "quant_method", None)
    if hasattr(method, "process_weights_after_loading"):
        state["quant_method"] = method = copy.copy(method)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # else it takes the packed weights for the unpacked ones
        method.process_weights_after_loading(stand_in)
    return state


def _check_derived(user: User, state: Mapping[str, Any]) -> None:
    """Refuse layers whose processing makes more than parameters and attributes."""
    for kind in ("_buffers", "_modules"):
        live = vars(user.module)[kind]
        derived = [name for name, made in state[kind].items() if live.get(name) is not made]
        if derived:
            raise IncompatibleUpdate(
                f"layer {user.path!r}: vLLM derives {derived} from its weights, which cannot be "
                f"made beside the serving layer. Install it by {VLLMCompat.elsewhere}."
            )


def _digests(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Digests of a layer's parameters."""
    tensors = {leaf: one for leaf, one in state["_parameters"].items() if one is not None}
    return dict(zip(tensors, digests_of(tensors.values(), num_threads=None), strict=True))


def _check_repacked(
    user: User, first: Mapping[str, bytes], second: Mapping[str, bytes], leaves: Iterable[str]
) -> None:
    """Compare two packs of one weight: what comes out wrong once does not come out so twice.

    A single wrong number may be lost in the rounding of products; but packed experts can be read.
    """
    for leaf in leaves:
        if first[leaf] != second[leaf]:
            raise ProofFailed(
                f"parameter '{user.path}.{leaf}': vLLM packs the same weight into different bytes. "
                "The engine keeps its version; publish again, and look at the machine's memory if "
                "it happens again."
            )


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype


def _is_kept(tensor: torch.Tensor, fresh: torch.Tensor) -> bool:
    """Whether processing left a tensor as it was, or only in another dtype."""
    if tensor.dtype == fresh.dtype or tensor.shape != fresh.shape:
        return _is_same(tensor, fresh)
    return torch.equal(tensor.to(fresh.dtype), fresh)


def _note_tensor(user: User, fresh: torch.Tensor, given: Given, staged: Staged) -> None:
    live = user.live
    if live is None or (
        live.shape != fresh.shape or live.dtype != fresh.dtype or live.stride() != fresh.stride()
    ):
        had = "none" if live is None else _kind(live)
        raise IncompatibleUpdate(
            f"parameter {user.name}: vLLM makes {_kind(fresh)} of it, the engine has {had}. "
            f"Install it by {VLLMCompat.elsewhere}."
        )
    if not fresh.numel() or any(change.live is live for change in staged.tensors):
        return  # packed away; or tied, and noted with its other user
    index, memory = None, fresh.detach()
    if user.leaf in given and _is_same(given[user.leaf][1], fresh):
        index, memory, _ = given[user.leaf]  # else processing made another tensor of it
    staged.tensors.append(TensorChange(user.name, live, memory, index))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
