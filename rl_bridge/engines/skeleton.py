"""A model's skeleton: its tree of modules once more, with the parameters that checkpoints load.

A serving model no longer has the parameters that its loader writes: they were fused, packed for
the CPU's matrix product, repacked. The skeleton has them, without memory (on meta), with their
loaders; so the engine's own ``load_weights`` can be run on it to see what it does, while the model
itself goes on serving.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch

from rl_bridge.errors import ProofFailed

# Quantization methods of engines that change no number: at most they lay weights out anew, all of
# it within the layer that they are given.
_UNQUANTIZED = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)


def processed_by(layer: torch.nn.Module) -> str | None:
    """Which quantization method changes a layer's weights after their load; None if none does."""
    method = getattr(layer, "quant_method", None)
    if not hasattr(method, "process_weights_after_loading"):
        return None
    known = _UNQUANTIZED & {kind.__name__ for kind in type(method).__mro__}
    return None if known else type(method).__name__


class EngineCompat:
    """What an engine does with the weights of its layers while it loads a model.

    These are the answers of an engine that does nothing of its own: its parameters stay as its
    loader wrote them. Each engine overrides what is otherwise there.
    """

    elsewhere = "starting a fresh engine from its checkpoint"
    """What serves models that cannot be updated beside the serving version."""
    cast_remedy = ""
    """What else than publishing in the engine's dtype helps."""

    def context(self) -> AbstractContextManager[object]:
        """The context in which the engine's loaders expect to run."""
        return nullcontext()

    def checkpoint_tensors(self, layer: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """A layer's parameters as they were before the engine processed them, on meta."""
        del layer
        return {}

    def loaded_dtype(
        self, layer: torch.nn.Module, leaf: str, parameter: torch.Tensor
    ) -> torch.dtype:
        """The dtype in which a parameter is loaded, which may not be the one that it is kept in."""
        del layer, leaf
        return parameter.dtype

    def is_bound_to(self, owner: object, layer: torch.nn.Module) -> bool:
        """Whether a method of `owner` stands for that of a layer."""
        return owner is layer

    def unsupported(self, layer: torch.nn.Module) -> str | None:
        """Why the next version of a layer cannot be made beside it, or None if it can."""
        del layer
        return None


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

    @property
    def live(self) -> torch.Tensor | None:
        """What the module holds under that name now."""
        return self.module._parameters.get(self.leaf)  # noqa: SLF001 - torch has no other way in


@dataclass(eq=False)
class Target:
    """One parameter, as checkpoints load it."""

    meta: torch.Tensor  # its shape, strides, dtype and attributes; without memory
    # The modules that hold it, more than one where it is tied. The first names it.
    users: list[User] = field(default_factory=list)
    kept_dtype: torch.dtype | None = None  # the dtype in which the engine keeps it
    # The engine keeps no such parameter: it was packed away when it was loaded.
    is_consumed: bool = False
    # Several layers hold it, or one layer that has several places in the model.
    is_tied: bool = False

    @property
    def name(self) -> str:
        """Full name, of its first user."""
        return self.users[0].name

    @property
    def live(self) -> torch.Tensor | None:
        """What the engine has of it now; None where it was packed away."""
        return self.users[0].live

    def serving(self) -> torch.Tensor:
        """The parameter that the engine computes with."""
        live = self.live
        if live is None or (
            len(self.users) > 1 and any(user.live is not live for user in self.users)
        ):
            raise ProofFailed(
                f"parameter {self.name!r}: {[user.name for user in self.users]} no longer share "
                "one tensor. Start a fresh engine."
            )
        dtype = self.kept_dtype or self.meta.dtype
        if live.shape != self.meta.shape or live.dtype != dtype:
            raise ProofFailed(
                f"parameter {self.name!r} is {list(live.shape)} {live.dtype} now, expected "
                f"{list(self.meta.shape)} {dtype}. Start a fresh engine."
            )
        return live

    @property
    def device(self) -> torch.device:
        """Where the engine keeps it."""
        return torch.device("cpu") if self.live is None else self.live.device

    @cached_property
    def nbytes(self) -> int:
        """Memory that it takes, as it is loaded."""
        if not self.meta.numel():
            return 0
        steps = zip(self.meta.shape, self.meta.stride(), strict=True)
        return (1 + sum((dim - 1) * step for dim, step in steps)) * self.meta.element_size()

    def like(self, memory: torch.Tensor) -> torch.Tensor:
        """Make `memory`, a tensor of the same shape, a parameter of this kind."""
        made = memory.detach()
        made.__class__ = self.meta.__class__
        made.__dict__.update(self.meta.__dict__)
        return made

    def empty(self) -> torch.Tensor:
        """Memory for it, not initialized, on the engine's device."""
        return torch.empty_strided(
            tuple(self.meta.shape), self.meta.stride(), dtype=self.meta.dtype, device=self.device
        )


class Skeleton:
    """The tree once more. Costs no memory for weights; the model is only read."""

    def __init__(self, model: torch.nn.Module, compat: EngineCompat) -> None:
        """Walk `model`; modules that occur twice occur twice here, tied parameters stay tied."""
        self._compat = compat
        self.elsewhere = compat.elsewhere
        self.targets: list[Target] = []
        self._by_parameter: dict[object, Target] = {}
        self._clones: dict[int, torch.nn.Module] = {}
        self._met_again: set[int] = set()
        self.model = self._clone(model, "")
        for target in self.targets:
            again = (id(user.module) in self._met_again for user in target.users)
            target.is_tied = len(target.users) > 1 or any(again)

    def _clone(self, module: torch.nn.Module, path: str) -> torch.nn.Module:
        known = self._clones.get(id(module))
        if known is not None:
            self._met_again.update(map(id, module.modules()))
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
        recorded = self._compat.checkpoint_tensors(module)
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
                dtype = self._compat.loaded_dtype(module, leaf, source)
                twin = source.detach().to("meta", dtype=dtype)
                twin.__class__ = source.__class__
                twin.__dict__.update(self._bound_to(clone, vars(source), module))
                kept = dtype if is_consumed or parameter is None else parameter.dtype
                target = Target(twin, kept_dtype=kept, is_consumed=is_consumed)
                self._by_parameter[key] = target
                self.targets.append(target)
            target.users.append(User(path, module, leaf))
            made[leaf] = target.meta
        return made

    def _bound_to(
        self, clone: torch.nn.Module, attributes: Mapping[str, Any], module: torch.nn.Module
    ) -> dict[str, Any]:
        """A tensor's attributes, with the methods of its layer bound to that layer's clone."""
        return {
            key: MethodType(value.__func__, clone)
            if isinstance(value, MethodType) and self._compat.is_bound_to(value.__self__, module)
            else value
            for key, value in attributes.items()
        }

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
