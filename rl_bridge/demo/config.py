"""What trainer and rollout must agree on before the first message."""

from dataclasses import dataclass

from rl_bridge.demo.options import Engine
from rl_bridge.demo.task import SortTask

__all__ = ["RolloutConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What a rollout needs to know before the first message."""

    transport: str
    seed: int
    engine: str = Engine.MODULE.value
    num_digits: int = 6
    base: int = 10
    engine_log: str = ""
    """File for what the rollout's process prints; empty lets it print where the trainer does."""

    @property
    def task(self) -> SortTask:
        """What is learnt."""
        return SortTask(num_digits=self.num_digits, base=self.base)
