"""A trainer's module tree: where it keeps its tensors, and what these are called outside of it.

Wrappers (FSDP, activation checkpoints, ``torch.compile``, peft) put words of their own into names;
engines know the names of the model itself. `naming_of` leads from the one to the other.
`ModuleSlots` finds the places of all tensors once, so that an update reads them without a walk.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.adapter import PEFT_ROOT, AdapterSpec
from rl_bridge.trainers.chunks import require_dense

Naming = Callable[[str], str | None]
"""From a name inside wrappers to the published name; None if the tensor is left out."""


class ModelNames:
    """How the tensors of one model are called; a `Naming`."""

    def __init__(self, naming: Naming, layers: Mapping[str, torch.nn.Module]) -> None:
        """Know the names, and the `layers` whose adapters must be merged."""
        self._naming = naming
        self._layers = layers

    @property
    def is_outdated(self) -> bool:
        """Whether these are not the names of what the model has by now."""
        return False

    @property
    def spec(self) -> AdapterSpec | None:
        """What belongs to the one adapter that is published; None if it is a model's weights."""
        return None

    def __call__(self, name: str) -> str | None:
        """The name that is published."""
        return self._naming(name)

    def check(self) -> None:
        """Check, before each update, that weights hold what their names promise.

        Raises:
            IncompatibleUpdate: merged weights are asked for, and the adapters are not merged.

        """
        for name, _ in self._unmerged():
            msg = (
                f"the adapters of layer {clean_name(name)!r} are not merged into its weight, and "
                "the weight without them is the frozen one. Call model.merge_adapter() before "
                "each update and model.unmerge_adapter() after it, or publish one adapter "
                '(adapter="NAME"), or pass adapters="only" or "base".'
            )
            raise IncompatibleUpdate(msg)

    def merged(self) -> dict[str, torch.Tensor]:
        """Weights with their adapters merged in, by path, where the model's own do not hold them.

        The model's own stay as they are. A weight that FSDP2 cuts stays cut: its ranks call this
        together, since each needs the other ranks' rows of A.

        Raises:
            IncompatibleUpdate: a layer whose merged weight is no sum, such as one of DoRA.

        """
        found = {}
        for name, layer in self._unmerged():
            base = getattr(layer, _PEFT_LAYER)
            path, weight = f"{name}.{_PEFT_LAYER}.weight", base.weight
            names = _active(layer)
            # Variants (DoRA, aLoRA) are no sums, and a bias of B's would go to the layer's own.
            marks = [getattr(layer, mark, {}) for mark in ("use_dora", "lora_variant", "lora_bias")]
            is_more = any(mark.get(one) for mark in marks for one in names)
            if is_more or not hasattr(layer, "get_delta_weight"):
                msg = (
                    f"layer {clean_name(name)!r} has an adapter that is not merged by adding, such "
                    "as a weight-decomposed one (DoRA). Call model.merge_adapter() before each "
                    "update and model.unmerge_adapter() after it."
                )
                raise IncompatibleUpdate(msg)
            with torch.no_grad():
                total = weight.detach().clone()
                for one in names:
                    total += layer.get_delta_weight(one)  # (of a cut weight, placed as that is)
            found[path] = total
        return found

    def _unmerged(self) -> Iterator[tuple[str, Any]]:
        """Names and layers whose weight is the frozen one, although merged ones are published."""
        for name, layer in self._layers.items():
            if hasattr(layer, _PEFT_LAYER) and _active(layer) and not getattr(layer, "merged", 0):
                yield name, layer


# Words that wrappers put between two dots.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# The layer that peft wraps.
_PEFT_LAYER = "base_layer"
_PEFT_SAVED = "modules_to_save"
_PEFT_ORIGINAL = "original_module"


class Adapters(enum.StrEnum):
    """What is published of a model with peft adapters."""

    MERGED = "merged"
    """The model's own names, with the adapters merged in; the training weights stay as they are.

    In a flat parameter, such as FSDP1's and ZeRO's, ``model.merge_adapter()`` has to come first.
    """
    BASE = "base"
    """The model's own names, without the adapters."""
    ONLY = "only"
    """The adapters alone, under the names of peft's checkpoints."""


