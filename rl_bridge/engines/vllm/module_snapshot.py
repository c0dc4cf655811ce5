"""A snapshot of a model, objects and bytes, so that a reload can be undone.

vLLM's reload takes the parameters out of a serving model, puts others in and processes these in
place. What a failure leaves half-way is brought back here to the very objects and bytes.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_bridge.engines.vllm.compat import require
from rl_bridge.errors import IncompatibleUpdate

__all__ = [
    "ModelSnapshot",
    "ReloadBooks",
    "refuse_half_way",
]

# What holds state for a module beside the module: quantization methods, schemes, kernels, attention
# implementations. Nothing else that a module refers to is looked into.
_HELPERS = ("vllm.model_executor.", "vllm.v1.attention.")
# Bound after loading, large, and of no concern to a reload.
_NOT_WEIGHTS = frozenset({"kv_cache"})


class ModelSnapshot:
    """The state of a model's modules when it is made. Bytes are copied by `copy_bytes`."""

    def __init__(self, model: torch.nn.Module, *, helpers: tuple[str, ...] = _HELPERS) -> None:
        """Note what each module refers to; nothing is copied yet.

        Args:
            model: the model.
            helpers: module names (prefixes) of the classes whose objects belong to a module.

        Raises:
            IncompatibleUpdate: a tensor has its bytes in tensors of its own.

        """
        self._helpers = helpers
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, type, dict[str, Any], torch.Tensor]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._seen: set[int] = set()
        self._before: dict[int, dict[str, Any]] = {}
        for module in model.modules():
            self._note_object(module)

    @property
    def nbytes(self) -> int:
        """Bytes that `copy_bytes` takes, on the host."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def copy_bytes(self) -> None:
        """Copy every parameter and buffer, each storage once, to the host."""
        for key, storage in self._storages.items():
            self._copies[key] = _copy(storage)

    def attribute(self, module: torch.nn.Module, key: str) -> object:
        """What a module's attribute was; None if it had none."""
        return self._before.get(id(module), {}).get(key)

    def restore(self) -> None:
        """Bring all of it back. May be called again after an interrupt."""
        for state, before in self._states:
            _refill(state, before)
        for container, before in self._containers:
            _refill(container, before)
        for tensor, kind, attributes, data in self._tensors:
            tensor.__class__ = kind
            _refill(vars(tensor), attributes)
            if not _is_view_of(tensor, data):
                tensor.data = data
        for key, saved in self._copies.items():
            self._storages[key].copy_(saved, non_blocking=False)

    # ---- inside ---------------------------------------------------------------------------------

    def _note_object(self, owner: object) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        state = vars(owner)
        self._states.append((state, dict(state)))
        self._before[id(owner)] = self._states[-1][1]
        has_bytes = not type(owner).__module__.startswith("vllm.v1.")  # those have workspaces
        for key, value in state.items():
            if key not in _NOT_WEIGHTS:
                self._note(value, has_bytes=has_bytes)

    def _note(self, value: object, *, has_bytes: bool) -> None:
        if isinstance(value, torch.Tensor):
            if has_bytes:
                self._note_tensor(value)
        elif type(value) in {dict, list, set}:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._containers.append((value, copy.copy(value)))
                inner: Any = value
                for item in list(inner.values() if isinstance(inner, dict) else inner):
                    self._note(item, has_bytes=has_bytes)
        elif self._is_helper(value):
            self._note_object(value)

    def _is_helper(self, value: object) -> bool:
        home = f"{type(value).__module__}."
        return (
            home.startswith(self._helpers)
            and hasattr(value, "__dict__")
            and not isinstance(value, torch.nn.Module | type)
        )

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        wraps: bool = is_traceable_wrapper_subclass(tensor)
        if wraps:
            msg = (
                f"the model has tensors of {type(tensor).__name__}, whose bytes cannot be brought "
                "back. Use VLLMEngineAdapter with a model that is not quantized this way."
            )
            raise IncompatibleUpdate(msg)
        self._tensors.append((tensor, type(tensor), dict(vars(tensor)), tensor.data))
        if not tensor.is_meta and not torch.nn.parameter.is_lazy(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._storages.setdefault(storage._cdata, storage)  # noqa: SLF001 - its identity


class ReloadBooks:
    """What vLLM notes about reloads of a model's layers, and how to bring it back."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Note it; vLLM's own structures are only read."""
        self._layerwise: Any = require("vllm.model_executor.model_loader.reload.layerwise")
        self._modules = list(model.modules())
        infos = [self._layerwise.get_layerwise_info(module) for module in self._modules]
        # Lists, too: vLLM adds to them what it loads, and would keep it, and load it once more.
        self._infos = [
            (vars(info), {key: _own(value) for key, value in vars(info).items()}) for info in infos
        ]
        self._metas = [
            (vars(meta), dict(vars(meta)))
            for info in infos
            for tensors in info.restore_metadata
            for meta in tensors.values()
        ]

    def unwrap(self) -> None:
        """Take the loaders of the reload off what vLLM keeps to load the next one.

        vLLM wraps them in place and leaves them wrapped; whoever looks there for the loaders of a
        checkpoint finds ones that do nothing outside of a reload.
        """
        for state, before in self._metas:
            _refill(state, before)

    def restore(self) -> None:
        """Bring all of it back: no reload is under way."""
        for state, before in self._infos:
            # (Not the lists of these notes themselves: the next reload adds to what it finds.)
            _refill(state, {key: _own(value) for key, value in before.items()})
        self.unwrap()
        for module in self._modules:
            self._layerwise.LOADING_LAYERS.discard(module)


def refuse_half_way(model: torch.nn.Module) -> None:
    """Refuse a model that somebody else's reload has left half-way.

    Raises:
        IncompatibleUpdate: there is nothing whole to come back to.

    """
    layerwise: Any = require("vllm.model_executor.model_loader.reload.layerwise")
    for name, module in model.named_modules():
        held: Iterable[Any] = [*module._parameters.values(), *module._buffers.values()]  # noqa: SLF001 - torch has no other way in
        if layerwise.get_layerwise_info(module).can_load() or any(
            tensor is not None and tensor.is_meta for tensor in held
        ):
            msg = (
                f"layer {name!r} is in the middle of a reload of vLLM's own. Finish that one, or "
                "start a fresh engine."
            )
            raise IncompatibleUpdate(msg)


def _copy(storage: Any) -> torch.UntypedStorage:
    """Copy bytes to the host; torch has no types for its storages."""
    made: torch.UntypedStorage = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    return made


def _own(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _refill(container: Any, before: Any) -> None:
    """Give a container its content back; it stays the same object: others refer to it, too."""
    if isinstance(container, dict):
        for key in container.keys() - before.keys():
            del container[key]
        container.update(before)
        if list(container) != list(before):  # the order of parameters is told to users
            container.clear()
            container.update(before)
    elif isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


def _is_view_of(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        tensor.device == data.device
        and tensor.dtype == data.dtype
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.storage_offset() == data.storage_offset()
        and tensor.untyped_storage()._cdata == data.untyped_storage()._cdata  # noqa: SLF001 - its identity
    )
