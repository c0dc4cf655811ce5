"""The trainer's ranks: each has the policy, its optimizer, and the publisher's end of a bridge.

There is one, in the trainer's own process, or two, whose policy is sharded: `rl_bridge.demo.lora`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from rl_bridge.demo.learning import Learner, LearnerConfig, Policy, SampleBatch
from rl_bridge.manifest.compare import Policy as Suspicion
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver

EXPONENT_BYTE = 3
"""Of a float32, in memory: where a flipped byte does most harm."""


class Published(NamedTuple):
    """A version that was published, and what each phase of that took."""

    manifest: WeightUpdateManifest
    timings_ms: dict[str, float]


class TrainerRanks(ABC):
    """All of them, as the loop uses them."""

    @abstractmethod
    def publish(self, version: int) -> Published:
        """Publish the weights of now."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The weights of now, those that are not trained left out; not by the bridge."""

    @abstractmethod
    def damage(self, manifest: WeightUpdateManifest) -> None:
        """Flip a byte of a published version, behind its manifest's back."""

    @abstractmethod
    def release(self, manifest: WeightUpdateManifest) -> None:
        """Take a version back."""

    @abstractmethod
    def learn(self, batch: SampleBatch) -> float:
        """Improve the policy on a batch, and return its entropy."""

    @abstractmethod
    def close(self) -> None:
        """Take back everything that was published."""


class OneRank(TrainerRanks):
    """A rank in the trainer's own process, which has all of the weights."""

    def __init__(
        self, policy: Policy, *, transport: str, num_steps: int, config: LearnerConfig
    ) -> None:
        """Train a policy; its weights travel by that transport."""
        self._policy = policy
        self._learner = Learner(policy, num_steps=num_steps, config=config)
        # The transport itself, wrapped so that a byte can be damaged behind a manifest's back.
        self._transport = FaultInjecting.over(transport, {"num_threads": 1})
        self._bridge = BridgeOver(
            self._transport,
            source_worker="trainer",
            suspicious=Suspicion.WARN,
            nonfinite=Suspicion.REJECT,
        )

    def publish(self, version: int) -> Published:
        """See `TrainerRanks`."""
        manifest = self._bridge.publish(self._policy.weights, weight_version=version)
        return Published(manifest, self._bridge.timings(manifest.update_id))

    def state(self) -> dict[str, Tensor]:
        """See `TrainerRanks`."""
        return self._policy.state_dict()

    def damage(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        table = manifest.table
        largest = max(range(len(table.nbytes)), key=lambda at: (table.nbytes[at], table.names[at]))
        middle = table.offsets[largest] + table.nbytes[largest] // 2
        self._transport.corrupt(manifest, middle + EXPONENT_BYTE)

    def release(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        self._bridge.release(manifest.update_id)

    def learn(self, batch: SampleBatch) -> float:
        """See `TrainerRanks`."""
        return self._learner.update(batch)

    def close(self) -> None:
        """See `TrainerRanks`."""
        self._bridge.close()
