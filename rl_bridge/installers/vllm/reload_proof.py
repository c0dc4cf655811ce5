"""What can be proven of a model that vLLM reloaded, and what cannot."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.vllm.canary import Canary
from rl_bridge.installers.vllm.evidence import Evidence
from rl_bridge.installers.vllm.parts import loaded_dtype, repacks, unsupported
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
    *,
    num_threads: int | None,
) -> tuple[InstallProof, list[str]]:
    """Compare what the model holds with the update, by what was learned of its loader.

    Args:
        manifest: the update.
        tensors: its verified tensors.
        plan: where they go; None if the loader could not be followed: then nothing is proven.
        model: the reloaded model.
        num_threads: threads that digest.

    Returns:
        The proof, ``unproven`` if anything is left out, and the names of the layers left out.

    Raises:
        ProofFailed: the model holds something else.

    """
    if plan is None:
        return InstallProof(method="unproven"), [type(model).__name__]
    unproven: dict[str, None] = {}
    readable = {}
    for index, steps in plan.steps.items():
        target = plan.targets[index]
        if all(_is_readable(user, target) for user in target.users):
            readable[index] = steps
        else:
            unproven.update((user.path, None) for user in target.users)
    plan = replace(plan, steps=readable)
    evidence = Evidence(manifest, tensors, plan, num_threads=num_threads)
    staged = Staged()
    for index in readable:
        target = plan.targets[index]
        weight = _live(target.users[0])
        if target.is_consumed:
            # The pack's weight is gone: it is assembled once more, and asked the same questions.
            weight = target.like(target.empty())
            plan.assemble(index, tensors, weight)
            evidence.add(Assembled(index, weight, borrowed=False))
        else:
            staged.tensors.append(TensorChange(target.name, weight, weight, index))
        for user in target.users:
            pack: Any = vars(user.module).get("cpu_linear")
            if user.leaf == "weight" and pack is not None and weight.ndim == _MATRIX:
                staged.canaries.append(Canary.make(user.path, user.module, pack, weight))
    evidence.seal(staged)
    proof = evidence.check(staged)
    if unproven:
        sources = {route.source for route in plan.routes()}
        proof = replace(proof, method="unproven", root="", tensors=len(sources))
    return proof, list(unproven)


def _is_readable(user: User, target: Target) -> bool:
    """Whether what a layer makes of a parameter shows what was loaded."""
    if unsupported(user.module) is not None:
        return False
    if target.is_consumed:
        return user.leaf == "weight" and callable(vars(user.module).get("cpu_linear"))
    live = _live(user)
    return (
        live.shape == target.meta.shape
        and target.meta.dtype == loaded_dtype(user.module, user.leaf, live)
        and live.stride() == target.meta.stride()
        and not repacks(user.module)
    )


def _live(user: User) -> torch.Tensor:
    live = user.module._parameters[user.leaf]  # noqa: SLF001 - torch has no other way in
    assert live is not None
    return live
