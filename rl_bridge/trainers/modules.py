"""A trainer's module tree: where it keeps its tensors, and what these are called outside of it.

Wrappers (FSDP, activation checkpoints, ``torch.compile``, peft) put words of their own into names;
engines know the names of the model itself. `naming_of` leads from the one to the other.
`ModuleSlots` finds the places of all tensors once, so that an update reads them without a walk.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
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

    def merged(self) -> dict[str, torch.Tensor]:
        """Weights with their adapters merged in, by path, where the model's own do not hold them.

        The model's own stay as they are. A weight that FSDP2 cuts stays cut: its ranks call this
        together, since each needs the other ranks' rows of A. Of flat parameters and of ZeRO-3's
        partitions, an extractor goes over `unmerged` itself.
        """
        return {one.path: one.merged() for one in self.unmerged()}

    @property
    def is_merging(self) -> bool:
        """Whether merged weights are published, of a model that has adapted layers."""
        return bool(self._layers)

    @cached_property
    def trained_paths(self) -> frozenset[str]:
        """Paths of the weights that are published with adapters in them which are trained.

        Nothing else tells that these change: the layer's own weight is frozen.
        """
        return frozenset(
            f"{name}.{_PEFT_LAYER}.weight"
            for name, layer in self._layers.items()
            if any(parameter.requires_grad for parameter in layer.parameters())
        )

    def unmerged(self) -> "list[Unmerged]":
        """The layers whose weight is the frozen one, although merged weights are published.

        Raises:
            IncompatibleUpdate: a layer whose merged weight is no sum, such as one of DoRA.

        """
        found = {}
        for name, layer in self._layers.items():
            if not hasattr(layer, _PEFT_LAYER) or getattr(layer, "merged", False):
                continue
            adapters = _own_adapters(layer)
            if not adapters:
                continue
            # Variants (DoRA, aLoRA) are no sums, and a bias of B's would go to the layer's own.
            marks = [getattr(layer, mark, {}) for mark in ("use_dora", "lora_variant", "lora_bias")]
            is_more = any(mark.get(one) for mark in marks for one in adapters)
            # (That of parameters instead of a layer has a name for what it adapts.)
            is_more |= hasattr(layer, "parameter_name")
            if is_more or not hasattr(layer, "get_delta_weight"):
                raise IncompatibleUpdate(
                    f"layer {clean_name(name)!r} has an adapter that is not merged by adding, such "
                    "as a weight-decomposed one (DoRA). Call model.merge_adapter() before each "
                    "update and model.unmerge_adapter() after it."
                )
            # (Wrappers have the attributes of what they wrap, and come first.)
            found[clean_name(name)] = Unmerged(name, layer, adapters)
        return list(found.values())


Factor = tuple[str, str]
"""One matrix of a layer's adapters: peft's word for it, and the adapter's name."""


