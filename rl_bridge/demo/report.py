"""What a run leaves behind: rows as plain values, what the screen shows of them, `demo.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

LOGPROB_VISIBLE = 1e-3
"""Rounding alone moves no log-probability as far."""

Update = Literal["installed", "refused", "undone", "lost"]
EventKind = Literal["killed", "joined", "resumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step: the version that sampled, what it earned, what the hand-over took."""

    step: int
    version: int
    root: str
    """Root digest over all tensors of the version."""
    update: Update
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
    install_ms: Mapping[str, float]
    update_ms: float
    """From `publish` to the acknowledgement, across both processes."""
    sample_ms: float
    learn_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One planted fault and what became of it."""

    step: int
    """The step in which it was planted."""
    kind: str
    outcome: Update
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
class BareRow:
    """One step of the same run without the bridge: weights are copied, and nobody checks them."""

    step: int
    version: int
    """What the trainer believes that the engine holds."""
    reward: float
    logprob_max_abs_diff: float
    """Engine against trainer, under the version that the trainer believes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """What became of a process in the middle of a run."""

    step: int
    """The step before whose samples it was."""
    kind: EventKind
    who: str
    """``trainer`` or ``engine``."""
    pid: int
    version: int
    """What it was publishing when it was killed; or what it found in the store, and began with."""
    seconds: float
    """From its start until it was ready; of one that was killed, since its publication began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A few steps of a large model, apart from the run: for what its updates take."""

    rows: tuple[StepRow, ...] = ()
    nbytes: int = 0
    """Of a version."""


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
    lora: bool = False
    """Whether the versions are those of an adapter."""
    url: str = ""
    """Of the store, where versions travel in files."""
    bare: tuple[BareRow, ...] = ()
    """The same run without the bridge: same seeds, same faults; where the engine is the module."""
    large: Large = Large()
    """Of another model, over shared memory."""
    events: tuple[EventRow, ...] = ()
    """Processes that were killed, joined or resumed; where versions travel in files."""

    @property
    def cost_rows(self) -> tuple[StepRow, ...]:
        """The steps that show on what the time of an update is spent: the large model's, if any."""
        return self.large.rows or self.rows

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole run."""
        older = (row.logprob_max_abs_diff_older for row in self.rows)
        outcomes = [fault.outcome for fault in self.faults]
        diffs = [row.logprob_max_abs_diff for row in self.rows]
        return {
            "steps": len(self.rows),
            "reward_first": self.rows[0].reward,
            "reward_last": self.rows[-1].reward,
            "versions_installed": len({row.version for row in self.rows}),
            "refused": outcomes.count("refused"),
            "undone": outcomes.count("undone"),
            "lost": outcomes.count("lost"),
            "logprob_max_abs_diff": max(
                *diffs, *(fault.logprob_max_abs_diff for fault in self.faults)
            ),
            # What a rollout that is one version behind would have shown at least.
            "logprob_min_diff_if_stale": min(diff for diff in older if diff is not None),
        }


def write_json(result: DemoResult, path: Path) -> None:
    """Write `demo.json`: everything; what only real engines or files have, only for these."""
    values = asdict(result) | result.summary
    if not result.engine_name:
        del values["engine_name"], values["labels_checked"]
    if not result.bare:
        del values["bare"]
    if not result.large.rows:
        del values["large"]
    if not result.url:
        del values["url"], values["events"], values["lost"]
    text = json.dumps(values, sort_keys=True, indent=2, allow_nan=False)
    path.write_text(f"{text}\n", encoding="utf-8")


# ---- on what the time of an update is spent -----------------------------------------------------

# Small steps of one purpose are one phase. Real engines have a version staged beside the one that
# serves, in `prepare`; what stands between their pause and their resume is the install.
_PHASES = {
    "copy, digest": ("gather", "slot", "stage_digest"),
    "write, sync": ("write",),
    "find": ("find",),
    "messages": ("seal", "to_json"),
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


def step_line(row: StepRow, num_steps: int) -> str:
    """A step in one line."""
    return (
        f"step {row.step:>3}/{num_steps}  reward {row.reward:.3f}  version {row.version:>3}  "
        f"log-probs agree {row.logprob_max_abs_diff:.0e}  update {row.update_ms:.1f} ms"
    )


def print_fault(row: FaultRow, console: Console) -> None:
    """Show what became of a planted fault."""
    message = row.message.partition("\n")[0]
    text = Text.assemble(
        (f" {row.outcome.upper()} ", "bold white on dark_orange3"),
        f" step {row.step}: {row.kind}, v{row.version}: ",
        (row.error, "bold"),
        f": {message}\n",
    )
    after = f"v{row.active_version}, log-probs still agree ({row.logprob_max_abs_diff:.0e})"
    text.append(f"           the rollout stays at {after}, training goes on", "green")
    console.print(text, soft_wrap=True)


def event_text(row: EventRow) -> str:
    """An event in a few words."""
    said = {
        "killed": f"SIGKILL in its publication of v{row.version}",
        "joined": f"finds v{row.version}, while no trainer lives",
        "resumed": f"goes on from v{row.version}",
    }
    return f"{row.who} {row.pid} {said[row.kind]}"


def print_event(row: EventRow, console: Console) -> None:
    """Show what became of a process."""
    text = Text.assemble(
        (f" {row.kind.upper()} ", "bold white on dark_green"),
        f" step {row.step}: {event_text(row)} ({row.seconds:.1f} s)",
    )
    console.print(text, soft_wrap=True)


def print_report(result: DemoResult, console: Console) -> None:
    """Print what was learnt, what was refused, and what an update costs."""
    found = result.summary
    table = Table(title="What happened", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "reward", f"{found['reward_first']:.3f} -> [bold]{found['reward_last']:.3f}[/bold]"
    )
    table.add_row(
        "versions installed",
        f"{found['versions_installed']}, each verified and proved "
        f"({result.num_tensors} tensors, {result.total_nbytes:,} bytes)",
    )
    for fault in result.faults:
        table.add_row(
            fault.outcome,
            f"{fault.kind} v{fault.version} at step {fault.step}: {fault.error}; "
            f"v{fault.active_version} stayed active",
        )
    for event in result.events:
        table.add_row(event.kind, f"step {event.step}: {event_text(event)}")
    table.add_row(
        "log-probs",
        f"agree within {found['logprob_max_abs_diff']:.1e} at every step; one version older would "
        f"differ by {found['logprob_min_diff_if_stale']:.2f} or more",
    )
    if result.bare:
        off = [row.logprob_max_abs_diff for row in result.bare]
        table.add_row(
            "without the bridge",
            f"the same faults: {sum(one > LOGPROB_VISIBLE for one in off)} batches come from other "
            f"weights than the trainer believes, log-probs off by up to {max(off):.1f}",
        )
    if result.engine_name:
        labels = f"{result.labels_checked:,} outputs, each with the label of the version asked for"
        # An old vLLM labels nothing; then nothing is claimed.
        table.add_row("labels", labels if result.labels_checked else "none: too old an engine")
        table.add_row("engine", result.engine_name)
    table.add_row("time", f"{result.seconds:.1f} s, {result.transport}, seed {result.seed}")
    console.print(table)

    nbytes = result.large.nbytes or result.total_nbytes
    costs = Table(title=f"One update of {nbytes / 1e6:.1f} MB, milliseconds", title_justify="left")
    costs.add_column("phase")
    costs.add_column("median", justify="right")
    costs.add_column("worst", justify="right")
    whole = [row.update_ms for row in result.cost_rows]
    for phase, values in (*phases(result.cost_rows).items(), ("whole update", whole)):
        # The median of a phase is that of the updates that have it.
        usual = median(value for value in values if value)
        costs.add_row(phase, f"{usual:.2f}", f"{max(values):.2f}")
    console.print(costs)
