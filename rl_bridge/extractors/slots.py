"""Where a module keeps its tensors: found once, read in every update without a walk."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rl_bridge.extractors.chunks import require_dense
from rl_bridge.extractors.names import Naming

__all__ = ["ModuleSlots", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a tensor in a module tree.

    Attributes:
        name: as published.
        path: as the tree spells it.
        module: that owns it.
        keeper: the module's own dictionary of parameters or buffers.
        key: its name there.
        is_parameter: it is no buffer.

    """

    name: str
    path: str
    module: torch.nn.Module
    keeper: dict[str, Any]
    key: str
    is_parameter: bool

    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.keeper[self.key]  # type: ignore[no-any-return]


class ModuleSlots:
    """Parameters and persistent buffers of a module, in the order of its state dict."""

    def __init__(self, module: torch.nn.Module, naming: Naming) -> None:
        """Walk through `module`.

        Args:
            module: the root.
            naming: gives the published name; what gets none is left out.

        Raises:
            IncompatibleUpdate: one of them is not dense.

        """
        self._keepers: list[dict[str, Any]] = []
        self._counts: list[int] = []
        self.slots: list[Slot] = []
        for prefix, owner in module.named_modules(remove_duplicate=False):
            transient = owner._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name
            kinds: Iterable[tuple[dict[str, Any], bool]] = (
                (owner._parameters, True),  # noqa: SLF001 - the dictionary itself, to look again
                (owner._buffers, False),  # noqa: SLF001
            )
            for keeper, is_parameter in kinds:
                self._keepers.append(keeper)
                self._counts.append(len(keeper))
                for key, tensor in keeper.items():
                    path = f"{prefix}.{key}" if prefix else key
                    is_kept = tensor is not None and (is_parameter or key not in transient)
                    name = naming(path) if is_kept else None
                    if name is not None:
                        require_dense(name, tensor)
                        self.slots.append(Slot(name, path, owner, keeper, key, is_parameter))

    def select(self, is_wanted: Callable[[Slot], bool]) -> None:
        """Forget the slots that are not wanted."""
        self.slots = [slot for slot in self.slots if is_wanted(slot)]

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors that are there now; None where the modules hold more or fewer than before."""
        if list(map(len, self._keepers)) != self._counts:
            return None
        return [slot.keeper[slot.key] for slot in self.slots]

    def ties(self) -> list[int | None]:
        """For each slot, the number of an earlier one that holds the same tensor."""
        first: dict[int, int] = {}
        found: list[int | None] = []
        for index, slot in enumerate(self.slots):
            at = first.setdefault(id(slot.tensor()), index)
            found.append(None if at == index else at)
        return found
