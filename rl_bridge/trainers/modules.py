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

    def __init__(
        self,
        naming: Naming,
        layers: Mapping[str, torch.nn.Module],
        *,
        spec: AdapterSpec | None = None,
    ) -> None:
        """Know the names, and the `layers` whose adapters must be merged.

        Args:
            naming: gives each published name.
            layers: name -> layer whose adapters must be merged.
            spec: of the one adapter that is published, if that is all.

        """
        self._naming = naming
        self._layers = layers
        self.spec = spec

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

        The model's own stay as they are. For models that this process holds as a whole.

        Raises:
            IncompatibleUpdate: a layer whose merged weight is no sum, such as one of DoRA.

        """
        found = {}
        for name, layer in self._unmerged():
            base = getattr(layer, _PEFT_LAYER)
            path, weight = f"{name}.{_PEFT_LAYER}.weight", base.weight
            names = _active(layer)
            is_sum = hasattr(layer, "get_delta_weight")
            if not is_sum or any(getattr(layer, "use_dora", {}).get(one) for one in names):
                msg = (
                    f"layer {clean_name(name)!r} has an adapter that is not merged by adding, such "
                    "as a weight-decomposed one (DoRA). Call model.merge_adapter() before each "
                    "update and model.unmerge_adapter() after it."
                )
                raise IncompatibleUpdate(msg)
            with torch.no_grad():
                total = weight.detach().clone()
                for one in names:
                    total += layer.get_delta_weight(one)
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
        return _names_of_adapter(model, adapter, base_root)
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


def _names_of_adapter(model: torch.nn.Module, name: str, base_root: str) -> ModelNames:
    configs: dict[str, Any] = {}
    for module in model.modules():
        found = getattr(module, "peft_config", None)
        if isinstance(found, Mapping):
            configs |= found
    own = name if name in configs else next(iter(configs), "")
    if name not in configs and len(configs) != 1:
        msg = (
            f"adapter={name!r}: the model has the peft adapters {sorted(configs)}, expected one of "
            "that name, or one alone. Give the adapter's name, and pass a model that "
            "peft.get_peft_model made."
        )
        raise IncompatibleUpdate(msg)
    scalings = {
        clean_name(path).removeprefix(PEFT_ROOT): float(layer.scaling[own])
        for path, layer in model.named_modules()
        if hasattr(layer, _PEFT_LAYER) and own in getattr(layer, "scaling", ())
    }
    spec = AdapterSpec.of_peft(
        name, configs[own].to_dict(), scalings, scalings=scalings, base_root=base_root
    )
    return ModelNames(
        lambda path: _peft_name(clean_name(path), Adapters.ONLY, {own}), {}, spec=spec
    )


def _is_adapted(module: torch.nn.Module) -> bool:
    """Whether this layer is peft's, in the place of another one."""
    return hasattr(module, _PEFT_LAYER) or (
        hasattr(module, _PEFT_SAVED) and hasattr(module, _PEFT_ORIGINAL)
    )


def _active(layer: torch.nn.Module) -> list[str]:
    names = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", [])
    return [names] if isinstance(names, str) else list(names)


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
    return ".".join(part for part in parts if part not in own).removeprefix(PEFT_ROOT)


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
