"""Small Hugging Face models, with another value in each element of each tensor."""

from pathlib import Path
from typing import Any

import torch

from tests.trainers_torch.worlds import filled, reference

__all__ = ["saved"]


def saved(kind: str, path: Path, **options: Any) -> dict[str, Any]:
    """Write a checkpoint to `path`, and tell what is in it."""
    import transformers

    sizes = {
        "vocab_size": 26,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32)
    filled(model)
    model.save_pretrained(path)
    return reference(model)
