"""The parts of SGLang that an install leans on, each named once, with the version that has it.

SGLang is imported where it is used, never when rl_bridge is: whoever has no SGLang pays nothing.
"""

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from types import MethodType, ModuleType
from typing import Any

import torch

from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = [
    "MINIMUM",
    "RELOAD",
    "bound_anew",
    "checkpoint_tensors",
    "config_context",
    "loaded_dtype",
    "require",
    "unsupported",
    "version",
]

MINIMUM = "0.5.23"
"""The oldest SGLang whose plugins and control routes are the ones used here."""
RELOAD = (
    "starting a fresh engine from its checkpoint: SGLangInstallAdapter does not serve such models"
)
"""What serves models whose weights cannot be followed into the engine."""
_REMEDY = "pip install 'rl-bridge[sglang]'"

# Quantization methods that leave a weight as it was loaded.
_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)


def require(name: str) -> ModuleType:
    """Import a module of SGLang.

    Raises:
        WeightBridgeUnavailableError: SGLang is missing, or too old to have it.

    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = version()
        if found is None:
            msg = f"SGLang is not installed here ({error}). Install it: {_REMEDY}."
        else:
            msg = (
                f"SGLang {found} has no {name} ({error}); expected SGLang >= {MINIMUM}. Upgrade "
                f"it: {_REMEDY}."
            )
        raise WeightBridgeUnavailableError(msg) from error


def version() -> str | None:
    """Version of the SGLang that is installed, or None. Imports nothing."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def config_context(config: Any) -> AbstractContextManager[object]:
    """SGLang's loaders read process-wide settings: there is nothing to enter."""
    del config
    return nullcontext()


def checkpoint_tensors(layer: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """SGLang keeps parameters as they were loaded where `unsupported` says nothing."""
    del layer
    return {}


def loaded_dtype(layer: torch.nn.Module, leaf: str, parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which a parameter is loaded: the one that it is kept in."""
    del layer, leaf
    return parameter.dtype


def bound_anew(
    attributes: Mapping[str, Any], live: torch.nn.Module, clone: torch.nn.Module
) -> dict[str, Any]:
    """A tensor's attributes with the methods of its layer bound to that layer's clone."""
    return {
        key: MethodType(value.__func__, clone)
        if isinstance(value, MethodType) and value.__self__ is live
        else value
        for key, value in attributes.items()
    }


def unsupported(layer: torch.nn.Module) -> str | None:
    """Why a layer's weights cannot be followed into the engine, or None if they can."""
    name = type(layer).__name__
    method = getattr(layer, "quant_method", None)
    processes = hasattr(method, "process_weights_after_loading")
    if processes and not _METHODS & {kind.__name__ for kind in type(method).__mro__}:
        return f"{name} is processed by {type(method).__name__}"
    if getattr(layer, "use_intel_amx_backend", False):
        return f"{name} keeps its weight packed for AMX"
    if getattr(layer, "w_kc", None) is not None:
        return f"{name} keeps tensors derived from its weights"
    return None
