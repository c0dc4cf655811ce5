"""What the demo learns, without any bridge: a task, log-probabilities of a policy, and GRPO.

The task is to write the digits of a prompt in ascending order. A sequence is `d1 ... dn SEP s1 ...
sn`, and each position of the answer is right or wrong: the reward is a fact and not a model's
opinion. Guessing earns 1/base, sorting earns 1.

Several answers to one prompt form a group, and an answer is good if it beats its group. Each reward
depends on one token only, so answers are compared position by position. The update is the clipped
policy gradient with an entropy bonus.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class SortTask:
    """Sort `num_digits` digits below `base`."""

    num_digits: int = 6
    base: int = 10

    @property
    def num_tokens(self) -> int:
        """Length of a whole sequence."""
        return 2 * self.num_digits + 1

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw prompts, separator included: int64 of shape (num_prompts, num_digits + 1)."""
        digits = torch.randint(0, self.base, (num_prompts, self.num_digits), generator=generator)
        return torch.cat([digits, torch.full((num_prompts, 1), self.base)], dim=1)

    def answers(self, tokens: Tensor) -> Tensor:
        """Return the answer part of whole sequences."""
        return tokens[:, self.num_digits + 1 :]

    def rewards(self, tokens: Tensor) -> Tensor:
        """Return 1.0 for every position that is right, else 0.0: (sequences, num_digits)."""
        right = tokens[:, : self.num_digits].sort(dim=1).values
        return (self.answers(tokens) == right).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Sampled sequences, `group_size` neighbours per prompt."""

    tokens: Tensor
    """int64 (sequences, num_tokens): prompt, separator, answer."""
    log_probs: Tensor
    """float32 (sequences, num_digits): of each answer token, under the weights that sampled it."""
    rewards: Tensor
    """float32 (sequences, num_digits): 1 if the position is right."""
    group_size: int
    labels: Mapping[str, int] = field(default_factory=dict)
    """How many sequences carry each version label of the engine's own; empty if it has none."""

    @classmethod
    def graded(
        cls,
        task: SortTask,
        tokens: Tensor,
        log_probs: Tensor,
        group_size: int,
        labels: Mapping[str, int] | None = None,
    ) -> Self:
        """Grade what was sampled."""
        return cls(
            tokens=tokens,
            log_probs=log_probs,
            rewards=task.rewards(tokens),
            group_size=group_size,
            labels=labels or {},
        )

    def document(self) -> dict[str, Any]:
        """What a trainer in another process learns from, as JSON values."""
        return {
            "tokens": self.tokens.tolist(),
            "log_probs": self.log_probs.tolist(),
            "group_size": self.group_size,
        }

    @property
    def mean_reward(self) -> float:
        """Share of right positions."""
        return float(self.rewards.mean())


class Policy(nn.Module, ABC):
    """A causal model of the task's tokens; the trainer's optimizer owns its parameters."""

    task: SortTask

    @property
    def weights(self) -> nn.Module:
        """What is published: the module whose tensors have the names that the engine knows."""
        return self

    @abstractmethod
    def digit_logits(self, tokens: Tensor) -> Tensor:
        """Return logits for the digit that follows each token: (sequences, tokens, base)."""


def _answer_logits(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the normalised logits at the answer's positions: (sequences, num_digits, base)."""
    logits = policy.digit_logits(tokens[:, :-1])
    return logits[:, policy.task.num_digits :].log_softmax(dim=-1)


def log_probs(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the log-probability of each answer token, in one pass: (sequences, num_digits)."""
    chosen = policy.task.answers(tokens).unsqueeze(-1)
    return _answer_logits(policy, tokens).gather(2, chosen).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """Settings that learn the task reliably from scratch (seeds 0 to 4 and more)."""

    learning_rate: float = 1e-3
    final_share: float = 0.1
    """The learning rate falls in a line to this share of itself over the run's steps."""
    epochs: int = 4
    clip: float = 0.2
    entropy_bonus: float = 0.01
    max_grad_norm: float = 1.0


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compare each reward with its group, position by position, in units of the group's spread.

    A group in which all answers agree teaches nothing: its advantages are zero.
    """
    grouped = rewards.view(-1, group_size, rewards.shape[1])
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    # The constant keeps unanimous groups at zero instead of dividing by it.
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-2)).view_as(rewards)


class Learner:
    """Owns the optimizer of a model; the model itself stays the caller's."""

    def __init__(
        self,
        model: Policy,
        *,
        num_steps: int,
        num_done: int = 0,
        config: LearnerConfig | None = None,
    ) -> None:
        """Prepare for `num_steps` calls of `update`, of which a learner before made some.

        Its optimizer's state is not known here: the moments begin anew, at the rate that is due.
        """
        self._model = model
        self._config = config = config or LearnerConfig()
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer,
            1.0 - (1.0 - config.final_share) * num_done / num_steps,
            config.final_share,
            total_iters=num_steps - num_done,
        )

    def update(self, batch: SampleBatch) -> float:
        """Improve the policy on one batch of the current weights, and return its entropy."""
        advantages = group_advantages(batch.rewards, batch.group_size)
        for _ in range(self._config.epochs):
            entropy = self._epoch(batch, advantages)
        self._schedule.step()
        return entropy

    def _epoch(self, batch: SampleBatch, advantages: Tensor) -> float:
        """Do one pass over the whole batch with one optimizer step."""
        config = self._config
        policy = _answer_logits(self._model, batch.tokens)
        chosen = self._model.task.answers(batch.tokens).unsqueeze(-1)
        ratio = (policy.gather(2, chosen).squeeze(-1) - batch.log_probs).exp()
        clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
        gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
        entropy = -(policy.exp() * policy).sum(dim=-1).mean()
        loss = -gain - config.entropy_bonus * entropy
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), config.max_grad_norm)
        self._optimizer.step()
        return float(entropy.detach())
