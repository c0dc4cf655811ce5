"""A module's state dict, without walking 40,000 submodules at every step.

``Module.state_dict`` costs about 1.5 us per submodule, several times per update. The walk is done
once; after that only what it went through is compared: the same objects under the same keys of the
same dictionaries, and none added or taken away. Whatever differs leads to a new walk. Modules that
have a say in their own state dict (hooks, overridden methods) are always walked.
"""

from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np
import torch

from rl_bridge.memory.passes import native_module

__all__ = ["ModuleState"]

# Where a module keeps what its state dict is made of, then what else decides about it.
_DICTS = ("_parameters", "_buffers", "_modules")
_PARTS = (*_DICTS, "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")


class ModuleState:
    """The parameters and persistent buffers of one module, by state-dict name."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look at `module`; nothing is walked yet."""
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_cached = False
        # What the walk went through: modules, each one's containers under `_PARTS`, the sizes of
        # these (uint32), and every item of the dictionaries among them.
        self._modules: list[torch.nn.Module] = []
        self._parts: list[Any] = []
        self._sizes = b""
        self._keys: list[str] = []
        self._values: list[object] = []

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> the live tensor object, tied names included.

        Do not change the mapping. As long as nothing changed it is the same object.
        """
        if not (self._is_cached and self._is_same()):
            self._walk()
        return self._tensors

    def _is_same(self) -> bool:
        native = native_module()
        same_modules = _same_modules if native is None else native.same_modules
        noted = (self._parts, self._sizes, self._keys, self._values)
        return bool(same_modules(self._modules, _PARTS, len(_DICTS), *noted))

    def _walk(self) -> None:
        found = self._module.state_dict(keep_vars=True)
        self._tensors = {n: item for n, item in found.items() if isinstance(item, torch.Tensor)}
        self._modules = list(self._module.modules())
        self._is_cached = all(map(_is_plain, self._modules))
        if not self._is_cached:
            self._modules = []
        self._parts = [module.__dict__[name] for module in self._modules for name in _PARTS]
        self._sizes = np.fromiter(map(len, self._parts), np.uint32, len(self._parts)).tobytes()
        dicts = [module.__dict__[name] for module in self._modules for name in _DICTS]
        self._keys = [key for part in dicts for key in part]
        self._values = [value for part in dicts for value in part.values()]


def _same_modules(
    modules: list[torch.nn.Module], names: tuple[str, ...], num_dicts: int, *noted: Any
) -> bool:
    parts, sizes, keys, values = noted
    now = [module.__dict__.get(name) for module in modules for name in names]
    if not all(map(is_, now, parts)) or list(map(len, parts)) != list(memoryview(sizes).cast("I")):
        return False
    dicts = [part for i, part in enumerate(parts) if i % len(names) < num_dicts]
    keys_now = [key for part in dicts for key in part]
    values_now = [value for part in dicts for value in part.values()]
    return keys_now == keys and all(map(is_, values_now, values))


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
        # Script modules, for instance, answer these attributes from elsewhere.
        and all(module.__dict__.get(name) is getattr(module, name) for name in _PARTS)
    )
