"""Megatron-Core and mbridge on a machine without CUDA: for these tests only.

megatron-core 0.16 asks for the current CUDA device in a few places of a GPT model; mbridge wants
layers of Transformer Engine. Nothing here is used, or needed, by rl_bridge itself.
"""

import inspect
from typing import Any

import torch


def prepare_megatron() -> None:
    """Let a GPT model of Megatron's be built and run on the CPU."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device="cpu": torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None  # a name that is missing without Transformer Engine


def prepare_mbridge() -> None:
    """Let mbridge build models of Megatron's own layers, which have norms of their own."""
    from mbridge.core import llm_bridge
    from mbridge.core.bridge import Bridge
    from megatron.core.models.gpt import gpt_layer_specs

    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    spec = gpt_layer_specs.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool = True, **options: Any) -> Any:
        return spec(config, use_transformer_engine=False, **options)

    local_spec.__signature__ = inspect.signature(spec)  # type: ignore[attr-defined]  # it is looked at
    llm_bridge.get_gpt_decoder_block_spec = local_spec
    names = Bridge._weight_name_mapping_mcore_to_hf
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

    def mapped(self: Any, name: str) -> list[str]:
        layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
        for ours, theirs in norms.items():
            if name.endswith(f".{ours}.weight"):
                return [f"model.layers.{layer}.{theirs}.weight"]
        return list(names(self, name))

    Bridge._weight_name_mapping_mcore_to_hf = mapped
