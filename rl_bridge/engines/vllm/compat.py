"""The parts of vLLM that an install leans on, each named once, with the version that has it.

vLLM is imported where it is used, never when rl_bridge is: whoever has no vLLM pays nothing.
"""

import importlib
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
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
    "is_latent",
    "loaded_dtype",
    "num_same",
    "recorded_buffers",
    "repacks",
    "require",
    "unsupported",
    "version",
]

MINIMUM = "0.27.1"
"""The oldest vLLM whose reload metadata and engine interface are the ones used here."""

# Quantization methods whose post-processing of a stand-in leaves the serving layer alone: all that
# they make of a weight they put into the layer that they are given.
_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
RELOAD = "VLLMEngineAdapter(..., reload=True) or VLLMReloadAdapter: they let vLLM load it"
"""What serves models that cannot be staged beside the serving version."""
_REMEDY = "pip install 'rl-bridge[vllm]'"


def require(name: str) -> ModuleType:
    """Import a module of vLLM.

    Raises:
        WeightBridgeUnavailableError: vLLM is missing, or too old to have it.

    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = version()
        if found is None:
            msg = f"vLLM is not installed here ({error}). Install it: {_REMEDY}."
        else:
            msg = (
                f"vLLM {found} has no {name} ({error}); expected vLLM >= {MINIMUM}. Upgrade it: "
                f"{_REMEDY}."
            )
        raise WeightBridgeUnavailableError(msg) from error


def version() -> str | None:
    """Version of the vLLM that is installed, or None. Imports it."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError:
        return None


def config_context(vllm_config: Any) -> AbstractContextManager[object]:
    """The context in which vLLM's loaders and post-processing expect to run."""
    context: AbstractContextManager[object] = require("vllm.config").set_current_vllm_config(
        vllm_config
    )
    return context


def checkpoint_tensors(layer: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """A layer's parameters as they were before vLLM processed them: on meta, name -> tensor.

    vLLM records them when it loads a model, for reloads of its own; with their shapes, strides and
    dtypes they carry the loaders that know how a checkpoint's tensors are fused and sharded.
    """
    reload = require("vllm.model_executor.model_loader.reload.layerwise")
    parameters: Mapping[str, torch.Tensor] = reload.get_layerwise_info(layer).restore_metadata[0]
    return parameters


def recorded_buffers(layer: torch.nn.Module) -> Container[str]:
    """Names of the buffers that vLLM's reload makes anew, or knows that no weight changes.

    Left out are views of parameters, and what was made when the weights had been loaded.
    """
    meta = require("vllm.model_executor.model_loader.reload.meta")
    if type(layer).__name__ in meta.SKIP_MODULES:
        return layer._buffers.keys()  # noqa: SLF001 - torch has no other way in
    reload = require("vllm.model_executor.model_loader.reload.layerwise")
    return {*reload.get_layerwise_info(layer).restore_metadata[1], *meta.SKIP_TENSORS}


def loaded_dtype(layer: torch.nn.Module, leaf: str, parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which a parameter is loaded, which may not be the one that it is kept in.

    On CPUs with AMX, vLLM widens the bias of what it packs for them, and does not record biases.
    """
    made = vars(layer).get("params_dtype")
    if leaf == "bias" and isinstance(made, torch.dtype):
        is_widened = torch.promote_types(made, parameter.dtype) == parameter.dtype
        return made if is_widened else parameter.dtype
    return parameter.dtype


def bound_anew(
    attributes: Mapping[str, Any], live: torch.nn.Module, clone: torch.nn.Module
) -> dict[str, Any]:
    """A tensor's attributes with the methods of its layer bound to that layer's clone."""
    sentinel = require("vllm.model_executor.model_loader.reload.sanitize").layer_ref_sentinel
    bound = dict(attributes)
    for key, value in bound.items():
        if isinstance(value, MethodType) and (value.__self__ is sentinel or value.__self__ is live):
            function: Callable[..., Any] = value.__func__
            bound[key] = MethodType(function, clone)
    return bound


def unsupported(layer: torch.nn.Module) -> str | None:
    """Why this way of installing cannot serve a layer, or None if it can."""
    name = type(layer).__name__
    method = getattr(layer, "quant_method", None)
    processes = hasattr(method, "process_weights_after_loading")
    if processes and not _METHODS & {kind.__name__ for kind in type(method).__mro__}:
        return f"{name} is processed by {type(method).__name__}"
    if is_latent(layer) or "MultiHeadLatent" in name:
        return f"{name} keeps tensors derived from its weights"
    return None


def is_latent(layer: torch.nn.Module) -> bool:
    """Whether a layer is multi-head latent attention, with tensors derived from a projection."""
    return type(layer).__name__.startswith("MLAAttention")


def repacks(layer: torch.nn.Module) -> bool:
    """Whether a layer's parameters may keep their shape and hold something else: experts do."""
    return type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"


def num_same(layer: Any, row: int) -> int:
    """How many ranks take the same rows of a parameter from a checkpoint.

    Ranks of which there are more than heads for keys and values share these heads.
    """
    # (A layer that was merged with others may not tell its heads' size: all counts as its own.)
    replicas = getattr(layer, "num_kv_head_replicas", None) if hasattr(layer, "head_size") else None
    if replicas is None or row < layer.num_heads * layer.head_size:
        return 1
    return int(replicas)