@dataclass(frozen=True, slots=True)
class Unmerged:
    """A layer of peft's whose weight does not hold its adapters."""

    name: str  # as the tree spells it
    layer: Any  # peft's
    adapters: list[str]  # peft's names of those that are merged in, in this order

    @property
    def path(self) -> str:
        """Of the frozen weight, as the tree spells it."""
        return f"{self.name}.{_PEFT_LAYER}.weight"

    def factors(self) -> "dict[Factor, str]":
        """The matrices A and B of these adapters, and the path of each without wrappers' words."""
        found = {}
        for word in _FACTORS:
            kept = getattr(self.layer, word, {})
            for adapter in self.adapters:
                if adapter in kept:
                    path = f"{clean_name(self.name)}.{word}.{adapter}"
                    is_module = isinstance(kept[adapter], torch.nn.Module)
                    found[word, adapter] = f"{path}.weight" if is_module else path
        if len(found) != 2 * len(self.adapters):
            raise IncompatibleUpdate(
                f"layer {clean_name(self.name)!r} has an adapter other than LoRA, and ranks hold "
                "parts of its weight, expected pairs of matrices A and B. Call "
                "model.merge_adapter() before each update and model.unmerge_adapter() after it."
            )
        return found

    def live(self, factor: "Factor") -> torch.Tensor:
        """The parameter that the layer has in that place now."""
        word, adapter = factor
        own = getattr(self.layer, word)[adapter]
        return own.weight if isinstance(own, torch.nn.Module) else own  # type: ignore[return-value]

    def merged(
        self,
        held: torch.Tensor | None = None,
        *,
        begin: int | None = None,
        factors: "Mapping[Factor, torch.Tensor] | None" = None,
    ) -> torch.Tensor:
        """A copy of the frozen weight, with what the adapters add to it, in the weight's dtype.

        What is added is what peft adds, for the whole weight: a range of it has the same bits.

        Args:
            held: the weight, or some elements of it; by default the layer's own weight.
            begin: the first of these elements, counted over the whole weight; None for all.
            factors: the whole matrices, as `factors` names them; by default the layer's own.

        """
        weight = getattr(getattr(self.layer, _PEFT_LAYER), "weight", None) if held is None else held
        if weight is None:
            raise IncompatibleUpdate(
                f"layer {clean_name(self.name)!r} has no weight of its own, such as a head that "
                "shares the embedding's: nothing can be merged into it. Leave it out of "
                'target_modules, or publish the adapter alone (adapter="NAME").'
            )
        with torch.no_grad():
            total = weight.detach().clone()
            for adapter in self.adapters:
                added = _without_side_effects(self.layer, factors).get_delta_weight(adapter)
                if begin is not None:
                    added = added.reshape(-1)[begin : begin + total.numel()].to(total.device)
                if added.shape != total.shape:
                    raise IncompatibleUpdate(
                        f"layer {clean_name(self.name)!r}: its adapter adds {list(added.shape)} to "
                        f"a weight of {list(total.shape)}, expected one shape: how ranks share the "
                        "two is not known. Publish what peft's merge_and_unload() gives."
                    )
                total += added  # (of a weight that FSDP2 cuts, placed as that is)
        return total


def _without_side_effects(layer: Any, factors: "Mapping[Factor, torch.Tensor] | None") -> Any:
    """What peft computes a layer's delta with: the layer, but for its matrices.

    These are `factors`, or the layer's own detached: some of peft's layers cast their matrices and
    give what they cast to the parameters, which would part a parameter from its trainer's memory.
    """
    kept = {word: one for word in _FACTORS if (one := getattr(layer, word, None)) is not None}
    if not kept:
        return layer
    stand_in = bare_copy(layer)
    stand_in._modules = dict(layer._modules)  # noqa: SLF001 - torch has no public name for it
    for word, matrices in kept.items():
        replaced: dict[str, Any] = {}
        for adapter, own in matrices.items():
            is_module = isinstance(own, torch.nn.Module)
            if factors is not None:
                matrix = factors.get((word, adapter))
            else:
                matrix = (own.weight if is_module else own).detach()
            if matrix is not None:
                replaced[adapter] = SimpleNamespace(weight=matrix) if is_module else matrix
        stand_in._modules[word] = replaced  # noqa: SLF001 - the same
    return stand_in


def bare_copy(module: Any) -> Any:
    """Another object of the same class with the same attributes, children included."""
    # (Modules may define what copy.copy() does, and some then copy tensors.)
    made = module.__class__.__new__(module.__class__)
    made.__dict__.update(module.__dict__)
    return made


# Words that wrappers put between two dots.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# The layer that peft wraps.
_PEFT_LAYER = "base_layer"
_PEFT_SAVED = "modules_to_save"
_PEFT_ORIGINAL = "original_module"
_PEFT_MAGNITUDES = "lora_magnitude_vector"
# Where peft keeps the matrices of a LoRA: of layers that multiply, and of embeddings.
_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Adapters(enum.StrEnum):
    """What is published of a model with peft adapters."""

    MERGED = "merged"
    """The model's own names, with the adapters merged in; the training weights stay as they are.

    Where ranks hold parts of weights, they make the merged ones together, layer by layer.
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
    """How the tensors of `model` are called; the options are those of `WeightExtractor`.

    Raises:
        ValueError: no such choice.
        IncompatibleUpdate: the model has no such adapter; or an adapter alone is published to which
            biases of the base belong.

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
    if wanted is Adapters.ONLY:
        for holder in model.modules():
            for name, config in _configs(holder).items():
                if name in active:
                    _refuse_biases(name, config)
    return ModelNames(
        lambda name: _peft_name(clean_name(name), wanted, active),
        layers if wanted is Adapters.MERGED else {},
    )


