"""Named tensors from what users have: a module, a state dict, or chunks of one."""

import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rl_bridge.errors import DuplicateTensorName, IncompatibleUpdate
from rl_bridge.memory.tensors import plain_state
from rl_bridge.trainers.base import RankTensor, WeightExtractor
from rl_bridge.trainers.chunks import DEFAULT_CHUNK_NBYTES, require_dense
from rl_bridge.trainers.gather import whole_piece

__all__ = [
    "Adapters",
    "ModelNames",
    "ModuleSlots",
    "Naming",
    "Slot",
    "Source",
    "StateDictExtractor",
    "clean_name",
    "named_tensors",
    "naming_of",
    "trainable_names",
]

# ---- What a tensor is called once the wrappers around a model are looked through.
#
# Wrappers (FSDP, activation checkpoints, ``torch.compile``, peft) put words of their own into
# names; engines know the names of the model itself.

Naming = Callable[[str], str | None]
"""From a name inside wrappers to the one that is published; None for what is left out."""


class ModelNames:
    """How the tensors of one model are called; a `Naming`."""

    def __init__(self, naming: Naming, layers: Mapping[str, torch.nn.Module]) -> None:
        """Know the names, and the `layers` whose adapters must be merged."""
        self._naming = naming
        self._layers = layers

    def __call__(self, name: str) -> str | None:
        """The name that is published."""
        return self._naming(name)

    def check(self) -> None:
        """Look, before each update, whether weights hold what their names promise.

        Raises:
            IncompatibleUpdate: merged weights are asked for, and the adapters are not merged.

        """
        _require_merged(self._layers)


# Words that wrappers put between two dots.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# peft's own root, and the layer that it wraps.
_PEFT_ROOT = "base_model.model."
_PEFT_LAYER = "base_layer"
_PEFT_SAVED = "modules_to_save"
_PEFT_ORIGINAL = "original_module"


class Adapters(enum.StrEnum):
    """What is published of a model with peft adapters."""

    MERGED = "merged"
    """The model's own names, with the adapters merged in: ``model.merge_adapter()`` comes first."""
    BASE = "base"
    """The model's own names, without the adapters."""
    ONLY = "only"
    """The adapters alone, under the names of peft's checkpoints."""


def clean_name(name: str) -> str:
    """The name without the words of wrappers."""
    if not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def naming_of(model: torch.nn.Module, adapters: Adapters | str = Adapters.MERGED) -> ModelNames:
    """How the tensors of `model` are called.

    Args:
        model: the module that holds them, wrapped or not.
        adapters: what is published of a peft model; others have no choice here.

    Raises:
        ValueError: no such choice.

    """
    try:
        wanted = Adapters(adapters)
    except ValueError:
        known = ", ".join(repr(str(one)) for one in Adapters)
        raise ValueError(f"adapters={adapters!r}: expected one of {known}.") from None
    layers = {name: one for name, one in model.named_modules() if _is_adapted(one)}
    if not layers:
        return ModelNames(clean_name, {})
    active = {name for layer in layers.values() for name in _active(layer)}
    return ModelNames(
        lambda name: _peft_name(clean_name(name), wanted, active),
        layers if wanted is Adapters.MERGED else {},
    )


def _is_adapted(module: torch.nn.Module) -> bool:
    """Whether peft put this layer in the place of another one."""
    return hasattr(module, _PEFT_LAYER) or (
        hasattr(module, _PEFT_SAVED) and hasattr(module, _PEFT_ORIGINAL)
    )


def _active(layer: torch.nn.Module) -> list[str]:
    names = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", [])
    return [names] if isinstance(names, str) else list(names)


def _require_merged(layers: Mapping[str, torch.nn.Module]) -> None:
    for name, layer in layers.items():
        if hasattr(layer, _PEFT_LAYER) and _active(layer) and not getattr(layer, "merged", False):
            msg = (
                f"the adapters of layer {clean_name(name)!r} are not merged into its weight, and "
                "the weight without them is the frozen one. Call model.merge_adapter() before "
                'each update and model.unmerge_adapter() after it, or pass adapters="only" or '
                '"base".'
            )
            raise IncompatibleUpdate(msg)