def clean_name(name: str) -> str:
    """The name without the words of wrappers."""
    if not any(word in name for word in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def naming_of(
    model: torch.nn.Module,
    adapters: Adapters | str = Adapters.MERGED,
    *,
    adapter: str | None = None,
    base_root: str = "",
) -> ModelNames:
    """How the tensors of `model` are called.

    Args:
        model: the module that holds them, wrapped or not.
        adapters: what is published of a peft model; others have no choice here.
        adapter: name under which one adapter is published, and nothing else. It is peft's adapter
            of that name; or the only one that the model has, whatever peft calls it.
        base_root: root of the base weights that this adapter was trained on; empty if not known.

    Raises:
        ValueError: no such choice.
        IncompatibleUpdate: the model has no such adapter.

    """
    if adapter is not None:
        return AdapterNames(model, adapter, base_root)
    try:
        wanted = Adapters(adapters)
    except ValueError:
        known = ", ".join(repr(str(one)) for one in Adapters)
        raise ValueError(f"adapters={adapters!r}: expected one of {known}.") from None
    layers = {name: one for name, one in model.named_modules() if is_adapted(one)}
    if not layers:
        return ModelNames(clean_name, {})
    active = {name for layer in layers.values() for name in _active(layer)}
    return ModelNames(
        lambda name: _peft_name(clean_name(name), wanted, active),
        layers if wanted is Adapters.MERGED else {},
    )


class AdapterNames(ModelNames):
    """How the tensors of one peft adapter are called, and what belongs to it beside them.

    Raises:
        IncompatibleUpdate: the model has no such adapter.

    """

    def __init__(self, model: torch.nn.Module, name: str, base_root: str) -> None:
        """Find the adapter that is published under `name`."""
        holders = [one for one in model.modules() if _configs(one)]
        configs = {key: one for holder in holders for key, one in _configs(holder).items()}
        own = name if name in configs else next(iter(configs), "")
        if name not in configs and len(configs) != 1:
            msg = (
                f"adapter={name!r}: the model has the peft adapters {sorted(configs)}, expected "
                "one of that name, or one alone. Give the adapter's name, and pass a model that "
                "peft.get_peft_model made."
            )
            raise IncompatibleUpdate(msg)
        super().__init__(lambda path: _peft_name(clean_name(path), Adapters.ONLY, {own}), {})
        self._name, self._own, self._base_root = name, own, base_root
        self._holder = next(one for one in holders if own in _configs(one))
        self._config = configs[own]
        self._adapted = {
            clean_name(path).removeprefix(PEFT_ROOT): layer
            for path, layer in model.named_modules()
            if hasattr(layer, _PEFT_LAYER) and own in getattr(layer, "scaling", ())
        }
        self._kept: tuple[object, AdapterSpec] | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the model has another adapter of that name by now."""
        return _configs(self._holder).get(self._own) is not self._config

    @property
    def spec(self) -> AdapterSpec:
        """What belongs to the adapter now: its scalings may change from step to step."""
        config, scalings = self._facts()
        if self._kept is None or self._kept[0] != (scalings, config):
            made = AdapterSpec.of_peft(
                self._name, config, scalings, scalings=scalings, base_root=self._base_root
            )
            self._kept = (scalings, config), made
        return self._kept[1]

    def _facts(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Peft's configuration, and the scaling that each module computes with."""
        scalings = {
            module: float(layer.scaling[self._own]) for module, layer in self._adapted.items()
        }
        return self._config.to_dict(), scalings


def _configs(module: Any) -> Mapping[str, Any]:
    """Peft's configuration of each adapter, of a module that has some."""
    found = getattr(module, "peft_config", None)
    return found if isinstance(found, Mapping) else {}


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether this layer is peft's, in the place of another one."""
    return hasattr(module, _PEFT_LAYER) or (
        hasattr(module, _PEFT_SAVED) and hasattr(module, _PEFT_ORIGINAL)
    )


def _active(layer: torch.nn.Module) -> list[str]:
    names = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", [])
    return [names] if isinstance(names, str) else list(names)


def _peft_name(name: str, wanted: Adapters, active: set[str]) -> str | None:
    parts = name.split(".")
    # Behind these words stands the adapter's name, which may be a number, as that of a layer.
    words = [i for i, one in enumerate(parts) if one.startswith("lora_") or one == _PEFT_SAVED]
    named = {i + 1 for i in words if i + 1 < len(parts)}
    is_saved = _PEFT_SAVED in parts
    if not words and _PEFT_LAYER not in parts:  # other methods, with words of their own
        named = {i for i, one in enumerate(parts) if one in active and not one.isdigit()}
    is_adapter = bool(words or named)
    if is_adapter and not any(parts[i] in active for i in named):
        return None  # of an adapter that is switched off
    if wanted is Adapters.ONLY:
        kept = [one for i, one in enumerate(parts) if i not in named and one != _PEFT_SAVED]
        return ".".join(kept) if is_adapter else None
    if is_adapter and not (is_saved and wanted is Adapters.MERGED):
        return None
    if _PEFT_ORIGINAL in parts and wanted is Adapters.MERGED:
        return None  # a trained copy of the module goes in its place
    own = {_PEFT_LAYER, _PEFT_SAVED, _PEFT_ORIGINAL}
    kept = [one for i, one in enumerate(parts) if one not in own and not (is_saved and i in named)]
    return ".".join(kept).removeprefix(PEFT_ROOT)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a tensor in a module tree.

    Attributes:
        name: as published.
        path: as the tree spells it.
        keeper: the owning module's dictionary of parameters or buffers.
        key: its name there.

    """

    name: str
    path: str
    keeper: dict[str, Any]
    key: str

    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.keeper[self.key]  # type: ignore[no-any-return]


class ModuleSlots:
    """Parameters and persistent buffers of a module, in the order of its state dict."""

    def __init__(self, module: torch.nn.Module, naming: Naming) -> None:
        """Walk through `module`.

        Args:
            module: the root.
            naming: gives the published name; a tensor that gets none is left out.

        Raises:
            IncompatibleUpdate: one of them is not dense.

        """
        self._keepers: list[dict[str, Any]] = []
        self._counts: list[int] = []
        self._tied: list[tuple[int, int]] = []  # as `ties` found them last
        self.slots: list[Slot] = []
        for prefix, owner in module.named_modules(remove_duplicate=False):
            transient = owner._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name
            kinds: Iterable[tuple[dict[str, Any], bool]] = (
                (owner._parameters, True),  # noqa: SLF001 - the dictionary itself, to look again
                (owner._buffers, False),  # noqa: SLF001 - the same
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
                        self.slots.append(Slot(name, path, keeper, key))

    def select(self, is_wanted: Callable[[Slot], bool]) -> None:
        """Forget the slots that are not wanted."""
        self.slots = [slot for slot in self.slots if is_wanted(slot)]

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors that are there now.

        None if the modules hold more or fewer than before, or two of them share a tensor no longer,
        as after ``load_state_dict(..., assign=True)``: one would be published as the other.
        """
        if list(map(len, self._keepers)) != self._counts:
            return None
        found = [slot.keeper[slot.key] for slot in self.slots]
        return None if any(found[one] is not found[first] for one, first in self._tied) else found

    def ties(self) -> list[int | None]:
        """For each slot, the number of an earlier one that holds the same tensor."""
        first: dict[int, int] = {}
        found: list[int | None] = []
        for index, slot in enumerate(self.slots):
            at = first.setdefault(id(slot.tensor()), index)
            found.append(None if at == index else at)
        self._tied = [(index, at) for index, at in enumerate(found) if at is not None]
        return found
