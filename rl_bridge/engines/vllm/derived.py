"""What vLLM derives from a model's weights, compared with what it derives from an update's.

Packed experts and the absorbed projections of multi-head latent attention (MLA) can be read. vLLM's
own processing is run once more, on a stand-in of the layer, and must come to the bytes that the
serving layer holds; what that packs of experts is asked for products besides.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rl_bridge.engines.staging import Given, processed
from rl_bridge.engines.vllm.compat import (
    checkpoint_tensors,
    config_context,
    is_latent,
    repacks,
    unsupported,
)
from rl_bridge.engines.vllm.expert_canary import check_experts
from rl_bridge.errors import ProofFailed

__all__ = [
    "absorbed",
    "check_absorbed",
    "check_packed",
    "make_ready",
]

_PROJECTION = "kv_b_proj"


def absorbed(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers of MLA that can be looked into, by name: their projection is no quantized one."""
    for name, layer in model.named_modules():
        projection = layer._modules.get(_PROJECTION)  # noqa: SLF001 - torch has no other way in
        if (
            is_latent(layer)
            and projection is not None
            and unsupported(projection) is None
            and all(tensor.device.type == "cpu" for tensor in projection.parameters())
        ):
            yield name, layer


def make_ready(model: torch.nn.Module) -> None:
    """Let vLLM's reload process all that its first load did. Undone by a snapshot made before.

    Experts: where they were packed once, vLLM takes the unpacked weights for packed ones. MLA on
    CPUs with AMX: vLLM drops a weight and then has nowhere to load it to.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if repacks(layer) and any(weight.device.type == "cpu" for weight in layer.parameters()):
            method.moe_kernel = None
    for _, layer in absorbed(model):
        projection = layer.kv_b_proj
        meta = checkpoint_tensors(projection).get("weight")
        if meta is not None and meta.numel() and not projection.weight.numel():
            empty = torch.empty(tuple(meta.shape), dtype=meta.dtype, device="cpu")
            projection.weight = torch.nn.Parameter(empty, requires_grad=False)


def check_packed(path: str, layer: torch.nn.Module, given: Given, config: Any) -> None:
    """Compare packed experts with what vLLM makes of `given`, their weights.

    Raises:
        ProofFailed: they hold something else.

    """
    with config_context(config), torch.no_grad():
        state = processed(layer, given)
        made = state["_parameters"]
        check_experts(path, state, {leaf: memory for leaf, (_, memory, _) in given.items()})
    for leaf in given:
        _compare(f"{path}.{leaf}", layer._parameters[leaf], made[leaf])  # noqa: SLF001 - as above


def check_absorbed(path: str, layer: Any, weight: torch.Tensor | None, config: Any) -> None:
    """Compare what a layer of MLA derived with what vLLM derives from `weight`.

    Args:
        path: the layer's name.
        layer: the layer.
        weight: of its projection; None takes the one that the projection holds.
        config: the engine's configuration.

    Raises:
        ProofFailed: it holds something else.

    """
    stand_in, impl = _stand_in(layer, weight)
    with config_context(config), torch.no_grad():
        stand_in.process_weights_after_loading(config.model_config.dtype)
    made = _derived(stand_in, impl)
    had = _derived(layer, layer.impl)
    left = sorted(had.keys() - made.keys())
    if left:
        msg = (
            f"layer {path!r}: it holds {left}, which vLLM does not make of this version's weights. "
            "Install the update again; if that fails too, this model cannot be updated by reloads."
        )
        raise ProofFailed(msg)
    fresh = {name: tensor for name, tensor in made.items() if tensor is not had.get(name)}
    if not fresh:
        msg = (
            f"layer {path!r}: vLLM derives nothing from its weights that could be compared. Use a "
            "version of vLLM that was tried, see the table of versions."
        )
        raise ProofFailed(msg)
    for name, tensor in fresh.items():
        _compare(f"{path}.{name}", had.get(name), tensor)


# ---- inside -------------------------------------------------------------------------------------


def _stand_in(layer: Any, weight: torch.Tensor | None) -> tuple[Any, Any]:
    """A layer that derives what it derives anew, and its attention; the serving one is not seen."""
    stand_in, impl = object.__new__(type(layer)), copy.copy(layer.impl)
    state: dict[str, Any] = vars(stand_in)
    state.update(vars(layer))
    loaded = checkpoint_tensors(layer)
    parameters, buffers = state["_parameters"], state["_buffers"]
    state["_parameters"] = {name: value for name, value in parameters.items() if name in loaded}
    state["_buffers"] = {
        name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()
    }
    state["impl"] = impl
    state["_modules"] = dict(state["_modules"])
    if weight is not None:
        projection = copy.copy(state["_modules"][_PROJECTION])
        inner = vars(projection)
        inner["_parameters"] = {**inner["_parameters"], "weight": weight}
        state["_modules"][_PROJECTION] = impl.kv_b_proj = projection
    return stand_in, impl


def _derived(layer: Any, impl: Any) -> Mapping[str, torch.Tensor]:
    own = vars(layer)
    held = {**own, **own["_parameters"], **{f"impl.{k}": v for k, v in vars(impl).items()}}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _compare(name: str, live: torch.Tensor | None, made: torch.Tensor) -> None:
    is_alike = live is not None and live.dtype == made.dtype and live.shape == made.shape
    if live is not None and is_alike and torch.equal(_bytes(live), _bytes(made)):
        return
    msg = (
        f"{name!r} of the engine is not what vLLM makes of this version's weights. Install the "
        "update again; if that fails too, this model cannot be updated by reloads."
    )
    raise ProofFailed(msg)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