def _peft_name(name: str, wanted: Adapters, active: set[str]) -> str | None:
    parts = name.split(".")
    is_saved = _PEFT_SAVED in parts
    # Layers have lora_A, lora_B ...; other methods, with words of their own, name the adapter too.
    is_adapter = is_saved or any(part.startswith("lora_") for part in parts)
    is_adapter = is_adapter or (_PEFT_LAYER not in parts and bool(active & set(parts)))
    if is_adapter and not active & set(parts):
        return None  # of an adapter that is switched off
    if wanted is Adapters.ONLY:
        kept = [part for part in parts if part not in active and part != _PEFT_SAVED]
        return ".".join(kept) if is_adapter else None
    if is_adapter and not (is_saved and wanted is Adapters.MERGED):
        return None
    if _PEFT_ORIGINAL in parts and wanted is Adapters.MERGED:
        return None  # a trained copy of the module goes in its place
    own = {_PEFT_LAYER, _PEFT_SAVED, _PEFT_ORIGINAL} | (active if is_saved else set())
    return ".".join(part for part in parts if part not in own).removeprefix(_PEFT_ROOT)


# ---- the rest builds on the parts above

_LOG = logging.getLogger(__name__)

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[object]
"""What `publish` takes: a module, a state dict, or chunks, or pairs of name and tensor."""

# torch's key for what a module saves beside its tensors (Module.get_extra_state).
_EXTRA = "_extra_state"


