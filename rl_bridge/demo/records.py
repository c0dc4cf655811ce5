"""What a run of the demo leaves behind: plain frozen values, and their JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["DemoResult", "FaultRow", "StepRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step: the version that sampled, what it earned, what the hand-over took."""

    step: int
    version: int
    root: str
    """Root digest over all tensors of the version."""
    update: Literal["installed", "refused", "undone"]
    """What became of this step's own update; if it failed, the older version samples once more."""
    reward: float
    """Share of right positions."""
    exact: float
    """Share of answers that are right in every position."""
    entropy: float
    logprob_max_abs_diff: float
    """Rollout against trainer, under the version that the rollout reports."""
    logprob_max_abs_diff_older: float | None
    """The same against the version before it: the control, which must be far away."""
    publish_ms: Mapping[str, float]
    """The publisher's phases."""
    install_ms: Mapping[str, float]
    """The consumer's phases."""
    update_ms: float
    """From `publish` to the acknowledgement, across both processes."""
    sample_ms: float
    learn_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One planted fault and what became of it."""

    step: int
    """The step before whose own update it was planted."""
    kind: str
    outcome: Literal["refused", "undone"]
    version: int
    """The version that the bad update claimed."""
    active_version: int
    """What the rollout held before, and holds after."""
    error: str
    """Type of what `update_weights` raised."""
    message: str
    logprob_max_abs_diff: float
    """Measured after the fault, under `active_version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """A whole run."""

    transport: str
    engine: str
    seed: int
    num_processes: int
    num_tensors: int
    total_nbytes: int
    seconds: float
    rows: tuple[StepRow, ...]
    faults: tuple[FaultRow, ...]
    engine_name: str = ""
    """The engine and its version, for people; empty for the module, which has none."""
    labels_checked: int = 0
    """Outputs that carried the engine's own label of the version that was asked for."""

    @property
    def reward_first(self) -> float:
        """Mean reward of the first step: random weights."""
        return self.rows[0].reward

    @property
    def reward_last(self) -> float:
        """Mean reward of the last step."""
        return self.rows[-1].reward

    @property
    def versions_installed(self) -> int:
        """How many versions the rollout installed, proved and acknowledged."""
        return len({row.version for row in self.rows})

    @property
    def refused(self) -> int:
        """How many updates were refused before the engine was touched."""
        return sum(fault.outcome == "refused" for fault in self.faults)

    @property
    def undone(self) -> int:
        """How many installs were taken back."""
        return sum(fault.outcome == "undone" for fault in self.faults)

    @property
    def logprob_max_abs_diff(self) -> float:
        """Largest disagreement over all steps, and over all faults."""
        steps = max(row.logprob_max_abs_diff for row in self.rows)
        return max((steps, *(fault.logprob_max_abs_diff for fault in self.faults)))

    @property
    def logprob_min_diff_if_stale(self) -> float | None:
        """Smallest disagreement that a rollout one version behind would have shown."""
        found = [row.logprob_max_abs_diff_older for row in self.rows]
        return min((diff for diff in found if diff is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; what only real engines have, only for these."""
        values = asdict(self)
        if not self.engine_name:
            del values["engine_name"], values["labels_checked"]
        return {
            **values,
            "steps": len(self.rows),
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "versions_installed": self.versions_installed,
            "refused": self.refused,
            "undone": self.undone,
            "logprob_max_abs_diff": self.logprob_max_abs_diff,
            "logprob_min_diff_if_stale": self.logprob_min_diff_if_stale,
        }
