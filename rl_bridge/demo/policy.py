"""What is trained: a causal model that answers the task, whatever it is made of.

`log_probs` defines what "the log-probability of the answer" is. The trainer computes it in a single
pass over whole sequences, the sampler token by token over a cache of keys and values, and the demo
insists that the two agree.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from rl_bridge.demo.task import SortTask

__all__ = ["Policy", "answer_logits", "log_probs"]


class Policy(nn.Module, ABC):
    """A causal model of the task's tokens; the trainer's optimizer owns its parameters."""

    @property
    @abstractmethod
    def task(self) -> SortTask:
        """What it answers."""

    @property
    @abstractmethod
    def weights(self) -> nn.Module:
        """What is published: the module whose tensors have the names that the engine knows."""

    @abstractmethod
    def digit_logits(self, tokens: Tensor) -> Tensor:
        """Return logits for the digit that follows each token: (sequences, tokens, base)."""


def answer_logits(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the normalised logits at the answer's positions: (sequences, num_digits, base)."""
    logits = policy.digit_logits(tokens[:, :-1])
    return logits[:, policy.task.num_digits :].log_softmax(dim=-1)


def log_probs(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the log-probability of each answer token: (sequences, num_digits)."""
    chosen = policy.task.answers(tokens).unsqueeze(-1)
    return answer_logits(policy, tokens).gather(2, chosen).squeeze(-1)
