"""The rollout's half of reinforcement learning: sample answers and grade them.

Runs wherever the rollout's model lives, from a seeded generator, token by token over a key-value
cache. Knows nothing of versions: whoever calls says which weights the model holds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_bridge.demo.model import CausalTransformer

__all__ = ["SampleBatch", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Sampled sequences, `group_size` neighbours per prompt."""

    tokens: Tensor
    """int64 (sequences, num_tokens): prompt, separator, answer."""
    log_probs: Tensor
    """float32 (sequences, num_digits): of each answer token, under the weights that sampled it."""
    rewards: Tensor
    """float32 (sequences, num_digits): 1 where the position is right."""
    group_size: int

    @property
    def mean_reward(self) -> float:
        """Share of right positions."""
        return float(self.rewards.mean())

    @property
    def exact_share(self) -> float:
        """Share of sequences that are right in every position."""
        return float(self.rewards.min(dim=1).values.mean())


def sample(
    model: CausalTransformer, *, num_groups: int, group_size: int, generator: torch.Generator
) -> SampleBatch:
    """Draw `num_groups` prompts and answer each of them `group_size` times."""
    task = model.config.task
    tokens = task.prompts(num_groups, generator).repeat_interleave(group_size, dim=0)
    cache = model.empty_cache()
    fed, start = tokens, 0
    chosen_log_probs = []
    with torch.no_grad():
        for _ in range(task.num_digits):
            distribution = model(fed, start=start, cache=cache)[:, -1].log_softmax(dim=-1)
            start += fed.shape[1]
            fed = torch.multinomial(distribution.exp(), 1, generator=generator)
            chosen_log_probs.append(distribution.gather(1, fed))
            tokens = torch.cat([tokens, fed], dim=1)
        return SampleBatch(
            tokens=tokens,
            log_probs=torch.cat(chosen_log_probs, dim=1),
            rewards=task.rewards(tokens),
            group_size=group_size,
        )
