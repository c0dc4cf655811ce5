"""A small causal transformer in plain torch, in fp32 on the CPU.

Pre-norm blocks, learned positions, a key-value cache for sampling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_bridge.demo.policy import Policy
from rl_bridge.demo.task import SortTask

__all__ = ["CausalTransformer", "ModelConfig", "build_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer; the task gives vocabulary and length."""

    task: SortTask
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind its own norm."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the parameters of one block."""
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, past: list[Tensor] | None) -> Tensor:
        """Apply the block; with `past` the new keys and values are appended to it.

        `hidden` must be a whole prefix (empty `past`) or one single token (filled `past`): the
        causal mask below has no offset.
        """
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.attention_norm(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        if past is not None:
            if past:
                key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
            past[:] = [key, value]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = functional.gelu(self.up(self.feed_forward_norm(hidden)))
        narrowed: Tensor = self.down(widened)
        return hidden + narrowed


class CausalTransformer(Policy):
    """Tokens in, logits over the digits out."""

    def __init__(self, config: ModelConfig) -> None:
        """Make all parameters; `build_model` does it from a seed."""
        super().__init__()
        self.config = config
        task = config.task
        self.tokens = nn.Embedding(task.base + 1, config.width)
        self.positions = nn.Embedding(task.num_tokens, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, task.base)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.5)
        # A nearly flat first policy: REINFORCE learns only from what it happens to try.
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    @property
    def task(self) -> SortTask:
        """See `Policy`."""
        return self.config.task

    @property
    def weights(self) -> nn.Module:
        """See `Policy`."""
        return self

    def digit_logits(self, tokens: Tensor) -> Tensor:
        """See `Policy`."""
        logits: Tensor = self(tokens)
        return logits

    def empty_cache(self) -> list[list[Tensor]]:
        """Return a cache for `forward`, which fills it: keys and values per block."""
        return [[] for _ in self.blocks]

    def forward(
        self, tokens: Tensor, *, start: int = 0, cache: list[list[Tensor]] | None = None
    ) -> Tensor:
        """Return logits for what follows each token; `start` is the first token's position."""
        hidden: Tensor = self.tokens(tokens)
        hidden = hidden + self.positions.weight[start : start + tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, None if cache is None else cache[index])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_model(config: ModelConfig, seed: int) -> CausalTransformer:
    """Make a model from a seed and leave the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CausalTransformer(config)
