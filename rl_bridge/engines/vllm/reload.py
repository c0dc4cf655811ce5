"""`VLLMReloadAdapter`: lets vLLM itself reload a model, and takes it back if anything fails.

For the models that `VLLMModelInstaller` refuses: quantized ones, and those whose layers keep
tensors derived from their weights. vLLM's reload writes into the serving model, so this way needs
a copy of the whole model to go back to, and requests must wait from the install to the end. What a
failure leaves half-way, of objects and bytes, a `ModelSnapshot` brings back.

Of a reloaded model, parameters that are kept as they are loaded are read, and packed ones asked for
products. Packed experts and the absorbed projections of multi-head latent attention (MLA) can be
read, too: vLLM's own processing is run once more, on a stand-in of the layer, and must come to the
bytes that the serving layer holds.
"""

import copy
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_bridge.engines.evidence import Evidence, Untouched, tensors_of
from rl_bridge.engines.load_checks import check_casts, check_finite, check_taken
from rl_bridge.engines.load_plan import Kinds, LoadPlan, learn, storage_of
from rl_bridge.engines.model_installer import ModelInstaller, Tensors
from rl_bridge.engines.skeleton import Target, User
from rl_bridge.engines.staging import (
    BESIDE,
    Assembled,
    Need,
    Staged,
    TensorChange,
    check_budget,
)
from rl_bridge.engines.vllm import require
from rl_bridge.engines.vllm.canary import PackCanary, check_experts
from rl_bridge.engines.vllm.compat import (
    VLLMCompat,
    is_deferred_attention,
    is_latent,
    refuse_unreached,
    repacks,
)
from rl_bridge.engines.vllm.model_installer import Given, processed
from rl_bridge.engines.vllm.requests import flat_bytes
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.parts import Scope

_LOG = logging.getLogger(__name__)
_SHOWN = 5
_MATRIX = 2
_PROJECTION = "kv_b_proj"
_KEPT = "_rl_bridge_processed_from"
# What holds state for a module beside the module: quantization methods, schemes, kernels, attention
# implementations. Nothing else that a module refers to is looked into.
_HELPERS = ("vllm.model_executor.", "vllm.v1.attention.")
# Bound after loading, large, and of no concern to a reload.
_NOT_WEIGHTS = frozenset({"kv_cache"})


# ---- the way back --------------------------------------------------------------------------------


