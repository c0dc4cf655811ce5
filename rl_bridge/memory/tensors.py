"""What is asked of every tensor before and after every update, in as little time as it can take.

`TensorFacts` tells whether tensors are where and what they were. Asking torch for five attributes
of each of 40,000 tensors takes 10 ms; the compiled module asks through the function table that
torch shows other array libraries (DLPack 1.3, github.com/dmlc/dlpack), which takes a fifth of that.

`ModuleState` gives a module's state dict. ``Module.state_dict`` costs about 1.5 us per submodule,
several times per update. The walk is done once; after that only what it went through is compared:
the same objects under the same keys of the same dictionaries, and none added or taken away. What
differs leads to a new walk. Modules that have a say in their own state dict (hooks, overridden
methods) are always walked.

`not_plain` tells which tensors are plain memory: their bytes lie where `data_ptr` says, all of
them, as they are. Everything that copies or digests by address asks here first. A tensor that is
something else would not fail later: it would read or write memory that is not its own.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import eq, is_
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory import passes

Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]

# Torch's table, a capsule; None before torch 2.10.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def tensor_key(tensor: torch.Tensor) -> Key:
    """Tell whether two tensors are the same view of the same memory: equal keys, equal views."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class TensorFacts:
    """Where some tensors are and what they are, to see cheaply whether that is still so."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note addresses, shapes, dtypes and strides."""
        # In the form that the compiled module compares, or else one key for each.
        self._record: bytes | None = _ask("tensor_facts", tensors)
        self._keys = None if self._record is not None else [tensor_key(t) for t in tensors]

    def hold(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether `tensors` are the same views of the same memory."""
        if self._record is not None:
            return bool(_ask("facts_hold", tensors, self._record))
        tensors = list(tensors)
        keys = self._noted()
        try:
            return len(tensors) == len(keys) and all(map(eq, map(tensor_key, tensors), keys))
        except RuntimeError:
            return False  # sparse by now, for instance: torch has no address to tell

    def hold_unnegated(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they `hold`, and none of `tensors` reads as the negative of what is stored.

        A tensor object may become such a view of its memory, whatever its dtype, and be all the
        same otherwise. In one pass over them: two take half as long again.
        """
        if self._record is not None:
            return bool(_ask("facts_hold", tensors, self._record, torch.Tensor.is_neg))
        return self.hold(tensors) and not any(map(torch.Tensor.is_neg, tensors))

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions of those that are not the views of the memory that they were."""
        if self.hold(tensors):
            return []
        both = enumerate(zip(tensors, self._noted(), strict=True))
        return [index for index, (tensor, key) in both if tensor_key(tensor) != key]

    def restore(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Make `tensors` again the views that they were, of the storages that they have now.

        Returns:
            Positions of those whose storage does not hold their old place any more.

        """
        lost = []
        for index, (tensor, key) in enumerate(zip(tensors, self._noted(), strict=True)):
            if tensor.numel() == 0 or tensor_key(tensor) == key:
                continue
            pointer, shape, strides, dtype = key
            storage = tensor.untyped_storage()
            extent = 1 + sum((dim - 1) * step for dim, step in zip(shape, strides, strict=True))
            offset = pointer - storage.data_ptr()
            if not 0 <= offset <= storage.nbytes() - extent * dtype.itemsize:
                lost.append(index)
                continue
            view = torch.empty(0, dtype=torch.uint8, device=storage.device).view(dtype)
            tensor.data = view.set_(storage, offset // dtype.itemsize, shape, strides)
        return lost

    def _noted(self) -> list[Key]:
        """What was noted, one key per tensor."""
        if self._keys is None:
            self._keys = list(_keys_in(self._record or b""))
        return self._keys


def _ask(question: str, *arguments: object) -> Any:
    """Ask the compiled module; None where it cannot tell: DLPack does not name every dtype."""
    native = passes.NATIVE
    if native is None or _EXCHANGE is None:
        return None
    try:
        return getattr(native, question)(_EXCHANGE, *arguments)
    except (BufferError, RuntimeError):
        return None


# As the compiled module writes them: address, offset, device type and number, dimensions, dtype;
# then the shape and the strides.
_FACT = struct.Struct("=QQiiiI")


def _keys_in(record: bytes) -> Iterator[Key]:
    at = 0
    while at < len(record):
        address, offset, _, _, ndim, dtype = _FACT.unpack_from(record, at)
        at += _FACT.size
        numbers = struct.unpack_from(f"={2 * ndim}q", record, at)
        at += 16 * ndim
        yield address + offset, numbers[:ndim], numbers[ndim:], _dtypes()[dtype]


if passes.NATIVE is not None:
    # Which of a tensor's words the compiled module asks memory for ahead of time: none of them
    # where another torch has no such attribute.
    _sample = torch.empty(1, device="cpu")
    _addresses = (getattr(part, "_cdata", 0) for part in (_sample, _sample.untyped_storage()))
    passes.NATIVE.learn_layout(torch.Tensor.__base__, _sample, *_addresses)


@lru_cache(maxsize=1)
def _dtypes() -> dict[int, torch.dtype]:
    """DLPack's number of each dtype, as the compiled module tells it."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    views = [memory.view(getattr(torch, name)) for name in DTYPE_NBYTES]
    records = [_ask("tensor_facts", [view]) for view in views]
    return {
        _FACT.unpack_from(record)[-1]: view.dtype
        for record, view in zip(records, views, strict=True)
        if record is not None
    }


# Where a module keeps what its state dict is made of, then what else decides about it.
_DICTS = ("_parameters", "_buffers", "_modules")
_PARTS = (*_DICTS, "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")


class ModuleState:
    """The parameters and persistent buffers of one module, by state-dict name."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look at `module`; nothing is walked yet."""
        self._module = module
        self._kind = type(module)
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_cached = False
        # What the walk went through: modules, each one's containers under `_PARTS`, the sizes of
        # these (uint32), and every item of the dictionaries among them.
        self._modules: list[torch.nn.Module] = []
        self._parts: list[Any] = []
        self._sizes = b""
        self._keys: list[str] = []
        self._values: list[object] = []
        self._versions = bytearray()  # the compiled module's own notes

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> the live tensor object, tied names included.

        Do not change the mapping. As long as nothing changed it is the same object.
        """
        if not (self._is_cached and self._is_same()):
            self._walk()
        return self._tensors

    def _is_same(self) -> bool:
        # Patched on the module itself, as some wrappers do; its parts are looked at in walks only.
        if type(self._module) is not self._kind or not _is_plainly_filled(self._module.__dict__):
            return False
        native = passes.NATIVE
        same_modules = _same_modules if native is None else native.same_modules
        noted = (self._parts, self._sizes, self._keys, self._values, self._versions)
        return bool(same_modules(self._modules, _PARTS, len(_DICTS), *noted))

    def _walk(self) -> None:
        self._is_cached = False  # until all of it is noted: a module of its own kind may raise
        self._tensors, self._modules = {}, []
        self._kind = type(self._module)
        is_plain = _collect(self._module, "", {}, self._tensors, self._modules)
        if not is_plain:
            found = self._module.state_dict(keep_vars=True)
            self._tensors = {n: item for n, item in found.items() if isinstance(item, torch.Tensor)}
            self._modules = []
        owned = [module.__dict__ for module in self._modules]
        self._parts = [own[name] for own in owned for name in _PARTS]
        self._sizes = np.fromiter(map(len, self._parts), np.uint32, len(self._parts)).tobytes()
        dicts = [own[name] for own in owned for name in _DICTS]
        self._keys = [key for part in dicts for key in part]
        self._values = [value for part in dicts for value in part.values()]
        self._versions = bytearray(8 * (1 + len(_DICTS)) * len(self._modules))
        self._is_cached = is_plain


def plain_state(module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """What ``state_dict(keep_vars=True)`` gives, faster; None where a module has its own way."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors if _collect(module, "", {}, tensors, []) else None


def _collect(
    module: torch.nn.Module,
    prefix: str,
    kinds: dict[type, bool],
    tensors: dict[str, torch.Tensor],
    modules: list[torch.nn.Module],
) -> bool:
    """Collect what ``state_dict`` would, in its order; False where a module has its own way.

    Three times as fast as ``state_dict`` followed by ``modules``; `kinds` remembers classes.
    """
    own, kind = module.__dict__, type(module)
    if kind not in kinds:
        kinds[kind] = _is_plain(kind)
    if not (kinds[kind] and _is_plainly_filled(own)):
        return False
    modules.append(module)
    temporary = own["_non_persistent_buffers_set"]
    for kept, left_out in ((own["_parameters"], ()), (own["_buffers"], temporary)):
        for name, item in kept.items():
            if item is None or name in left_out:
                continue
            if not isinstance(item, torch.Tensor):
                return False  # put there by hand: what becomes of it, its reader decides
            tensors[prefix + name] = item
    for name, child in own["_modules"].items():
        if child is not None and not _collect(child, f"{prefix}{name}.", kinds, tensors, modules):
            return False
    return True


def _is_plain(kind: type[torch.nn.Module]) -> bool:
    """Whether modules of this class leave their state dict, and their attributes, to torch."""
    base = torch.nn.Module
    return (
        kind.state_dict is base.state_dict
        and kind._save_to_state_dict is base._save_to_state_dict  # noqa: SLF001
        and kind.get_extra_state is base.get_extra_state
        and kind.__getattribute__ is base.__getattribute__
        # Script modules, for instance, answer these attributes from elsewhere.
        and not any(hasattr(kind, name) for name in _PARTS)
    )


def _is_plainly_filled(own: dict[str, Any]) -> bool:
    """Whether all of a module's part of the state dict lies in its own dictionaries."""
    return not (
        "state_dict" in own
        or "_save_to_state_dict" in own
        or own["_state_dict_hooks"]
        or own["_state_dict_pre_hooks"]
        or not all(map(own.__contains__, _PARTS))
    )


def _same_modules(
    modules: list[torch.nn.Module], names: tuple[str, ...], num_dicts: int, *noted: Any
) -> bool:
    parts, sizes, keys, values, _ = noted
    now = [module.__dict__.get(name) for module in modules for name in names]
    if not all(map(is_, now, parts)) or list(map(len, parts)) != list(memoryview(sizes).cast("I")):
        return False
    dicts = [part for i, part in enumerate(parts) if i % len(names) < num_dicts]
    keys_now = [key for part in dicts for key in part]
    values_now = [value for part in dicts for value in part.values()]
    return keys_now == keys and all(map(is_, values_now, values))


_CPU = torch.device("cpu")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether torch would conjugate or negate the stored elements when it reads them."""
    return tensor.is_conj() or tensor.is_neg()


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in a GPU's memory, or another device's."""
    return tensor.device.type not in _OF_THIS_PROCESS


_OF_THIS_PROCESS = frozenset({"cpu", "meta"})


def not_plain(
    tensor: torch.Tensor,
    device: torch.device = _CPU,
    *,
    takes_lazy_views: bool = False,
    takes_accelerators: bool = False,
) -> str | None:
    """Say why a tensor is not plain memory of a device, with the remedy; None if it is.

    A lazy view shows other numbers than its memory holds, so it is plain only to a caller that
    `takes_lazy_views` and has torch resolve them. An accelerator's memory is plain only to one that
    `takes_accelerators` and has torch carry it.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        return f"is {what}: use dense tensors"
    if tensor.device != device and not (takes_accelerators and is_on_accelerator(tensor)):
        if tensor.is_meta:
            remedy = "and has no bytes: materialise it first (to_empty, then load the weights)"
        elif device == _CPU:
            remedy = "and not on the CPU: copy it there first (.cpu())"
        else:
            remedy = f"and not on {device}: copy it there first (.to({str(device)!r}))"
        return f"is on {tensor.device} {remedy}"
    kind = type(tensor)
    if kind not in _PLAIN and (
        # A subclass that takes over dispatch is no plain memory: DTensor, FakeTensor, quantizers.
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor)
    ):
        return f"is a {kind.__name__}: use plain tensors (a DTensor's full_tensor() or to_local())"
    if not takes_lazy_views and is_lazy_view(tensor):
        return "is a lazy conjugate or negative: call resolve_conj().resolve_neg() first"
    if tensor.numel() and not _has_its_storage(tensor):
        return "has lost its storage (freed or cut, by resharding or a sleeping engine): restore it"
    return None


def _has_its_storage(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((dim - 1) * step for dim, step in steps)
    nbytes = tensor.untyped_storage().nbytes()
    return (last + 1) * tensor.element_size() <= nbytes and bool(tensor.data_ptr())
