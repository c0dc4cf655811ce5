"""What a run leaves behind: rows as plain values, what the screen shows of them, `demo.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

__all__ = [
    "DemoResult",
    "FaultRow",
    "LiveView",
    "StepRow",
    "phases",
    "print_report",
    "write_json",
]


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


def write_json(result: DemoResult, path: Path) -> None:
    """Write `demo.json`."""
    text = json.dumps(result.to_json(), sort_keys=True, indent=2, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


# ---- who spends the time of an update, and on what ----------------------------------------------

# Small steps of one purpose are one phase. Real engines have a version staged beside the one that
# serves, in `prepare`; what stands between their pause and their resume is the install.
_PHASES = {
    "copy, digest": ("gather", "slot", "stage_digest"),
    "messages": ("seal", "to_json", "parse"),
    "verify": ("attach", "verify"),
    "prepare": ("prepare",),
    "install": ("pause", "install", "cache", "label", "resume"),
    "prove": ("prove",),
    "acknowledge": ("finish",),
    "refuse, undo": ("failed",),
}
_PHASE_OF = {step: phase for phase, steps in _PHASES.items() for step in steps}


def phases(rows: Sequence[StepRow]) -> dict[str, list[float]]:
    """Return the milliseconds of each phase in each row; nothing is left out.

    What neither side accounts for is the way of the manifest and of the answer: messages.
    """
    found: dict[str, list[float]] = {phase: [0.0] * len(rows) for phase in _PHASES}
    for index, row in enumerate(rows):
        rest = row.update_ms
        for step, milliseconds in (*row.publish_ms.items(), *row.install_ms.items()):
            phase = _PHASE_OF.get(step, step)
            found.setdefault(phase, [0.0] * len(rows))[index] += milliseconds
            rest -= milliseconds
        found["messages"][index] += max(rest, 0.0)
    return {phase: values for phase, values in found.items() if any(values)}


# ---- the screen ---------------------------------------------------------------------------------


class LiveView:
    """Shows steps and faults as they come; used with `with`, so that the terminal is restored."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        """Show nothing yet."""
        self._console = console
        self._num_steps = num_steps
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), console=console, transient=True
        )
        self._task = self._bar.add_task("starting", total=num_steps)

    def __enter__(self) -> Self:
        """Start to draw, on a terminal."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back."""
        self._bar.stop()

    def step(self, row: StepRow) -> None:
        """Show a step: on a terminal in place of the one before, elsewhere as a line."""
        line = (
            f"step {row.step:>3}/{self._num_steps}  reward {row.reward:.3f}  "
            f"version {row.version:>3}  log-probs agree {row.logprob_max_abs_diff:.0e}  "
            f"update {row.update_ms:.1f} ms"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, description=line, advance=1)
        else:
            self._console.print(line, soft_wrap=True, highlight=False)

    def fault(self, row: FaultRow) -> None:
        """Show what became of a planted fault; it stays on the screen."""
        message = row.message.splitlines()[0] if row.message else ""
        text = Text.assemble(
            (f" {row.outcome.upper()} ", "bold white on dark_orange3"),
            f" step {row.step}: {row.kind}, v{row.version}: ",
            (row.error, "bold"),
            f": {message}\n",
        )
        after = f"v{row.active_version}, log-probs still agree ({row.logprob_max_abs_diff:.0e})"
        text.append(f"           the rollout stays at {after}, training goes on", "green")
        self._console.print(text, soft_wrap=True)


def print_report(result: DemoResult, console: Console) -> None:
    """Print what was learnt, what was refused, and what an update costs."""
    console.print(_summary(result))
    console.print(_costs(result))


def _summary(result: DemoResult) -> Table:
    table = Table(title="What happened", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("reward", f"{result.reward_first:.3f} -> [bold]{result.reward_last:.3f}[/bold]")
    table.add_row(
        "versions installed",
        f"{result.versions_installed}, each verified and proved "
        f"({result.num_tensors} tensors, {result.total_nbytes:,} bytes)",
    )
    for fault in result.faults:
        table.add_row(
            fault.outcome,
            f"{fault.kind} v{fault.version} at step {fault.step}: {fault.error}; "
            f"v{fault.active_version} stayed active",
        )
    stale = result.logprob_min_diff_if_stale
    control = "" if stale is None else f"; one version older would differ by {stale:.2f} or more"
    table.add_row(
        "log-probs", f"agree within {result.logprob_max_abs_diff:.1e} at every step{control}"
    )
    if result.engine_name:
        labels = f"{result.labels_checked:,} outputs, each with the label of the version asked for"
        # An old vLLM labels nothing; then nothing is claimed.
        table.add_row("labels", labels if result.labels_checked else "none: too old an engine")
        table.add_row("engine", result.engine_name)
    table.add_row("time", f"{result.seconds:.1f} s, {result.transport}, seed {result.seed}")
    return table


def _costs(result: DemoResult) -> Table:
    table = Table(title="One update, milliseconds", title_justify="left")
    table.add_column("phase")
    table.add_column("median", justify="right")
    table.add_column("worst", justify="right")
    whole = [row.update_ms for row in result.rows]
    for phase, values in (*phases(result.rows).items(), ("whole update", whole)):
        # A phase that few updates have is told by these.
        usual = median(value for value in values if value)
        table.add_row(phase, f"{usual:.2f}", f"{max(values):.2f}")
    return table