class ModelSnapshot:
    """The state of a model's modules when it is made. Bytes are copied by `copy_bytes`."""

    def __init__(self, model: torch.nn.Module, *, helpers: tuple[str, ...] = _HELPERS) -> None:
        """Note what each module refers to; nothing is copied yet."""
        self._helpers = helpers
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, type, dict[str, Any], torch.Tensor]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._seen: set[int] = set()
        for module in model.modules():
            self._note_object(module)

    @property
    def nbytes(self) -> int:
        """Bytes that `copy_bytes` takes, on the host."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def copy_bytes(self) -> None:
        """Copy every parameter and buffer, each storage once, to the host."""
        for key, held in self._storages.items():
            storage: Any = held  # for which torch has no types
            self._copies[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()

    def restore(self) -> None:
        """Bring all of it back. May be called again after an interrupt."""
        for state, before in self._states:
            _refill(state, before)
        for container, before in self._containers:
            _refill(container, before)
        for tensor, kind, attributes, data in self._tensors:
            tensor.__class__ = kind
            _refill(vars(tensor), attributes)
            if _place(tensor) != _place(data):
                tensor.data = data
        for key, saved in self._copies.items():
            self._storages[key].copy_(saved, non_blocking=False)

    # ---- inside ---------------------------------------------------------------------------------

    def _note_object(self, owner: object) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        state = vars(owner)
        self._states.append((state, dict(state)))
        has_bytes = not type(owner).__module__.startswith("vllm.v1.")  # those have workspaces
        for key, value in state.items():
            if key not in _NOT_WEIGHTS:
                self._note(value, has_bytes=has_bytes)

    def _note(self, value: object, *, has_bytes: bool) -> None:
        if isinstance(value, torch.Tensor):
            if has_bytes:
                self._note_tensor(value)
        elif type(value) in {dict, list, set}:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._containers.append((value, copy.copy(value)))
                inner: Any = value
                for item in list(inner.values() if isinstance(inner, dict) else inner):
                    self._note(item, has_bytes=has_bytes)
        elif self._is_helper(value):
            self._note_object(value)

    def _is_helper(self, value: object) -> bool:
        home = f"{type(value).__module__}."
        return (
            home.startswith(self._helpers)
            and hasattr(value, "__dict__")
            and not isinstance(value, torch.nn.Module | type)
        )

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            raise IncompatibleUpdate(
                f"the model has tensors of {type(tensor).__name__}, whose bytes cannot be brought "
                "back. Use VLLMEngineAdapter with a model that is not quantized this way."
            )
        self._tensors.append((tensor, type(tensor), dict(vars(tensor)), tensor.data))
        if not tensor.is_meta and not torch.nn.parameter.is_lazy(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._storages.setdefault(storage_of(tensor), storage)


class ReloadState:
    """What vLLM notes about reloads of a model's layers, and how to bring it back."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Note it; vLLM's own structures are only read."""
        self._layerwise: Any = require("vllm.model_executor.model_loader.reload.layerwise")
        self._modules = list(model.modules())
        infos = [self._layerwise.get_layerwise_info(module) for module in self._modules]
        # Lists, too: vLLM adds to them what it loads, and would keep it, and load it once more.
        self._infos = [
            (vars(info), {key: _own(value) for key, value in vars(info).items()}) for info in infos
        ]
        self._metas = [
            (vars(meta), dict(vars(meta)))
            for info in infos
            for tensors in info.restore_metadata
            for meta in tensors.values()
        ]

    def unwrap(self) -> None:
        """Take the loaders of the reload off what vLLM keeps to load the next one.

        vLLM wraps them in place and leaves them wrapped; whoever looks there for the loaders of a
        checkpoint finds ones that do nothing outside of a reload.
        """
        for state, before in self._metas:
            _refill(state, before)

    def restore(self) -> None:
        """Bring all of it back: no reload is under way."""
        for state, before in self._infos:
            # (Not the lists of these notes themselves: the next reload adds to what it finds.)
            _refill(state, {key: _own(value) for key, value in before.items()})
        self.unwrap()
        for module in self._modules:
            self._layerwise.LOADING_LAYERS.discard(module)


def refuse_half_way(model: torch.nn.Module) -> None:
    """Refuse a model that somebody else's reload has left half-way."""
    layerwise: Any = require("vllm.model_executor.model_loader.reload.layerwise")
    for name, module in model.named_modules():
        held: Iterable[Any] = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001 - torch has no other way in
        if layerwise.get_layerwise_info(module).can_load() or any(
            tensor is not None and tensor.is_meta for tensor in held
        ):
            raise IncompatibleUpdate(
                f"layer {name!r} is in the middle of a reload of vLLM's own. Finish that one, or "
                "start a fresh engine."
            )


