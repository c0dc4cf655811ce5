"""The task: write down the digits of the prompt in ascending order.

A sequence is `d1 ... dn SEP s1 ... sn`. The answer is checked position by position, so the reward
is a fact and not a model's opinion: guessing earns 1/base, sorting earns 1. Knows nothing of
models, learners or bridges.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SortTask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SortTask:
    """Sort `num_digits` digits below `base`."""

    num_digits: int = 6
    base: int = 10

    def __post_init__(self) -> None:
        """Refuse sizes for which there is nothing to sort."""
        if self.num_digits < 1 or self.base < 2:  # noqa: PLR2004 - one digit value sorts itself
            msg = f"need num_digits >= 1 and base >= 2, got {self.num_digits} and {self.base}"
            raise ValueError(msg)

    @property
    def separator(self) -> int:
        """The token between prompt and answer; the model reads it and never writes it."""
        return self.base

    @property
    def num_tokens(self) -> int:
        """Length of a whole sequence."""
        return 2 * self.num_digits + 1

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw prompts, separator included: int64 of shape (num_prompts, num_digits + 1)."""
        digits = torch.randint(0, self.base, (num_prompts, self.num_digits), generator=generator)
        return torch.cat([digits, torch.full((num_prompts, 1), self.separator)], dim=1)

    def answers(self, tokens: Tensor) -> Tensor:
        """Return the answer part of whole sequences."""
        return tokens[:, self.num_digits + 1 :]

    def rewards(self, tokens: Tensor) -> Tensor:
        """Return 1.0 for every position that is right and 0.0 for the others.

        The shape is (sequences, num_digits); the reward of a sequence is the mean of its row.
        """
        right = tokens[:, : self.num_digits].sort(dim=1).values
        return (self.answers(tokens) == right).float()
