"""What can be proven of a model that vLLM reloaded, and what cannot."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.vllm.canary import Canary
from rl_bridge.installers.vllm.derived import absorbed, check_absorbed, check_packed
from rl_bridge.installers.vllm.evidence import Evidence
from rl_bridge.installers.vllm.parts import (
    checkpoint_tensors,
    is_latent,
    loaded_dtype,
    repacks,
    unsupported,
)
from rl_bridge.installers.vllm.routes import LoadPlan
from rl_bridge.installers.vllm.skeleton import Target, User
from rl_bridge.installers.vllm.staging import Assembled, Staged, TensorChange
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["prove_reload"]

_MATRIX = 2


def prove_reload(
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    plan: LoadPlan | None,
    model: torch.nn.Module,
    config: Any,
    *,
    num_threads: int | None,
) -> tuple[InstallProof, list[str]]:
    """Compare what the model holds with the update, by what was learned of its loader.

    Args:
        manifest: the update.
        tensors: its verified tensors.
        plan: where they go; None if the loader could not be followed: then nothing is proven.
        model: the reloaded model.
        config: the engine's configuration.
        num_threads: threads that digest.

    Returns:
        The proof, ``unproven`` if anything is left out, and the names of the layers left out.

    Raises:
        ProofFailed: the model holds something else.

    """
    if plan is None:
        return InstallProof(method="unproven"), [type(model).__name__]
    latent = {id(layer.kv_b_proj): (name, layer) for name, layer in absorbed(model)}
    readable, unproven = _readable(plan, model, {name for name, _ in latent.values()})
    plan = replace(plan, steps=readable)
    evidence = Evidence(manifest, tensors, plan, num_threads=num_threads)
    reading = _Reading(plan, tensors, evidence, latent, config)
    layers: dict[str, list[int]] = {}
    for index in readable:
        layers.setdefault(plan.targets[index].users[0].path, []).append(index)
    for indices in layers.values():
        reading.read(indices)
    staged = reading.staged
    compared = {*map(id, staged.compared)}
    unproven.update((name, None) for key, (name, _) in latent.items() if key not in compared)
    evidence.seal(staged)
    proof = evidence.check(staged)
    if unproven:
        sources = {route.source for route in plan.routes()}
        proof = replace(proof, method="unproven", root="", tensors=len(sources))
    return proof, list(unproven)


class _Reading:
    """Reads a reloaded model, one layer after the other.

    Weights that a layer no longer has as they were loaded are assembled once more: those of one
    layer at a time, since there is no room for a third copy of the model.
    """

    def __init__(
        self,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        evidence: Evidence,
        latent: Mapping[int, tuple[str, Any]],
        config: Any,
    ) -> None:
        self._plan, self._tensors, self._evidence = plan, tensors, evidence
        self._latent = latent  # by their projection
        self._config = config
        self.staged = Staged()

    def read(self, indices: Sequence[int]) -> None:
        """Compare the parameters of one layer, and what vLLM makes of them."""
        given: dict[str, tuple[int, torch.Tensor, Target]] = {}
        for index in indices:
            target = self._plan.targets[index]
            user = target.users[0]
            live = weight = _live(user)
            if target.is_consumed or repacks(user.module):
                weight = self._assemble(index, target)
                given[user.leaf] = (index, weight, target)
            if not target.is_consumed:
                kept = index if weight is live else None
                self.staged.tensors.append(TensorChange(target.name, live, live, kept))
            self.staged.canaries += _canaries(target, weight, self._latent)
        first = self._plan.targets[indices[0]].users[0]
        if repacks(first.module):
            check_packed(first.path, first.module, given, self._config)
        if id(first.module) in self._latent:
            name, layer = self._latent[id(first.module)]
            weight_again = given["weight"][1] if "weight" in given else None
            check_absorbed(name, layer, weight_again, self._config)
            self.staged.compared.append(first.module)

    def _assemble(self, index: int, target: Target) -> torch.Tensor:
        """Assemble one, and compare it with the manifest."""
        weight = target.like(target.empty())
        self._plan.assemble(index, self._tensors, weight)
        is_replaced = not target.is_consumed
        self._evidence.add(Assembled(index, weight, borrowed=False, replaced=is_replaced))
        return weight


def _canaries(target: Target, weight: torch.Tensor, projections: Container[int]) -> list[Canary]:
    """Ask the packed products of a weight, compare them with its own."""
    made = []
    for user in target.users:
        pack: Any = vars(user.module).get("cpu_linear")
        is_asked = pack is not None and id(user.module) not in projections
        if is_asked and user.leaf == "weight" and weight.ndim == _MATRIX:
            made.append(Canary.make(user.path, user.module, pack, weight))
    return made


def _readable(
    plan: LoadPlan, model: torch.nn.Module, latent: Container[str]
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
        if is_apart and all(_is_readable(user, target) for user in target.users):
            readable[index] = steps
        else:
            unproven.update((user.path, None) for user in target.users)
    return readable, unproven


def _is_readable(user: User, target: Target) -> bool:
    """Whether what a layer makes of a parameter shows what was loaded."""
    if unsupported(user.module) is not None:
        return False
    if target.is_consumed:
        return user.leaf == "weight" and callable(vars(user.module).get("cpu_linear"))
    live = _live(user)
    if repacks(user.module) and user.leaf in checkpoint_tensors(user.module):
        return live.device.type == "cpu" and len(target.users) == 1
    return (
        live.shape == target.meta.shape
        and target.meta.dtype == loaded_dtype(user.module, user.leaf, live)
        and live.stride() == target.meta.stride()
    )


def _live(user: User) -> torch.Tensor:
    live = user.module._parameters[user.leaf]  # noqa: SLF001 - torch has no other way in
    assert live is not None
    return live
