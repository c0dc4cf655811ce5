"""A model's skeleton: its tree of modules once more, with the parameters that checkpoints load.

A serving model no longer has the parameters that its loader writes: they were fused, packed for
the CPU's matrix product, repacked. The skeleton has them, without memory (on meta), with their
loaders; so the engine's own ``load_weights`` can be run on it to see what it does, while the model
itself goes on serving.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rl_bridge.engines.vllm import compat as vllm_parts

__all__ = [
    "EngineParts",
    "Skeleton",
    "Target",
    "User",
]


class EngineParts(Protocol):
    """What a skeleton asks of the engine whose model it is: a module such as vLLM's ``parts``.

    Attributes:
        RELOAD: what serves models that cannot be served from a skeleton.

    """

    RELOAD: str

    def config_context(self, config: Any, /) -> AbstractContextManager[object]:
        """The context in which the engine's loaders expect to run."""

    def checkpoint_tensors(self, layer: torch.nn.Module, /) -> Mapping[str, torch.Tensor]:
        """A layer's parameters as they were before the engine processed them, on meta."""

    def loaded_dtype(
        self, layer: torch.nn.Module, leaf: str, parameter: torch.Tensor, /
    ) -> torch.dtype:
        """The dtype in which a parameter is loaded."""

    def bound_anew(
        self, attributes: Mapping[str, Any], live: torch.nn.Module, clone: torch.nn.Module, /
    ) -> dict[str, Any]:
        """A tensor's attributes with the methods of its layer bound to that layer's clone."""


@dataclass(frozen=True, slots=True, eq=False)
class User:
    """A module that holds a parameter, and the name under which it holds it."""

    path: str
    module: torch.nn.Module
    leaf: str

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


@dataclass(slots=True, eq=False)
class Target:
    """One parameter, as checkpoints load it.

    Attributes:
        meta: its shape, strides, dtype and attributes; without memory.
        users: the modules that hold it, more than one where it is tied. The first names it.
        is_consumed: the engine keeps no such parameter: it was packed away when it was loaded.

    """

    meta: torch.Tensor
    users: list[User] = field(default_factory=list)
    is_consumed: bool = False

    @property
    def name(self) -> str:
        """Full name, of its first user."""
        return self.users[0].name

    @property
    def live(self) -> torch.Tensor | None:
        """What the engine has of it now; None where it was packed away."""
        return self.users[0].module._parameters.get(self.users[0].leaf)  # noqa: SLF001 - torch has no other way in

    def like(self, memory: torch.Tensor) -> torch.Tensor:
        """Make `memory`, a tensor of the same shape, a parameter of this kind."""
        made = memory.detach()
        made.__class__ = self.meta.__class__
        made.__dict__.update(self.meta.__dict__)
        return made

    def empty(self) -> torch.Tensor:
        """Memory for it, not initialized, on the engine's device."""
        device = torch.device("cpu") if self.live is None else self.live.device
        return torch.empty_strided(
            tuple(self.meta.shape), self.meta.stride(), dtype=self.meta.dtype, device=device
        )


class Skeleton:
    """The tree once more. Costs no memory for weights; the model is only read."""

    def __init__(self, model: torch.nn.Module, parts: EngineParts = vllm_parts) -> None:
        """Walk `model`; modules that occur twice occur twice here, tied parameters stay tied."""
        self._parts = parts
        self.elsewhere = parts.RELOAD
        self.targets: list[Target] = []
        self._by_parameter: dict[object, Target] = {}
        self._clones: dict[int, torch.nn.Module] = {}
        self.model = self._clone(model, "")

    def _clone(self, module: torch.nn.Module, path: str) -> torch.nn.Module:
        known = self._clones.get(id(module))
        if known is not None:
            return known
        clone: torch.nn.Module = object.__new__(type(module))
        self._clones[id(module)] = clone
        state = vars(clone)
        state.update(vars(module))
        state["_parameters"] = self._parameters(module, clone, path)
        state["_buffers"] = {
            name: None if buffer is None else buffer.detach().to("meta")
            for name, buffer in module._buffers.items()  # noqa: SLF001 - torch has no other way in
        }
        state["_modules"] = {
            name: None if child is None else self._clone(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()  # noqa: SLF001 - as above
        }
        return clone

    def _parameters(
        self, module: torch.nn.Module, clone: torch.nn.Module, path: str
    ) -> dict[str, torch.Tensor | None]:
        recorded = self._parts.checkpoint_tensors(module)
        live = module._parameters  # noqa: SLF001 - as above
        made: dict[str, torch.Tensor | None] = {}
        for leaf in dict.fromkeys([*live, *recorded]):
            parameter, meta = live.get(leaf), recorded.get(leaf)
            if parameter is None and meta is None:
                made[leaf] = None
                continue
            is_consumed = parameter is None or (
                parameter.numel() == 0 and meta is not None and meta.numel() > 0
            )
            # What was packed away is no longer shared with anybody; the rest is, by identity.
            key: object = (id(module), leaf) if is_consumed else id(parameter)
            target = self._by_parameter.get(key)
            if target is None:
                source = meta if meta is not None else parameter
                assert source is not None
                dtype = self._parts.loaded_dtype(module, leaf, source)
                twin = source.detach().to("meta", dtype=dtype)
                twin.__class__ = source.__class__
                twin.__dict__.update(self._parts.bound_anew(vars(source), module, clone))
                target = Target(twin, is_consumed=is_consumed)
                self._by_parameter[key] = target
                self.targets.append(target)
            target.users.append(User(path, module, leaf))
            made[leaf] = target.meta
        return made

    @contextmanager
    def holding(self, memory: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Give some parameters memory for a while: position in `targets` -> tensor."""
        places = [
            (vars(self._clones[id(user.module)])["_parameters"], user.leaf, self.targets[index])
            for index in memory
            for user in self.targets[index].users
        ]
        given = {id(self.targets[i]): self.targets[i].like(tensor) for i, tensor in memory.items()}
        try:
            for parameters, leaf, target in places:
                parameters[leaf] = given[id(target)]
            yield
        finally:
            for parameters, leaf, target in places:
                parameters[leaf] = target.meta
