"""What can be proven of a model that vLLM reloaded, and what cannot.

Parameters that are kept as they are loaded are read, and packed ones asked for products. Packed
experts and the absorbed projections of multi-head latent attention (MLA) can be read, too: vLLM's
own processing is run once more, on a stand-in of the layer, and must come to the bytes that the
serving layer holds.
"""

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.skeleton import Target, User
from rl_bridge.engines.staging import Assembled, Staged, TensorChange
from rl_bridge.engines.vllm.canary import PackCanary, check_experts
from rl_bridge.engines.vllm.compat import VLLMCompat, is_latent, repacks
from rl_bridge.engines.vllm.model_installer import Given, has_same_bytes, processed
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.model import WeightUpdateManifest

_MATRIX = 2
_PROJECTION = "kv_b_proj"


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
        sources = {route.source for route in plan.routes()}
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
        msg = (
            f"layer {path!r}: it holds {left}, which vLLM does not make of this version's weights. "
            "Install the update again; if that fails too, this model cannot be updated by reloads."
        )
        raise ProofFailed(msg)
    fresh = {name: tensor for name, tensor in made.items() if tensor is not had.get(name)}
    if not fresh:
        msg = (
            f"layer {path!r}: vLLM derives nothing from its weights that could be compared. Use a "
            "version of vLLM that was tried, see the table of versions."
        )
        raise ProofFailed(msg)
    for name, tensor in fresh.items():
        _compare(f"{path}.{name}", had.get(name), tensor)


# ---- inside -------------------------------------------------------------------------------------


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
    if live is not None and is_alike and has_same_bytes(live, made):
        return
    msg = (
        f"{name!r} of the engine is not what vLLM makes of this version's weights. Install the "
        "update again; if that fails too, this model cannot be updated by reloads."
    )
    raise ProofFailed(msg)
