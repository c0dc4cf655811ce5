"""The demo's own engine: a small causal transformer in plain torch, updated in place.

Pre-norm blocks, learned positions, fp32 on the CPU; a cache of keys and values for sampling. The
trainer trains one, `ModuleSampler` samples with another one. Other engines are `Sampler`s too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.learning import Policy, SampleBatch, SortTask
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.remote.client import RemoteEngine
from rl_bridge.testing.installer_faults import Sabotage, Stage


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind its own norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        """Make the parameters of one block."""
        super().__init__()
        self.num_heads = num_heads
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

    def __init__(
        self, task: SortTask, *, width: int = 64, num_layers: int = 2, num_heads: int = 4
    ) -> None:
        """Make all parameters; `build_model` does it from a seed."""
        super().__init__()
        self.task = task
        self.tokens = nn.Embedding(task.base + 1, width)
        self.positions = nn.Embedding(task.num_tokens, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, task.base)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.5)
        # A nearly flat first policy: REINFORCE learns only from what it happens to try.
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def digit_logits(self, tokens: Tensor) -> Tensor:
        """See `Policy`."""
        logits: Tensor = self(tokens)
        return logits

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


def engine_seed(seed: int) -> int:
    """The seed of an engine's first weights: other ones than the trainer's, so none may be left."""
    return seed + 1_000_003


def build_model(task: SortTask, seed: int, **sizes: int) -> CausalTransformer:
    """Make a model from a seed and leave the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CausalTransformer(task, **sizes)


def sample(
    model: CausalTransformer, *, num_groups: int, group_size: int, generator: torch.Generator
) -> SampleBatch:
    """Draw `num_groups` prompts and answer each of them `group_size` times, token by token."""
    task = model.task
    tokens = task.prompts(num_groups, generator).repeat_interleave(group_size, dim=0)
    cache: list[list[Tensor]] = [[] for _ in model.blocks]
    fed, start = tokens, 0
    chosen = []
    with torch.no_grad():
        for _ in range(task.num_digits):
            distribution = model(fed, start=start, cache=cache)[:, -1].log_softmax(dim=-1)
            start += fed.shape[1]
            fed = torch.multinomial(distribution.exp(), 1, generator=generator)
            chosen.append(distribution.gather(1, fed))
            tokens = torch.cat([tokens, fed], dim=1)
    return SampleBatch.graded(task, tokens, torch.cat(chosen, dim=1), group_size)


class Sampler(ABC):
    """An engine that samples with the weights that come in over its adapter.

    It knows nothing of versions: its caller says which weights it holds.
    """

    name: str
    """For people."""
    adapter: TransactionalAdapter
    """How weights get into it."""

    def updated_over(self, transport: str) -> RolloutExecutor | RemoteEngine:
        """Have the engine take updates by this transport."""
        return RolloutExecutor(weight_transport=transport, weight_install_adapter=self.adapter)

    @abstractmethod
    def failing_half_way(self) -> AbstractContextManager[None]:
        """Within this context the engine fails in the middle of every install."""

    @abstractmethod
    def sample(self, *, num_groups: int, group_size: int) -> SampleBatch:
        """Draw `num_groups` prompts and answer each of them `group_size` times."""

    def close(self) -> None:  # noqa: B027 - an engine of this process has nothing to stop
        """Stop the engine."""


class ModuleSampler(Sampler):
    """The demo's own engine: a torch module of this process."""

    name = "torch module"

    def __init__(self, task: SortTask, *, model_seed: int, seed: int, **sizes: int) -> None:
        """Build a model with random weights of its own, and draw from a seed."""
        self.model = build_model(task, seed=model_seed, **sizes)
        adapter = ModuleInstallAdapter(self.model, mode="copy", num_threads=1)
        self._sabotage = Sabotage(adapter, self.model)
        wrapped = self._sabotage.wrapped()
        assert isinstance(wrapped, TransactionalAdapter)
        self.adapter = wrapped
        self._generator = torch.Generator().manual_seed(seed)

    @contextmanager
    def failing_half_way(self) -> Iterator[None]:
        """See `Sampler`. Only `install` fails: the undo is the adapter's usual work."""
        self._sabotage.plan(Stage.HALF_WAY)
        try:
            yield
        finally:
            self._sabotage.plan(None)

    def sample(self, *, num_groups: int, group_size: int) -> SampleBatch:
        """See `Sampler`."""
        return sample(
            self.model, num_groups=num_groups, group_size=group_size, generator=self._generator
        )
