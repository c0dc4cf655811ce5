"""The parts of vLLM that an install leans on, each named once, with the version that has it.

vLLM makes copies of weights while a model loads or runs, and calls hooks after its first load.
Neither its reload nor a version that is made beside the serving one does that again: such models
are refused by the name of what no update would reach.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from rl_bridge.engines.load_plan import storage_of
from rl_bridge.engines.skeleton import EngineCompat, processed_by
from rl_bridge.engines.vllm import require
from rl_bridge.errors import IncompatibleUpdate

_BESIDE = ", which cannot be made beside the serving layer"
# vLLM's attention for the CPU computes with sinks of these; of all others it makes a copy.
_SINK_DTYPES = (torch.bfloat16, torch.float32)
# What layers make of weights in their first step and keep: fused gates (Qwen3-Next on ROCm), and
# what GLM-5-Next's indexer and its linear attention compute with.
_MADE_BY_STEPS = ("_combined_gate_weight", "_wp_fp32", "_merged_conv_weight")


class VLLMCompat(EngineCompat):
    """What vLLM does with the weights of its layers."""

    elsewhere = (
        "VLLMEngineAdapter(..., staging='reload') or VLLMReloadAdapter: they let vLLM load it"
    )

    cast_remedy = ", or say cast=True"

    def __init__(self, config: Any) -> None:
        """Remember the engine's configuration."""
        self.config = config

    def context(self) -> AbstractContextManager[object]:
        """The context in which vLLM's loaders and post-processing expect to run."""
        context: AbstractContextManager[object] = require("vllm.config").set_current_vllm_config(
            self.config
        )
        return context

    def checkpoint_tensors(self, layer: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """A layer's parameters as they were before vLLM processed them: on meta, name -> tensor.

        vLLM records them when it loads a model, for reloads of its own; with their shapes, strides
        and dtypes they carry the loaders that know how a checkpoint's tensors are fused and
        sharded.
        """
        reload = require("vllm.model_executor.model_loader.reload.layerwise")
        found: Mapping[str, torch.Tensor] = reload.get_layerwise_info(layer).restore_metadata[0]
        return found

    def loaded_dtype(
        self, layer: torch.nn.Module, leaf: str, parameter: torch.Tensor
    ) -> torch.dtype:
        """The dtype in which a parameter is loaded, which may not be the one that it is kept in.

        On CPUs with AMX, vLLM widens the bias of what it packs for them, and does not record
        biases.
        """
        made = vars(layer).get("params_dtype")
        if leaf == "bias" and isinstance(made, torch.dtype):
            is_widened = torch.promote_types(made, parameter.dtype) == parameter.dtype
            return made if is_widened else parameter.dtype
        return parameter.dtype

    def is_bound_to(self, owner: object, layer: torch.nn.Module) -> bool:
        """Whether a method is a layer's: what vLLM recorded has a sentinel in the layer's place."""
        sanitize = require("vllm.model_executor.model_loader.reload.sanitize")
        return owner is layer or owner is sanitize.layer_ref_sentinel

    def unsupported(self, layer: torch.nn.Module) -> str | None:
        """Why the next version of a layer cannot be made beside it, or None if it can."""
        name = type(layer).__name__
        if method := processed_by(layer):
            return f"{name} is processed by {method}{_BESIDE}"
        if is_latent(layer) or "MultiHeadLatent" in name:
            return f"{name} keeps tensors derived from its weights{_BESIDE}"
        return None


def recorded_buffers(layer: torch.nn.Module) -> Container[str]:
    """Names of the buffers that vLLM's reload makes anew, or knows that no weight changes.

    Left out are views of parameters, and what was made when the weights had been loaded.
    """
    meta = require("vllm.model_executor.model_loader.reload.meta")
    if type(layer).__name__ in meta.SKIP_MODULES:
        return layer._buffers.keys()  # noqa: SLF001 - torch has no other way in
    reload = require("vllm.model_executor.model_loader.reload.layerwise")
    return {*reload.get_layerwise_info(layer).restore_metadata[1], *meta.SKIP_TENSORS}


def is_deferred_attention(reload: Any, layer: torch.nn.Module) -> bool:
    """Whether it is attention, which vLLM's `reload` processes last, whatever was loaded of it."""
    ask = getattr(reload, "is_deferred_attention_layer", None)
    if ask is None:  # vLLM 0.27, which knows two kinds
        return isinstance(layer, (reload.Attention, reload.MLAAttention))
    return bool(ask(layer))


def is_latent(layer: torch.nn.Module) -> bool:
    """Whether a layer is multi-head latent attention, with tensors derived from a projection."""
    return type(layer).__name__.startswith("MLAAttention")


def repacks(layer: torch.nn.Module) -> bool:
    """Whether a layer's parameters may keep their shape and hold something else: experts do."""
    return type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"


# ---- what no update reaches ---------------------------------------------------------------------


def refuse_unreached(model: torch.nn.Module) -> None:
    """Refuse a model that would go on computing with something of the version before."""
    _refuse_hooks(model)
    parameters = {storage_of(parameter) for parameter in model.parameters()}
    held = parameters | {storage_of(buffer) for buffer in model.buffers()}
    for name, layer in model.named_modules():
        _refuse_buffers(name, layer, parameters)
        _refuse_made_by_steps(name, layer)
        for sinks in _sinks(layer):
            is_cast = sinks.device.type == "cpu" and sinks.dtype not in _SINK_DTYPES
            if is_cast or storage_of(sinks) not in held:
                dtype = str(sinks.dtype).removeprefix("torch.")
                raise IncompatibleUpdate(
                    f"layer {name!r}: its attention computes with a copy of its sinks ({dtype}), "
                    "which no update reaches; expected the parameter itself. Start the engine "
                    "with dtype='bfloat16' or 'float32' on the CPU, or with another attention "
                    "backend on a GPU."
                )


def _refuse_hooks(model: torch.nn.Module) -> None:
    hooks = [("", model, "process_weights_after_loading")]
    hooks += [(name, layer, "post_weight_load") for name, layer in model.named_modules()]
    for name, layer, hook in hooks:
        if callable(getattr(layer, hook, None)):
            where = f"layer {name!r}, {type(layer).__name__}" if name else type(layer).__name__
            raise IncompatibleUpdate(
                f"{where}: its {hook} was called when the model was loaded, and no update reaches "
                "what that made of the weights. Such models cannot be updated: start a fresh "
                "engine from the checkpoint."
            )


def _refuse_buffers(name: str, layer: torch.nn.Module, parameters: set[int]) -> None:
    """Refuse views of weights that vLLM has packed since: they show the weights before."""
    for leaf in sorted(layer._non_persistent_buffers_set):  # noqa: SLF001 - torch has no other way in
        buffer = layer._buffers.get(leaf)  # noqa: SLF001 - as above
        if buffer is None or not buffer.numel() or storage_of(buffer) in parameters:
            continue
        if leaf not in recorded_buffers(layer):
            full = f"{name}.{leaf}" if name else leaf
            raise IncompatibleUpdate(
                f"buffer {full!r}: expected a view of a parameter; vLLM has packed that since, or "
                "made the buffer when the weights had been loaded, and no update reaches it. Start "
                "the engine with a dtype in which vLLM does not pack that weight ('float32')."
            )


def _refuse_made_by_steps(name: str, layer: torch.nn.Module) -> None:
    """Refuse what a step has made of weights; a layer that made none yet makes it of new ones."""
    for leaf in _MADE_BY_STEPS:
        if getattr(layer, leaf, None) is not None:
            raise IncompatibleUpdate(
                f"layer {name!r}, {type(layer).__name__}: its {leaf} was made of weights in its "
                "first step, and no update reaches it; expected none. Such models cannot be "
                "updated: start a fresh engine from the checkpoint."
            )


def _sinks(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Attention sinks that a layer computes with: some attention chooses between two others."""
    attention = getattr(layer, "impl", None)
    for owner in (attention, *getattr(attention, "__dict__", {}).values()):
        sinks = getattr(owner, "sinks", None)
        if isinstance(sinks, torch.Tensor):
            yield sinks
