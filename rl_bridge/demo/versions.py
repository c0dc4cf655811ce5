"""The trainer's own memory of what it published: the judge of what the rollout claims to hold.

Keeps an independent copy of the weights per version, so that log-probabilities reported under a
version can be recomputed under exactly that version, whatever the trainer has learnt since.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_bridge.demo.policy import Policy, log_probs
from rl_bridge.demo.sampler import SampleBatch

__all__ = ["Agreement", "VersionShelf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a rollout's log-probabilities lie from the trainer's own."""

    version: int
    max_abs_diff: float
    """Against the version that the rollout reports: float rounding, if it told the truth."""
    max_abs_diff_older: float | None
    """Against the version before it: what one stale version would have looked like."""


class VersionShelf:
    """Copies of the last few published versions."""

    def __init__(self, model: Policy, *, capacity: int = 4) -> None:
        """Take over the model's shape; nothing is on the shelf yet."""
        self._scratch = copy.deepcopy(model)
        self._capacity = capacity
        self._kept: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    def keep(self, version: int, model: Policy) -> None:
        """Copy the model's weights under a version; the oldest copy beyond the capacity goes."""
        state = model.state_dict()
        self._kept[version] = {name: tensor.clone() for name, tensor in state.items()}
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def log_probs(self, version: int, tokens: Tensor) -> Tensor:
        """Recompute the answer's log-probabilities under a kept version, in a single pass."""
        if version not in self._kept:
            msg = f"no weights of version {version} are kept; kept are {list(self._kept)}"
            raise KeyError(msg)
        self._scratch.load_state_dict(self._kept[version])
        with torch.no_grad():
            return log_probs(self._scratch, tokens)

    def compare(self, version: int, batch: SampleBatch) -> Agreement:
        """Measure a batch against the reported version, and against the one before as control."""
        older = max((kept for kept in self._kept if kept < version), default=None)
        return Agreement(
            version=version,
            max_abs_diff=self._max_abs_diff(version, batch),
            max_abs_diff_older=None if older is None else self._max_abs_diff(older, batch),
        )

    def _max_abs_diff(self, version: int, batch: SampleBatch) -> float:
        recomputed = self.log_probs(version, batch.tokens)
        return float((recomputed - batch.log_probs).abs().max())