class AdapterNames(ModelNames):
    """How the tensors of one peft adapter are called, and what belongs to it beside them."""

    def __init__(self, model: torch.nn.Module, name: str, base_root: str) -> None:
        """Find peft's adapter of that name; or the only one, whatever peft calls it."""
        holders = [one for one in model.modules() if _configs(one)]
        configs = {key: one for holder in holders for key, one in _configs(holder).items()}
        own = name if name in configs else next(iter(configs), "")
        if name not in configs and len(configs) != 1:
            raise IncompatibleUpdate(
                f"adapter={name!r}: the model has the peft adapters {sorted(configs)}, expected "
                "one of that name, or one alone. Give the adapter's name, and pass a model that "
                "peft.get_peft_model made."
            )
        _refuse_biases(name, configs[own])
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


def _refuse_biases(name: str, config: Any) -> None:
    """Refuse an adapter to which biases of the base belong, where only the adapter is published.

    PEFT saves these biases with the adapter, under the base's names. No engine adds them to its own
    for one adapter alone, so that an adapter without them would be served as another one.
    """
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise IncompatibleUpdate(
            f"adapter={name!r} was made with bias={bias!r}: peft trains biases of the base with "
            "it, which engines do not apply with an adapter, expected bias='none'. Train it "
            "without, or publish the whole model with merged=True, which has these biases."
        )


def _configs(module: Any) -> Mapping[str, Any]:
    """Peft's configuration of each adapter, of a module that has some."""
    found = getattr(module, "peft_config", None)
    return found if isinstance(found, Mapping) else {}


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether this layer is peft's, in the place of another one."""
    return hasattr(module, _PEFT_LAYER) or is_saved_copy(module)


def is_saved_copy(module: torch.nn.Module) -> bool:
    """Whether peft trains a copy of the module that stood here."""
    return hasattr(module, _PEFT_SAVED) and hasattr(module, _PEFT_ORIGINAL)


def without_adapters(model: torch.nn.Module, merged: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Another tree of the same tensors, in which peft's layers are those that they wrap.

    Args:
        model: stays as it is.
        merged: weights that stand in the place of the layers' own, by path in `model`; they get
            the attributes that the trainer gave to those.

    """

    def copied(module: torch.nn.Module, path: str) -> torch.nn.Module:
        if hasattr(module, _PEFT_LAYER):
            return copied(module.get_submodule(_PEFT_LAYER), _joined(path, _PEFT_LAYER))
        made = bare_copy(module)
        made._modules = {  # noqa: SLF001 - torch has no public name
            name: None if child is None else copied(child, _joined(path, name))
            for name, child in module._modules.items()  # noqa: SLF001 - the same
        }
        weight = merged.get(_joined(path, "weight"))
        if weight is not None:
            own = module.get_parameter("weight")
            parameter = torch.nn.Parameter(weight, requires_grad=own.requires_grad)
            parameter.__dict__.update(own.__dict__)
            made._parameters = {**module._parameters, "weight": parameter}  # noqa: SLF001 - the same
        return made  # type: ignore[no-any-return]

    return copied(model, "")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _active(layer: torch.nn.Module) -> list[str]:
    names = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", [])
    return [names] if isinstance(names, str) else list(names)


def _own_adapters(layer: Any) -> list[str]:
    """The active adapters that this layer has: another one may be of other layers only."""
    kinds = getattr(layer, "adapter_layer_names", None)
    if kinds is None:
        return _active(layer)
    return [one for one in _active(layer) if any(one in getattr(layer, k, ()) for k in kinds)]


def factor_name(path: str) -> str | None:
    """The clean path of a matrix of some LoRA; None of other tensors. A `Naming`."""
    name = clean_name(path)
    return name if any(part in _FACTORS for part in name.split(".")) else None


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
        if kept[-2:-1] == [_PEFT_MAGNITUDES]:  # peft saves what this module holds by its name alone
            del kept[-1]
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
    """One place of a tensor in a module tree."""

    name: str  # as published
    path: str  # as the tree spells it
    keeper: dict[str, Any]  # the owning module's dictionary of parameters or buffers
    key: str  # its name there

    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.keeper[self.key]  # type: ignore[no-any-return]


class ModuleSlots:
    """Parameters and persistent buffers of a module, in the order of its state dict.

    A tensor that gets no name is left out; one that is not dense is refused (`IncompatibleUpdate`).
    """

    def __init__(self, module: torch.nn.Module, naming: Naming) -> None:
        """Walk through `module`."""
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
