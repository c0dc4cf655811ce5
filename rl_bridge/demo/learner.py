"""The trainer's half of reinforcement learning: GRPO on graded samples.

Several answers to one prompt form a group, and an answer counts as good when it beats its group.
Rewards are given per position and each depends on one token only, so the comparison is made
position by position. The update is the clipped policy gradient with an entropy bonus; nothing is
pre-trained and nobody shows the model a sorted list.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_bridge.demo.policy import Policy, answer_logits
from rl_bridge.demo.sampler import SampleBatch

__all__ = ["LearnStats", "Learner", "LearnerConfig", "group_advantages"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnStats:
    """What one update did."""

    loss: float
    entropy: float
    clipped_share: float


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
        self, model: Policy, *, num_steps: int, config: LearnerConfig | None = None
    ) -> None:
        """Prepare for `num_steps` calls of `update`."""
        self._model = model
        self._config = config or LearnerConfig()
        self._num_steps = num_steps
        self._step = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=self._config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, batch: SampleBatch) -> LearnStats:
        """Improve the policy on one batch that the current weights have sampled."""
        config = self._config
        progress = min(self._step / self._num_steps, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate * (1.0 - (1.0 - config.final_share) * progress)
        self._step += 1
        advantages = group_advantages(batch.rewards, batch.group_size)
        for _ in range(config.epochs):
            stats = self._epoch(batch, advantages)
        return stats

    def _epoch(self, batch: SampleBatch, advantages: Tensor) -> LearnStats:
        """Do one pass over the whole batch with one optimizer step."""
        config = self._config
        policy = answer_logits(self._model, batch.tokens)
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
        return LearnStats(
            loss=float(loss.detach()),
            entropy=float(entropy.detach()),
            clipped_share=float((ratio != clipped).float().mean()),
        )
