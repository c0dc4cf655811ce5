"""Random weights of the shapes of Qwen3-0.6B and Qwen2.5-0.5B, as checkpoints have them."""

from typing import Any

import torch

__all__ = ["QUICK", "QWEN2", "QWEN3", "Weights", "make_weights"]

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = QWEN3 | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QUICK = {"num_hidden_layers": 4, "vocab_size": 32768}

Weights = dict[str, torch.Tensor]


def make_weights(shape: dict[str, Any], seed: int) -> Weights:
    """A checkpoint's tensors, random, layer by layer."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    pairs = shape["num_key_value_heads"] * shape["head_dim"]
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        sizes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (heads, hidden),
            f"{name}.self_attn.k_proj.weight": (pairs, hidden),
            f"{name}.self_attn.v_proj.weight": (pairs, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, heads),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
        more = {"q_norm.weight": shape["head_dim"], "k_norm.weight": shape["head_dim"]}
        if shape["model_type"] == "qwen2":
            more = {"q_proj.bias": heads, "k_proj.bias": pairs, "v_proj.bias": pairs}
        sizes |= {f"{name}.self_attn.{one}": (size,) for one, size in more.items()}
    weights = {}
    for name, size in sizes.items():
        weights[name] = torch.empty(size, dtype=torch.bfloat16)
        weights[name].normal_(0, 0.02, generator=draw)
    return weights
