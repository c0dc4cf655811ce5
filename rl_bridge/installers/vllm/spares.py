"""Memory that updates pass on to each other, so that staging the next one touches no page anew.

What the version before the active one had is what the next one gets: parameters, packed products,
and one buffer for what is assembled only to be packed.
"""

from collections.abc import Callable, Iterable

import torch

from rl_bridge.installers.vllm.parts import repacks
from rl_bridge.installers.vllm.routes import LoadPlan
from rl_bridge.installers.vllm.skeleton import Target

__all__ = ["Spares"]


class Spares:
    """Memory of the version before the active one, for the next: no page is touched anew."""

    def __init__(self) -> None:
        """Begin with none."""
        self._tensors: dict[int, torch.Tensor] = {}
        self._packs: dict[int, list[object]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, index: int, target: Target) -> torch.Tensor:
        """Memory for a parameter that stays."""
        spare = self._tensors.pop(index, None)
        return target.empty() if spare is None else spare

    def keep(self, index: int, tensor: torch.Tensor) -> None:
        """Keep what a parameter no longer needs."""
        self._tensors[index] = tensor

    def drop(self, is_looked_at: Callable[[torch.Tensor], bool]) -> None:
        """Leave to others what they look at: views of a version that was undone keep its bytes."""
        self._tensors = {i: kept for i, kept in self._tensors.items() if not is_looked_at(kept)}

    def keep_packs(self, packs: Iterable[tuple[torch.nn.Module, object]]) -> None:
        """Keep what layers computed with, until each gets its next: then the allocator has room.

        All of them freed at once would go back to the system, and be touched anew page by page.
        """
        self._packs = {}
        for module, value in packs:
            self._packs.setdefault(id(module), []).append(value)

    def make_room(self, module: torch.nn.Module) -> None:
        """A layer gets its next pack now."""
        self._packs.pop(id(module), None)

    def scratch(self, target: Target) -> torch.Tensor:
        """Memory for a parameter that is packed at once and not kept; valid until the next call."""
        meta = target.meta
        nbytes = meta.numel() * meta.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        flat = self._scratch[:nbytes].view(meta.dtype)
        return torch.as_strided(flat, tuple(meta.shape), meta.stride())

    def _has_pack(self, target: Target) -> bool:
        """Whether a parameter needs no room for a pack: there is some, or it gets none."""
        # (Heads and embeddings keep their weight beside the pack.)
        packing = [
            user.module
            for user in target.users
            if target.is_consumed or (user.leaf == "weight" and "cpu_linear" in vars(user.module))
        ]
        return all(id(layer) in self._packs for layer in packing)

    def missing_nbytes(self, plan: LoadPlan) -> int:
        """Bytes that the next update takes beyond what is here: parameters, packs, scratch."""
        kept = packed = scratch = 0
        experts: dict[int, int] = {}
        for index in plan.steps:
            target = plan.targets[index]
            nbytes = target.meta.numel() * target.meta.element_size()
            packed += 0 if self._has_pack(target) else nbytes
            if target.is_consumed:
                scratch = max(scratch, nbytes)
            elif repacks(layer := target.users[0].module):
                # Assembled, and packed twice to be compared; what stays is one of the packs.
                kept += nbytes
                experts[id(layer)] = experts.get(id(layer), 0) + 2 * nbytes
            elif index not in self._tensors:
                kept += nbytes
        scratch = max(0, scratch - self._scratch.numel())
        return kept + packed + scratch + max(experts.values(), default=0)
