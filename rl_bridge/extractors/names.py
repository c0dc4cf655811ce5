"""What a tensor is called once the wrappers around a model are looked through.

Wrappers (FSDP, activation checkpoints, ``torch.compile``, peft) put words of their own into names;
engines know the names of the model itself.
"""

import enum
from collections.abc import Callable, Mapping

import torch

from rl_bridge.errors import IncompatibleUpdate

__all__ = ["Adapters", "ModelNames", "Naming", "clean_name", "naming_of"]

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
