"""The next version, written into the memory that serves: nothing of it is made beside.

Until the install an update is only read, in the host's memory. The install then writes it layer by
layer into the parameters that serve. The way back is to write the version before it once more: from
its own imported tensors, which stay leased for that, as long as they are what the engine holds.
Where nobody has these (the weights that an engine was started with, or that somebody else loaded)
the model is copied to the host first.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.skeleton import Target
from rl_bridge.engines.staging import Staged, TensorChange, assemble
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.views import ImportedTensors, Pin

Layer = Sequence[Sequence[int]]
"""Positions of a layer's targets; those that an engine processes together are one group."""


def groups_of(plan: LoadPlan) -> list[list[int]]:
    """Positions of targets: all parameters of one module, and of those that share one with it."""
    modules: dict[int, list[int]] = {}
    for index in plan.steps:
        for user in plan.targets[index].users:
            modules.setdefault(id(user.module), []).append(index)
    done: set[int] = set()
    groups = []
    for index in plan.steps:
        if index in done:
            continue
        done.add(index)
        group = [index]
        for i in group:  # which grows meanwhile
            for user in plan.targets[i].users:
                near = [one for one in modules.pop(id(user.module), ()) if one not in done]
                done.update(near)
                group += near
        groups.append(group)
    return groups


def layers_of(plan: LoadPlan) -> Mapping[str, Layer]:
    """Name -> groups of a layer: what is below a number in the model's tree, or one module."""
    layers: dict[str, list[Sequence[int]]] = {}
    for group in groups_of(plan):
        path = plan.targets[group[0]].users[0].path.split(".")
        end = next((i for i, part in enumerate(path, 1) if part.isdigit()), len(path))
        layers.setdefault(".".join(path[:end]), []).append(group)
    return layers


@dataclass(slots=True, eq=False)
class Written:
    """A version that is written into the memory that serves, and what writes it again."""

    manifest: WeightUpdateManifest
    plan: LoadPlan
    tensors: Mapping[str, torch.Tensor]  # those that go anywhere here
    evidence: Evidence
    # The lease of their memory; None if the caller owns that, and so may write to it.
    pin: Pin | None
    # Name of a layer -> what was written there.
    layers: dict[str, Staged] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        manifest: WeightUpdateManifest,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        evidence: Evidence,
    ) -> "Written":
        """A version that is about to be written; its tensors keep their lease for as long."""
        sources = {route.source for route in plan.routes()}
        used = {name: tensors[name] for name in tensors if name in sources}
        pin = tensors.pin if isinstance(tensors, ImportedTensors) else None
        return cls(manifest, plan, used, evidence, pin)

    def staged(self) -> Staged:
        """All that was written."""
        every = Staged()
        for layer in self.layers.values():
            every.extend(layer)
        return every

    def check(self) -> InstallProof:
        """Read what the engine holds of it, and what was packed right out of its tensors.

        Raises:
            ProofFailed: either is not what was published.

        """
        proof = self.evidence.check(self.staged())
        self.evidence.check_lent(self.tensors)
        return proof

    def refresh(self) -> None:
        """Drop what somebody in this process wrote into his view of its tensors."""
        if self.pin is not None and self.pin.view is not None:
            self.pin.view.refresh(self.pin.address, self.pin.nbytes)


def is_as_loaded(target: Target, live: torch.Tensor) -> bool:
    """Whether a serving parameter lies in memory as the loader fills it."""
    return (live.dtype, live.stride()) == (target.meta.dtype, target.meta.stride())


def write_parameters(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    indexes: Iterable[int],
    *,
    num_threads: int | None,
) -> list[TensorChange]:
    """Write parameters that an engine keeps as they are loaded, or in another dtype."""
    changes = []
    memory: dict[int, torch.Tensor] = {}
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in indexes:
        target = plan.targets[index]
        parameter = target.serving()
        memory[index] = live = parameter.data
        # The parameter itself, and no view of it: torch would count that as one more user of the
        # memory.
        changes.append(TensorChange(target.name, parameter, parameter, index))
        if not is_as_loaded(target, live):
            memory[index] = target.empty()
            others.append((live, memory[index]))
    with writable(change.live for change in changes):
        assemble(plan, tensors, memory, num_threads=num_threads)
        for live, loaded in others:
            live.copy_(loaded)
    return changes


def writable(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """A context in which torch lets us write to tensors, also to those of inference mode."""
    return torch.inference_mode(mode=any(tensor.is_inference() for tensor in tensors))
