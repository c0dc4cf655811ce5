"""A module's state dict, without walking 40,000 submodules at every step.

``Module.state_dict`` costs about 1.5 us per submodule, several times per update. The walk is done
once; after that only what it went through is compared: the same objects under the same keys of the
same dictionaries, and none added or taken away. Whatever differs leads to a new walk. Modules that
have a say in their own state dict (hooks, overridden methods) are always walked.
"""

from collections.abc import Mapping
from operator import attrgetter, eq, is_
from typing import Any

import torch

from rl_bridge.memory.passes import native_module

__all__ = ["ModuleState"]

_PARTS = ("_parameters", "_buffers", "_modules")


class ModuleState:
    """The parameters and persistent buffers of one module, by state-dict name."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look at `module`; nothing is walked yet."""
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_cached = False
        # What the walk went through: modules, their three dictionaries, every item of these, and
        # whatever else has a size that must stay.
        self._modules: list[torch.nn.Module] = []
        self._owned: list[list[Any]] = []
        self._items: tuple[list[Any], list[str], list[object]] = ([], [], [])
        self._sized: list[Any] = []
        self._sizes: list[int] = []

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> the live tensor object, tied names included.

        Do not change the mapping. As long as nothing changed it is the same object.
        """
        if not (self._is_cached and self._is_same()):
            self._walk()
        return self._tensors

    def _is_same(self) -> bool:
        native = native_module()
        same_items = _same_items if native is None else native.same_items
        same_sizes = _same_sizes if native is None else native.same_sizes
        same_attributes = _same_attributes if native is None else native.same_attributes
        return (
            all(
                same_attributes(self._modules, name, owned)
                for name, owned in zip(_PARTS, self._owned, strict=True)
            )
            and same_sizes(self._sized, self._sizes)
            and same_items(*self._items)
        )

    def _walk(self) -> None:
        found = self._module.state_dict(keep_vars=True)
        self._tensors = {n: item for n, item in found.items() if isinstance(item, torch.Tensor)}
        self._modules = list(self._module.modules())
        self._is_cached = all(map(_is_plain, self._modules))
        if not self._is_cached:
            self._modules = []
        self._owned = [[getattr(module, name) for module in self._modules] for name in _PARTS]
        dicts, keys, values = self._items = ([], [], [])
        self._sized = []
        for owned in self._owned:
            self._sized += owned
            for part in owned:
                for key, value in part.items():
                    dicts.append(part)
                    keys.append(key)
                    values.append(value)
        for module in self._modules:
            self._sized += [
                module._non_persistent_buffers_set,  # noqa: SLF001 - state_dict reads it
                module._state_dict_hooks,  # noqa: SLF001
                module._state_dict_pre_hooks,  # noqa: SLF001
            ]
        self._sizes = list(map(len, self._sized))


def _same_attributes(owners: list[Any], name: str, values: list[Any]) -> bool:
    return all(map(is_, map(attrgetter(name), owners), values))


def _same_sizes(containers: list[Any], sizes: list[int]) -> bool:
    return all(map(eq, map(len, containers), sizes))


def _same_items(dicts: list[Any], keys: list[str], values: list[object]) -> bool:
    return all(map(is_, map(dict.get, dicts, keys), values))


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module's part of the state dict is what lies in its dictionaries."""
    kind, base = type(module), torch.nn.Module
    return (
        kind.state_dict is base.state_dict
        and kind._save_to_state_dict is base._save_to_state_dict  # noqa: SLF001
        and kind.get_extra_state is base.get_extra_state
        and "state_dict" not in module.__dict__
        and not module._state_dict_hooks  # noqa: SLF001
        and not module._state_dict_pre_hooks  # noqa: SLF001
    )
