"""The weights that the smoke command moves: a small transformer's, or a checkpoint's."""

from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["load_checkpoint", "synthetic_weights", "train_a_little"]


def synthetic_weights(hidden_dim: int, num_layers: int) -> dict[str, torch.Tensor]:
    """Return the state dict of a decoder of that size, in bf16 with fp32 norms."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).to(torch.bfloat16)

    weights = {"embed_tokens.weight": matrix(4 * hidden_dim, hidden_dim)}
    for index in range(num_layers):
        prefix = f"layers.{index}"
        weights |= {
            f"{prefix}.attention.qkv.weight": matrix(3 * hidden_dim, hidden_dim),
            f"{prefix}.attention.out.weight": matrix(hidden_dim, hidden_dim),
            f"{prefix}.mlp.up.weight": matrix(4 * hidden_dim, hidden_dim),
            f"{prefix}.mlp.down.weight": matrix(hidden_dim, 4 * hidden_dim),
            f"{prefix}.norm.weight": torch.ones(hidden_dim),
        }
    weights["norm.weight"] = torch.ones(hidden_dim)
    return weights


def load_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a ``.safetensors`` file, or of all of them in a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: one of them is no such file.

    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no .safetensors file at {path}")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is no .safetensors file: {error}") from error
    return weights


def train_a_little(weights: Mapping[str, torch.Tensor]) -> None:
    """Change every floating-point tensor in place: an update that changes nothing is suspicious."""
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.neg_()
