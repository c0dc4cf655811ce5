"""The rollout's half of reinforcement learning: an engine that samples answers, which are graded.

`Sampler` is all that the rollout knows of an engine; here is the one that is a torch module, and
`rl_bridge.demo.vllm_sampler` and `rl_bridge.demo.sglang_sampler` have others. Samplers know nothing
of versions: whoever calls says which weights they hold.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rl_bridge.demo.half_way import HalfWayAdapter
from rl_bridge.demo.model import CausalTransformer, ModelConfig, build_model
from rl_bridge.demo.task import SortTask
from rl_bridge.installers.base import TransactionalAdapter

__all__ = ["ModuleSampler", "SampleBatch", "Sampled", "Sampler", "sample"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A batch, and the version labels that the engine itself put on its outputs."""

    batch: SampleBatch
    labels: Mapping[str, int] = field(default_factory=dict)
    """How many sequences carry each label; empty where the engine puts none."""


class Sampler(Protocol):
    """An engine that samples with the weights that came in over its adapter."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def adapter(self) -> TransactionalAdapter:
        """How weights get into it."""

    def failing_half_way(self) -> AbstractContextManager[None]:
        """Within this context the engine fails in the middle of every install."""

    def sample(self, *, num_groups: int, group_size: int) -> Sampled:
        """Draw `num_groups` prompts and answer each of them `group_size` times."""

    def close(self) -> None:
        """Stop the engine."""


class ModuleSampler:
    """A torch module of this process, updated in place, sampled with over a key-value cache."""

    name = "torch module"

    def __init__(self, task: SortTask, *, model_seed: int, seed: int) -> None:
        """Build a model with random weights of its own, and draw from a seed."""
        self.model = build_model(ModelConfig(task=task), seed=model_seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._adapter = HalfWayAdapter(self.model)

    @property
    def adapter(self) -> TransactionalAdapter:
        """See `Sampler`."""
        return self._adapter

    @contextmanager
    def failing_half_way(self) -> Iterator[None]:
        """See `Sampler`."""
        self._adapter.is_armed = True
        try:
            yield
        finally:
            self._adapter.is_armed = False

    def sample(self, *, num_groups: int, group_size: int) -> Sampled:
        """See `Sampler`."""
        batch = sample(
            self.model, num_groups=num_groups, group_size=group_size, generator=self._generator
        )
        return Sampled(batch=batch)

    def close(self) -> None:
        """See `Sampler`."""


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
