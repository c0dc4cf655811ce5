"""The parts of SGLang that an install leans on, each named once, with the version that has it.

SGLang is imported where it is used, never when rl_bridge is: whoever has no SGLang pays nothing.
"""

import importlib
from importlib import metadata
from types import ModuleType

import torch

from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = ["MINIMUM", "SGLangCompat", "require", "version"]

MINIMUM = "0.5.23"
"""The oldest SGLang whose plugins and control routes are the ones used here."""
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


class SGLangCompat(EngineCompat):
    """What SGLang does with the weights of its layers: nothing, unless `unsupported` says it."""

    elsewhere = (
        "starting a fresh engine from its checkpoint: SGLangInstallAdapter does not serve such "
        "models"
    )

    def unsupported(self, layer: torch.nn.Module) -> str | None:
        """Why a layer's weights cannot be followed into the engine, or None if they can."""
        name = type(layer).__name__
        method = getattr(layer, "quant_method", None)
        processes = hasattr(method, "process_weights_after_loading")
        reason = None
        if processes and not _METHODS & {kind.__name__ for kind in type(method).__mro__}:
            reason = f"is processed by {type(method).__name__}"
        elif getattr(layer, "use_intel_amx_backend", False):
            reason = "keeps its weight packed for AMX"
        elif getattr(layer, "w_kc", None) is not None:
            reason = "keeps tensors derived from its weights"
        return None if reason is None else f"{name} {reason}, so what it holds cannot be read"
