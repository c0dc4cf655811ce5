"""What a model computes with and no update reaches: refused by its name.

vLLM makes copies of weights while a model loads or runs, and calls hooks behind its first load.
Neither its reload nor a version that is made beside the serving one does that again.
"""

from collections.abc import Iterator

import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm.parts import recorded_buffers

__all__ = ["refuse_unreached"]

# vLLM's attention for the CPU computes with sinks of these; of all others it makes a copy.
_SINK_DTYPES = (torch.bfloat16, torch.float32)
# What layers make of weights in their first step and keep: fused gates (Qwen3-Next on ROCm), and
# what GLM-5-Next's indexer and its linear attention compute with.
_MADE_BY_STEPS = ("_combined_gate_weight", "_wp_fp32", "_merged_conv_weight")


def refuse_unreached(model: torch.nn.Module) -> None:
    """Refuse a model that would go on computing with something of the version before.

    Raises:
        IncompatibleUpdate: a hook that is called once, a buffer, attention sinks, or what a step
            made of weights.

    """
    _refuse_hooks(model)
    parameters = {_storage(parameter) for parameter in model.parameters()}
    held = parameters | {_storage(buffer) for buffer in model.buffers()}
    for name, layer in model.named_modules():
        _refuse_buffers(name, layer, parameters)
        _refuse_made_by_steps(name, layer)
        for sinks in _sinks(layer):
            is_cast = sinks.device.type == "cpu" and sinks.dtype not in _SINK_DTYPES
            if is_cast or _storage(sinks) not in held:
                dtype = str(sinks.dtype).removeprefix("torch.")
                msg = (
                    f"layer {name!r}: its attention computes with a copy of its sinks ({dtype}), "
                    "which no update reaches; expected the parameter itself. Start the engine "
                    "with dtype='bfloat16' or 'float32' on the CPU, or with another attention "
                    "backend on a GPU."
                )
                raise IncompatibleUpdate(msg)


def _refuse_hooks(model: torch.nn.Module) -> None:
    hooks = [("", model, "process_weights_after_loading")]
    hooks += [(name, layer, "post_weight_load") for name, layer in model.named_modules()]
    for name, layer, hook in hooks:
        if callable(getattr(layer, hook, None)):
            where = f"layer {name!r}, {type(layer).__name__}" if name else type(layer).__name__
            msg = (
                f"{where}: its {hook} was called when the model was loaded, and no update reaches "
                "what that made of the weights. Such models cannot be updated: start a fresh "
                "engine from the checkpoint."
            )
            raise IncompatibleUpdate(msg)


def _refuse_buffers(name: str, layer: torch.nn.Module, parameters: set[int]) -> None:
    """Refuse views of weights that vLLM has packed since: they show the weights before."""
    for leaf in sorted(layer._non_persistent_buffers_set):  # noqa: SLF001 - torch has no other way in
        buffer = layer._buffers.get(leaf)  # noqa: SLF001 - as above
        if buffer is None or not buffer.numel() or _storage(buffer) in parameters:
            continue
        if leaf not in recorded_buffers(layer):
            full = f"{name}.{leaf}" if name else leaf
            msg = (
                f"buffer {full!r}: expected a view of a parameter; vLLM has packed that since, or "
                "made the buffer when the weights had been loaded, and no update reaches it. Start "
                "the engine with a dtype in which vLLM does not pack that weight ('float32')."
            )
            raise IncompatibleUpdate(msg)


def _refuse_made_by_steps(name: str, layer: torch.nn.Module) -> None:
    """Refuse what a step has made of weights; a layer that made none yet makes it of new ones."""
    for leaf in _MADE_BY_STEPS:
        if getattr(layer, leaf, None) is not None:
            msg = (
                f"layer {name!r}, {type(layer).__name__}: its {leaf} was made of weights in its "
                "first step, and no update reaches it; expected none. Such models cannot be "
                "updated: start a fresh engine from the checkpoint."
            )
            raise IncompatibleUpdate(msg)


def _sinks(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Attention sinks that a layer computes with: some attention chooses between two others."""
    attention = getattr(layer, "impl", None)
    for owner in (attention, *getattr(attention, "__dict__", {}).values()):
        sinks = getattr(owner, "sinks", None)
        if isinstance(sinks, torch.Tensor):
            yield sinks


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity
    return identity