def named_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Name -> tensor, the live tensors themselves, in the source's order.

    Args:
        source: an ``nn.Module`` (its state dict: parameters and persistent buffers), a mapping,
            or an iterable of ``(name, tensor)`` pairs or of chunks with ``names`` and ``tensors``.
            An iterable must not write again to a tensor that it gave: all are read at the end.

    Raises:
        IncompatibleUpdate: something that is no tensor under a string name, or a tensor that was
            written to after the iterable gave it.
        DuplicateTensorName: a name came twice.

    """
    if isinstance(source, torch.nn.Module):
        plain = plain_state(source)
        if plain is not None:
            return plain
    elif isinstance(source, Mapping) and _is_plain(source):
        return dict(source)
    return _checked(source)


def _checked(source: Source) -> dict[str, torch.Tensor]:
    """The names and tensors of anything that may hold something else, looked at one by one."""
    if isinstance(source, torch.nn.Module):
        # keep_vars: the parameters themselves instead of a new detached tensor for each, so that
        # the next step's publish recognises them.
        items: Iterable[tuple[object, object]] = source.state_dict(keep_vars=True).items()
    elif isinstance(source, Mapping):
        items = source.items()
    elif isinstance(source, torch.Tensor) or not isinstance(source, Iterable):
        msg = (
            f"cannot publish a {type(source).__name__}, expected a module, a state dict or chunks "
            "of one."
        )
        raise IncompatibleUpdate(msg)
    else:
        items = _kept(_pairs(source))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        if not isinstance(name, str):
            msg = f"tensor name {name!r} is a {type(name).__name__}, expected str."
            raise IncompatibleUpdate(msg)
        if not isinstance(tensor, torch.Tensor):
            if name == _EXTRA or name.endswith("." + _EXTRA):
                _LOG.warning("%s is not published: extra state is no tensor", name)
                continue
            raise IncompatibleUpdate(_no_tensor(name, tensor))
        if name in found:
            msg = f"tensor {name!r} appears twice in what is to be published. Names must be unique."
            raise DuplicateTensorName(msg)
        found[name] = tensor
    return found


def _no_tensor(name: str, item: object) -> str:
    what = f"{name!r} is a {type(item).__name__}, expected a tensor."
    if isinstance(item, Mapping):
        return f"{what} Publish the inner state dict alone, such as checkpoint[{name!r}]."
    if hasattr(item, "__array_interface__"):
        return f"{what} Make it one without a copy: torch.from_numpy(array)."
    return f"{what} Leave it out of the state dict."


def _is_plain(source: Mapping[str, torch.Tensor]) -> bool:
    """Whether there is nothing to check one by one: only strings, only tensors."""
    kinds = set(map(type, source.values()))
    return kinds <= {torch.Tensor, torch.nn.Parameter} and set(map(type, source)) <= {str}


def _pairs(source: Iterable[object]) -> Iterable[tuple[object, object]]:
    for item in source:
        names, tensors = getattr(item, "names", None), getattr(item, "tensors", None)
        # Tensors and namedtuples have attributes of such names as well: only lists are a chunk's.
        if isinstance(names, list | tuple) and isinstance(tensors, list | tuple):
            if len(names) != len(tensors):
                msg = f"a chunk has {len(names)} names for {len(tensors)} tensors."
                raise IncompatibleUpdate(msg)
            yield from zip(names, tensors, strict=True)
        elif isinstance(item, tuple) and len(item) == 2:  # noqa: PLR2004 - a pair
            yield item
        else:
            msg = (
                f"cannot publish a {type(item).__name__}, expected (name, tensor) pairs or chunks."
            )
            raise IncompatibleUpdate(msg)


def _kept(pairs: Iterable[tuple[object, object]]) -> Iterator[tuple[object, object]]:
    """See to it that tensors are not written to after they were given, as a reused buffer is."""
    noted = []
    for name, tensor in pairs:
        # (Inference tensors do not count who writes to them.)
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            noted.append((name, tensor, tensor._version))  # noqa: SLF001 - torch has no public name
        yield name, tensor
    for name, tensor, version in noted:
        if tensor._version != version:  # noqa: SLF001
            msg = (
                f"tensor {name!r} was written to after the iterable gave it, such as a buffer that "
                "is used for several: all would have its last content. Give each a tensor of its "
                "own, such as buffer.clone()."
            )
            raise IncompatibleUpdate(msg)


def trainable_names(
    source: Source, tensors: Mapping[str, torch.Tensor], declared: Iterable[str] | None
) -> frozenset[str] | None:
    """Names that training is expected to change: as declared, or a module's ``requires_grad`` ones.

    None where nothing is known: a plain state dict does not say.

    Raises:
        IncompatibleUpdate: one name instead of several, or no names at all.

    """
    if isinstance(declared, str):
        msg = f"trainable={declared!r} is one str, expected names. Write trainable=[{declared!r}]."
        raise IncompatibleUpdate(msg)
    if declared is not None:
        try:
            return frozenset(declared)
        except TypeError as error:
            msg = f"trainable={declared!r} holds no names: {error}. Pass a list of names."
            raise IncompatibleUpdate(msg) from error
    if isinstance(source, torch.nn.Module):
        return frozenset(name for name, tensor in tensors.items() if tensor.requires_grad)
    return None


class StateDictExtractor(WeightExtractor):
    """Weights of a module, or of a mapping of tensors, that this process holds as a whole.

    Ranks that hold copies of the same model (data parallelism without shards) say which one they
    are: then their tensors are told as copies.
    """

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        rank: int = 0,
        world_size: int = 1,
        adapters: Adapters | str = Adapters.MERGED,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        keep_buffers: bool = False,
    ) -> None:
        """Make an extractor; nothing is read yet.

        Args:
            source: a module (parameters and persistent buffers) or a mapping.
            rank: of this copy.
            world_size: how many copies there are.
            adapters: what is published of a model with peft adapters.
            chunk_nbytes: bytes of one chunk.
            keep_buffers: cast into the same memory in every update; see `WeightExtractor`.

        Raises:
            IncompatibleUpdate: something else, such as an iterator, which can be read only once.
            ValueError: a rank outside the world.

        """
        super().__init__(chunk_nbytes=chunk_nbytes, keep_buffers=keep_buffers)
        given: object = source
        if not isinstance(given, torch.nn.Module | Mapping):
            msg = (
                f"cannot extract from a {type(source).__name__}, expected a module or a mapping: "
                "they are read in every update. Pass dict(pairs)."
            )
            raise IncompatibleUpdate(msg)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}: expected 0 <= rank < world.")
        if isinstance(given, DataParallel | DistributedDataParallel):
            source = given.module  # what is around it to train copies is in no engine's names
        self._source = source
        self._rank = rank
        self._owners = tuple(range(world_size))
        self._adapters = adapters
        self._paths: list[str] = []

    def _tensors_known(self) -> Sequence[RankTensor]:
        tensors = named_tensors(self._source)
        trainable = trainable_names(self._source, tensors, None) or frozenset()
        self._naming, self._count = self._names(), len(tensors)
        named = ((self._naming(path), path, tensor) for path, tensor in tensors.items())
        kept = [
            (name, path, require_dense(name, tensor))
            for name, path, tensor in named
            if name is not None
        ]
        self._paths = [path for _, path, _ in kept]
        first: dict[int, int] = {}
        return [
            RankTensor(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                local_shape=tuple(tensor.shape),
                pieces=(whole_piece(name, tensor.shape, self._rank),),
                owners=self._owners,
                is_whole=True,
                is_trainable=path in trainable,
                tied_to=None if (at := first.setdefault(id(tensor), index)) == index else at,
            )
            for index, (name, path, tensor) in enumerate(kept)
        ]

    def _names(self) -> ModelNames:
        if isinstance(self._source, torch.nn.Module):
            return naming_of(self._source, self._adapters)
        return ModelNames(str, {})

    def _tensors_now(self) -> Sequence[torch.Tensor | None] | None:
        self._naming.check()
        tensors = named_tensors(self._source)
        if len(tensors) != self._count or not tensors.keys() >= set(self._paths):
            return None
        return [tensors[path] for path in self._paths]

    def _fill(
        self,
        views: Sequence[torch.Tensor],
        sources: Sequence[int],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        for view, source in zip(views, sources, strict=True):
            view.copy_(tensors[source])  # type: ignore[arg-type]  # this process holds all of them


# ---- Where a module keeps its tensors: found once, read in every update without a walk.


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