def _own(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _refill(container: Any, before: Any) -> None:
    """Give a container its content back; it stays the same object: others refer to it, too."""
    if isinstance(container, dict):
        for key in container.keys() - before.keys():
            del container[key]
        container.update(before)
        if list(container) != list(before):  # the order of parameters is told to users
            container.clear()
            container.update(before)
    elif isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    kind = tensor.device, tensor.dtype, tensor.shape, tensor.stride()
    return (*kind, tensor.storage_offset(), storage_of(tensor))


# ---- what can be proven of a reloaded model -----------------------------------------------------


def prove_reload(
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    plan: LoadPlan,
    model: torch.nn.Module,
    compat: VLLMCompat,
    *,
    num_threads: int | None,
) -> tuple[InstallProof, list[str]]:
    """Compare what the model holds with the update, by what was learned of its loader.

    Returned are the proof, ``unproven`` if anything is left out, and the layers left out: all of
    them where the loader could not be followed.
    """
    if not plan.is_followed:
        return InstallProof(method="unproven"), [type(model).__name__]
    latent = {id(layer.kv_b_proj): (name, layer) for name, layer in _absorbed(model, compat)}
    readable, unproven = _readable(plan, model, compat, {name for name, _ in latent.values()})
    plan = replace(plan, steps=readable)
    evidence = Evidence(manifest, plan, num_threads=num_threads)
    evidence.expect_of(tensors)
    reading = _Reading(plan, tensors, evidence, latent, compat)
    layers: dict[str, list[int]] = {}
    for index in readable:
        layers.setdefault(plan.targets[index].users[0].path, []).append(index)
    for indices in layers.values():
        reading.read(indices)
    staged = reading.staged
    compared = {*map(id, staged.compared)}
    unproven.update((name, None) for key, (name, _) in latent.items() if key not in compared)
    evidence.seal(tensors, staged)
    proof = evidence.check(staged)
    if unproven:
        sources = {route.source for route in plan.routes}
        proof = replace(proof, method="unproven", root="", tensors=len(sources))
    return proof, list(unproven)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads a reloaded model, one layer after the other.

    Weights that a layer no longer has as they were loaded are assembled once more: those of one
    layer at a time, since there is no room for a third copy of the model.
    """

    plan: LoadPlan
    tensors: Mapping[str, torch.Tensor]
    evidence: Evidence
    latent: Mapping[int, tuple[str, Any]]  # by their projection
    compat: VLLMCompat
    staged: Staged = field(default_factory=Staged)

    def read(self, indices: Sequence[int]) -> None:
        """Compare the parameters of one layer, and what vLLM makes of them."""
        given: dict[str, tuple[int, torch.Tensor, Target]] = {}
        for index in indices:
            target = self.plan.targets[index]
            user = target.users[0]
            live = weight = _live(user)
            if target.is_consumed or repacks(user.module):
                weight = self._assemble(index, target)
                given[user.leaf] = (index, weight, target)
            if not target.is_consumed:
                kept = index if weight is live else None
                self.staged.tensors.append(TensorChange(target.name, live, live, kept))
            self.staged.canaries += _canaries(target, weight, self.latent)
        first = self.plan.targets[indices[0]].users[0]
        if repacks(first.module):
            _check_packed(first.path, first.module, given, self.compat)
        if id(first.module) in self.latent:
            name, layer = self.latent[id(first.module)]
            weight_again = given["weight"][1] if "weight" in given else None
            _check_absorbed(name, layer, weight_again, self.compat)
            self.staged.compared.append(first.module)

    def _assemble(self, index: int, target: Target) -> torch.Tensor:
        """Assemble one, and compare it with the manifest."""
        weight = target.like(target.empty())
        self.plan.assemble(index, self.tensors, weight)
        is_replaced = not target.is_consumed
        self.evidence.add(Assembled(index, weight, borrowed=False, replaced=is_replaced))
        return weight


def _canaries(
    target: Target, weight: torch.Tensor, projections: Container[int]
) -> list[PackCanary]:
    """Ask the packed products of a weight, compare them with its own."""
    made = []
    for user in target.users:
        pack: Any = vars(user.module).get("cpu_linear")
        is_asked = pack is not None and id(user.module) not in projections
        if is_asked and user.leaf == "weight" and weight.ndim == _MATRIX:
            made.append(PackCanary.make(user.path, user.module, pack, weight))
    return made


def _readable(
    plan: LoadPlan, model: torch.nn.Module, compat: VLLMCompat, latent: Container[str]
) -> tuple[dict[int, Any], dict[str, None]]:
    """The steps of what can be read, and the layers of what cannot."""
    unproven: dict[str, None] = {
        name: None
        for name, layer in model.named_modules()
        if is_latent(layer) and name not in latent
    }
    for name in sorted(plan.unfollowed()):
        unproven[name.rpartition(".")[0] or type(model).__name__] = None
    computed = {user.module for index in plan.computed for user in plan.targets[index].users}
    readable = {}
    for index, steps in plan.steps.items():
        target = plan.targets[index]
        # (What packed experts are made of is needed as a whole.)
        is_apart = not any(
            repacks(user.module) and user.module in computed for user in target.users
        )
        if is_apart and all(_is_readable(user, target, compat) for user in target.users):
            readable[index] = steps
        else:
            unproven.update((user.path, None) for user in target.users)
    return readable, unproven


def _is_readable(user: User, target: Target, compat: VLLMCompat) -> bool:
    """Whether what a layer makes of a parameter shows what was loaded."""
    if compat.unsupported(user.module) is not None:
        return False
    if target.is_consumed:
        return user.leaf == "weight" and callable(vars(user.module).get("cpu_linear"))
    live = _live(user)
    if repacks(user.module) and user.leaf in compat.checkpoint_tensors(user.module):
        return live.device.type == "cpu" and len(target.users) == 1
    return (
        live.shape == target.meta.shape
        and target.meta.dtype == compat.loaded_dtype(user.module, user.leaf, live)
        and live.stride() == target.meta.stride()
    )


def _live(user: User) -> torch.Tensor:
    live = user.live
    assert live is not None
    return live


# ---- what vLLM derives from weights -------------------------------------------------------------


def _absorbed(model: torch.nn.Module, compat: VLLMCompat) -> Iterator[tuple[str, Any]]:
    """Layers of MLA that can be looked into, by name: their projection is no quantized one."""
    for name, layer in model.named_modules():
        projection = layer._modules.get(_PROJECTION)  # noqa: SLF001 - torch has no other way in
        if (
            is_latent(layer)
            and projection is not None
            and compat.unsupported(projection) is None
            and all(tensor.device.type == "cpu" for tensor in projection.parameters())
        ):
            yield name, layer


def make_ready(model: torch.nn.Module, compat: VLLMCompat) -> None:
    """Let vLLM's reload process all that its first load did. Undone by a snapshot made before.

    Experts: where they were packed once, vLLM takes the unpacked weights for packed ones. MLA on
    CPUs with AMX: vLLM drops a weight and then has nowhere to load it to.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if repacks(layer) and any(weight.device.type == "cpu" for weight in layer.parameters()):
            method.moe_kernel = None
    for _, layer in _absorbed(model, compat):
        projection = layer.kv_b_proj
        meta = compat.checkpoint_tensors(projection).get("weight")
        if meta is not None and meta.numel() and not projection.weight.numel():
            empty = torch.empty(tuple(meta.shape), dtype=meta.dtype, device="cpu")
            projection.weight = torch.nn.Parameter(empty, requires_grad=False)


def _check_packed(path: str, layer: torch.nn.Module, given: Given, compat: VLLMCompat) -> None:
    """Compare packed experts with what vLLM makes of `given`, their weights."""
    with compat.context(), torch.no_grad():
        state = processed(layer, given)
        made = state["_parameters"]
        check_experts(path, state, {leaf: memory for leaf, (_, memory, _) in given.items()})
    for leaf in given:
        _compare(f"{path}.{leaf}", layer._parameters[leaf], made[leaf])  # noqa: SLF001 - as above


def _check_absorbed(path: str, layer: Any, weight: torch.Tensor | None, compat: VLLMCompat) -> None:
    """Compare what a layer of MLA derived with what vLLM derives from `weight`."""
    stand_in, impl = _stand_in(layer, weight, compat)
    with compat.context(), torch.no_grad():
        stand_in.process_weights_after_loading(compat.config.model_config.dtype)
    made = _derived(stand_in, impl)
    had = _derived(layer, layer.impl)
    left = sorted(had.keys() - made.keys())
    if left:
        raise ProofFailed(
            f"layer {path!r}: it holds {left}, which vLLM does not make of this version's weights. "
            "Install the update again; if that fails too, this model cannot be updated by reloads."
        )
    fresh = {name: tensor for name, tensor in made.items() if tensor is not had.get(name)}
    if not fresh:
        raise ProofFailed(
            f"layer {path!r}: vLLM derives nothing from its weights that could be compared. Use a "
            "version of vLLM that was tried, see the table of versions."
        )
    for name, tensor in fresh.items():
        _compare(f"{path}.{name}", had.get(name), tensor)


def _stand_in(layer: Any, weight: torch.Tensor | None, compat: VLLMCompat) -> tuple[Any, Any]:
    """A layer that derives what it derives anew, and its attention; the serving one is not seen."""
    stand_in, impl = object.__new__(type(layer)), copy.copy(layer.impl)
    state: dict[str, Any] = vars(stand_in)
    state.update(vars(layer))
    loaded = compat.checkpoint_tensors(layer)
    parameters, buffers = state["_parameters"], state["_buffers"]
    state["_parameters"] = {name: value for name, value in parameters.items() if name in loaded}
    state["_buffers"] = {
        name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()
    }
    state["impl"] = impl
    state["_modules"] = dict(state["_modules"])
    if weight is not None:
        projection = copy.copy(state["_modules"][_PROJECTION])
        inner = vars(projection)
        inner["_parameters"] = {**inner["_parameters"], "weight": weight}
        state["_modules"][_PROJECTION] = impl.kv_b_proj = projection
    return stand_in, impl


def _derived(layer: Any, impl: Any) -> Mapping[str, torch.Tensor]:
    own = vars(layer)
    held = {**own, **own["_parameters"], **{f"impl.{k}": v for k, v in vars(impl).items()}}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _compare(name: str, live: torch.Tensor | None, made: torch.Tensor) -> None:
    is_alike = live is not None and live.dtype == made.dtype and live.shape == made.shape
    # (As bytes: torch calls no NaN equal.)
    if live is not None and is_alike and torch.equal(flat_bytes(live), flat_bytes(made)):
        return
    raise ProofFailed(
        f"{name!r} of the engine is not what vLLM makes of this version's weights. Install the "
        "update again; if that fails too, this model cannot be updated by reloads."
    )


# ---- the reload ----------------------------------------------------------------------------------


class VLLMReloadAdapter(ModelInstaller):
    """Reloads one worker's model. Call it from the thread that runs the model.

    No step of the model may run between `install` and `commit` or `undo`: pause the engine. Drop
    cached prefixes afterwards. Adapters (LoRA) stay loaded.

    What the engine holds is read where it can be: parameters that are kept as they are loaded, and
    products of packed ones. Layers that vLLM processes into something else cannot be read back;
    then the proof's method is ``unproven``, and a warning names them.

    With several ranks, whoever prepares an update on all of them checks that together they take
    every element: see `VLLMModelInstaller`.
    """

    _compat: VLLMCompat

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the worker's model, loaded by vLLM.
            vllm_config: the engine's configuration.
            memory_budget_nbytes: what the copy of the model and its next layers may take on the
                host; None takes what the machine has to give.
            num_threads: threads that digest; None takes the usable cores, at most 8.

        Raises:
            ValueError: less than one thread, or a negative budget.

        """
        super().__init__(
            model,
            VLLMCompat(vllm_config),
            cast=True,  # vLLM's loader does
            memory_budget_nbytes=memory_budget_nbytes,
            num_threads=num_threads,
            num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        )
        self._config = vllm_config
        self._update: tuple[WeightUpdateManifest, Tensors] | None = None
        self._before: tuple[ModelSnapshot, ReloadState] | None = None

    def _check_model(self) -> None:
        if self._before is None:
            refuse_half_way(self._model)
        refuse_unreached(self._model)

    def _way(
        self, plan: LoadPlan, manifest: WeightUpdateManifest, *, is_here: bool
    ) -> tuple[str, int]:
        del plan, is_here
        needed = manifest.total_nbytes  # the layers that vLLM makes anew
        if self._before is None:
            needed += ModelSnapshot(self._model).nbytes
        way, _ = check_budget([(BESIDE, Need(needed))], self._budget, manifest.weight_version)
        return way, needed

    def _learned(self, kinds: Kinds, admit: Callable[[LoadPlan, int], None]) -> LoadPlan:
        try:
            return learn(
                self._model,
                kinds,
                self._compat,
                admit=admit,
                is_optional=self._is_optional,
                allows_computed=True,
            )
        except IncompatibleUpdate as error:
            # A loader that cannot be followed is used all the same; the message says so by naming
            # what serves such models: this adapter.
            if self._compat.elsewhere not in str(error):
                raise
            return LoadPlan((), taken=frozenset(kinds), is_followed=False)

    def scope_of(self, manifest: WeightUpdateManifest) -> Scope:  # noqa: ARG002 - of any
        """All of it: vLLM's own loader takes whole tensors."""
        return Scope.ALL

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Run the engine's loader on a model without memory, and look for memory.

        Raises:
            IncompatibleUpdate: names, shapes, numbers that are not finite, memory, or a model that
                holds what no update reaches.

        """
        self._check_model()
        check_finite(tensors, tensors, num_threads=self._num_threads)
        plan = self._plan_of(manifest, is_here=True)
        self._way(plan, manifest, is_here=True)
        check_taken(plan, manifest)
        check_casts(plan, tensors)
        self._plan = plan

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Copy the model, then let vLLM reload it from `tensors`."""
        if self._plan is None:
            self.prepare(manifest, tensors)
        assert self._plan is not None
        if self._before is None:
            refuse_half_way(self._model)
            snapshot, reloads = ModelSnapshot(self._model), ReloadState(self._model)
            snapshot.copy_bytes()
            self._before = snapshot, reloads
        else:
            snapshot, reloads = self._before
            self._restore()  # a whole model again, of one whose undo failed
        self._update = manifest, tensors
        # What is processed in place is vLLM's business, what is loaded the update's; all other
        # buffers must stay.
        unfollowed = self._plan.unfollowed()
        free: list[torch.Tensor] = [*self._model.parameters()]
        free += (buffer for name, buffer in self._model.named_buffers() if name in unfollowed)
        for layer in self._model.modules():
            if self._compat.unsupported(layer) is not None:
                free += layer.buffers()
        self._untouched = Untouched(
            dict(tensors_of(self._model)), free, num_threads=self._num_threads
        )
        reload: Any = require("vllm.model_executor.model_loader.reload.layerwise")
        model: Any = self._model
        packs = [vars(layer).get("cpu_linear") for layer in model.modules()]
        make_ready(model, self._compat)
        with self._compat.context(), torch.no_grad():
            reload.initialize_layerwise_reload(model)
            loads = self._loads(reload)
            model.load_weights(iter(tensors.items()))
            self._check_loaded(reload)
            reload.finalize_layerwise_reload(model, self._config.model_config)
            self._pack_anew(packs)
        _keep_processed(loads)
        reloads.unwrap()
        # What the loader computes may be no number though the update's are.
        computed = {
            name: tensor
            for name, tensor in tensors_of(self._model)
            if name in unfollowed and not tensor.is_meta
        }
        check_finite(computed, computed, num_threads=self._num_threads)

    def prove(self) -> InstallProof:
        """Read what can be read."""
        if self._update is None or self._untouched is None or self._plan is None:
            raise ProofFailed("nothing was installed that could be proven. Call install first.")
        lost = [name for name, tensor in tensors_of(self._model) if tensor.is_meta]
        if lost:
            raise ProofFailed(
                f"vLLM's reload left {len(lost)} tensors without memory: {lost[:_SHOWN]}. Publish "
                "the whole model."
            )
        self._untouched.check()
        refuse_unreached(self._model)  # a step of the model may have made a copy since
        manifest, tensors = self._update
        proof, unproven = prove_reload(
            manifest,
            tensors,
            self._plan,
            self._model,
            self._compat,
            num_threads=self._num_threads,
        )
        if unproven:
            _LOG.warning(
                "version %d: what %d layers hold cannot be read back, so it is unproven: %s",
                manifest.weight_version,
                len(unproven),
                ", ".join(_patterns(unproven)),
            )
        return proof

    def undo(self) -> None:
        """Bring the model back to the objects and bytes that it had before the install."""
        self._restore()
        self.commit()

    def commit(self) -> None:
        """Let go of the copy."""
        self._before = self._update = self._untouched = None

    # ---- inside ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        if self._before is not None:
            snapshot, reloads = self._before
            reloads.restore()
            snapshot.restore()

    def _loads(self, reload: Any) -> list[tuple[torch.nn.Module, list[Any]]]:
        """The lists in which vLLM notes, during a reload, what processed layers are loaded with."""
        return [
            (layer, reload.get_layerwise_info(layer).loaded_weights)
            for layer in self._model.modules()
            if self._compat.unsupported(layer) is not None
        ]

    def _is_optional(self, target: Target) -> bool:
        """Whether checkpoints come without a parameter: vLLM made it, or it scales attention."""
        reload: Any = require("vllm.model_executor.model_loader.reload.layerwise")
        meta: Any = require("vllm.model_executor.model_loader.reload.meta")
        return all(
            is_deferred_attention(reload, user.module)
            or (
                user.leaf not in self._compat.checkpoint_tensors(user.module)
                and user.leaf not in meta.SKIP_TENSORS
            )
            for user in target.users
        )

    def _check_loaded(self, reload: Any) -> None:
        """Refuse to go on with layers that got nothing: vLLM would give them their old weights."""
        loaded: set[int] = set()
        empty: dict[str, list[torch.Tensor]] = {}
        for name, layer in self._model.named_modules():
            info = reload.get_layerwise_info(layer)
            weights = [meta for meta in info.restore_metadata[0].values() if meta.numel()]
            if not weights or is_deferred_attention(reload, layer):
                continue
            held = [] if info.kernel_tensors is None else list(info.kernel_tensors[0].values())
            if not info.can_load() or info.load_numel > 0:
                loaded |= {id(tensor) for tensor in layer.parameters(recurse=False)}
                loaded |= {id(tensor) for tensor in held}
            else:
                empty[name] = held
        # A tied layer gets its weights through the other one.
        lost = [name for name, held in empty.items() if not {id(t) for t in held} <= loaded]
        if lost:
            msg = (
                f"the update leaves {len(lost)} layers of the engine as they are: {lost[:_SHOWN]}. "
                "Publish the whole model."
            )
            # What the loader writes when it is asked alone, it writes past vLLM's reload.
            if self._plan and {*lost} <= _written_layers(self._plan):
                msg = (
                    f"the update has what {len(lost)} layers need ({lost[:_SHOWN]}), but vLLM's "
                    "loader of this model goes past its reload: such models cannot be updated. "
                    "Start a fresh engine from the checkpoint."
                )
            raise IncompatibleUpdate(msg)

    def _pack_anew(self, before: Sequence[object]) -> None:
        """Pack the weights whose layer vLLM did not process: tied ones, that got no load of theirs.

        vLLM leaves them with the pack of the old weights, on the CPU (0.27.1 to 0.33.0 at least).
        """
        for layer, old in zip(self._model.modules(), before, strict=True):
            pack = vars(layer).get("cpu_linear")
            weight = layer._parameters.get("weight")  # noqa: SLF001 - torch has no other way in
            if pack is not None and pack is old and weight is not None and weight.numel():
                method: Any = layer.quant_method
                method.process_weights_after_loading(layer)


def _written_layers(plan: LoadPlan) -> set[str]:
    """Paths of the layers whose parameters the loader writes."""
    written = plan.steps.keys() | plan.computed
    return {user.path for index in written for user in plan.targets[index].users}


def _patterns(names: Iterable[str]) -> dict[str, None]:
    """The names of layers with their numbers left out, each once."""
    return dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)


def _keep_processed(loads: list[tuple[torch.nn.Module, list[Any]]]) -> None:
    """Keep what layers were processed from for as long as they compute with it.

    Kernels for the CPU keep pointers to scales, without a reference. vLLM copies these scales back
    into the parameters that it had, and lets go of what the kernels point to.
    """
    for layer, noted in loads:
        parameters = [arguments.arguments.get("param") for _, arguments in noted]
        if any(parameter.device.type == "cpu" for parameter in parameters):
            vars(layer)[_KEPT] = parameters
