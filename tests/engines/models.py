"""Tiny random checkpoints of the families that the tests serve, made offline."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 512
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
# (The reference attention on the CPU takes no other sizes.)
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_HYBRID = {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "position_embedding_type": "rope",
}
# family -> configuration class, model class, what it has beside `_SHAPE`
_FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
    # Two ranks do not divide these key/value heads.
    "odd-heads": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "head_dim": 32,
            "hidden_size": 192,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        },
    ),
    "moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 32, **_MOE}),
    "deepseek": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", _HYBRID),
}
# layer -> inputs, outputs
_ADAPTED = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 256),
    "mlp.up_proj": (128, 256),
    "mlp.down_proj": (256, 128),
}
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [name.rpartition(".")[2] for name in _ADAPTED],
    "base_model_name_or_path": "",
    "inference_mode": True,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model. Versions of it differ in every weight."""

    family: str = "qwen3"
    tied: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.family}-{'tied' if self.tied else 'untied'}-{self.dtype}"


class Checkpoints:
    """Checkpoints below one folder, each made when it is asked for."""

    def __init__(self, root: Path) -> None:
        """Begin with none."""
        self.root = root

    def path(self, kind: Kind, version: int) -> str:
        """The folder of one version."""
        home = self.root / str(kind) / f"v{version}"
        if not (home / "config.json").exists():
            _make(kind, version, home)
        return str(home)

    def weights(self, kind: Kind, version: int) -> dict[str, torch.Tensor]:
        """What a trainer publishes of that version."""
        return load_file(str(Path(self.path(kind, version)) / "model.safetensors"))

    def adapter(self, number: int) -> str:
        """The folder of a LoRA adapter for qwen3."""
        home = self.root / f"adapter{number}"
        home.mkdir(exist_ok=True)
        save_file(_adapter(number), home / "adapter_model.safetensors")
        (home / "adapter_config.json").write_text(json.dumps(ADAPTER), "utf-8")
        return str(home)


def _make(kind: Kind, version: int, home: Path) -> None:
    import transformers

    generator = torch.Generator().manual_seed(1000 + version)
    model = _model(kind, transformers)
    with torch.no_grad():
        # Large: the next token depends on the weights, and not on the last token alone.
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.15 * noise)
            elif "bias" in name:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(1 + 0.2 * noise)
    model.save_pretrained(home)


def _model(kind: Kind, transformers: Any) -> Any:
    config_name, model_name, extra = _FAMILIES[kind.family]
    config = getattr(transformers, config_name)(
        **{**_SHAPE, **extra}, tie_word_embeddings=kind.tied, dtype=kind.dtype
    )
    return getattr(transformers, model_name)(config).to(getattr(torch, kind.dtype))


def _adapter(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    made = {}
    for layer in range(_SHAPE["num_hidden_layers"]):
        for name, (inputs, outputs) in _ADAPTED.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            made[f"{path}.lora_A.weight"] = 0.3 * torch.randn(8, inputs, generator=generator)
            made[f"{path}.lora_B.weight"] = 0.3 * torch.randn(outputs, 8, generator=generator)
    return made
