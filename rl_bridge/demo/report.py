"""The report of a run: rows as plain values, `demo.json`, the lines on the screen, a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Write `demo.json`: everything; what a run does not have is empty."""
    values = asdict(result) | result.summary
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


# ---- the picture: what was learnt, which versions carried it, the proof, the cost ----------------
#
# The colours are Okabe and Ito's: they stay apart for colour-blind readers, and every mark also
# differs in shape or is labelled where it stands.

_INK, _MUTED, _GRID = "#222222", "#6b6b6b", "#e4e4e4"
_BLUE, _SKY = "#0072b2", "#56b4e9"
_RED = "#d55e00"
_OUTCOMES = {"refused": ("#00734f", "X"), "undone": ("#00734f", "D"), "lost": (_INK, "s")}
_COLOURS = {
    "copy, digest": _BLUE,
    "write, sync": "#a3528a",
    "find": "#f5c9a9",
    "messages": "#bdbdbd",
    "verify": _SKY,
    "prepare": "#f0e442",
    "install": "#e69f00",
    "prove": "#009e73",
    "acknowledge": "#7a7a7a",
    "refuse, undo": _RED,
}
_PROCESSES = {1: "one process", 2: "two processes", 4: "four processes"}
_STYLE: Any = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def draw_picture(result: DemoResult, path: Path) -> None:
    """Draw a run into a PNG file."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, to_engine = result.summary, f" to {result.engine_name}" if result.engine_name else ""
    with mpl.rc_context(_STYLE):
        # A figure of its own, without pyplot: no global state, and no display is asked for.
        # (Only where processes come and go is there a panel of them, below the reward.)
        lanes = [1.25] if result.events else []
        # (The costs of another model have steps of their own, below a gap.)
        gap = [0.35] if result.large.rows else []
        figure = Figure(figsize=(10.5, 9.4 + len(lanes)), dpi=150)
        FigureCanvasAgg(figure)
        heights = [3.0, *lanes, 1.0, 1.5, *gap, 2.0]
        grid = figure.add_gridspec(len(heights), 1, height_ratios=heights, hspace=0.16)
        rewards, *below = (figure.add_subplot(grid[row]) for row in range(3 + len(lanes)))
        cost = figure.add_subplot(grid[-1])
        figure.subplots_adjust(left=0.085, right=0.825, top=0.885, bottom=0.06)
        trained = "LoRA learns to sort while it travels"
        if not result.lora:
            trained = "policy learns to sort while its weights travel"
        title = f"A {trained}{to_engine}"
        figure.text(0.085, 0.96, title, fontsize=15, weight="bold")
        figure.text(
            0.085,
            0.932,
            f"{result.transport}, {_PROCESSES[result.num_processes]}: "
            f"{found['versions_installed']} versions installed and proved, {found['refused']} "
            f"updates refused, {found['undone']} undone{_lost(found['lost'])}",
            color=_MUTED,
        )
        wrong = sum(row.logprob_max_abs_diff > LOGPROB_VISIBLE for row in result.bare)
        if result.bare:
            said = (
                f"the same faults without the bridge: {wrong} batches sampled with other weights "
                "than the trainer believes"
            )
            figure.text(0.085, 0.909, said, color=_RED)
        loop = [rewards, *below] if result.large.rows else [rewards, *below, cost]
        for axes in loop:
            axes.set_xlim(0.0, len(result.rows) + 1.0)
            axes.tick_params(axis="x", labelbottom=axes is loop[-1])
        loop[-1].set_xlabel("step")
        _draw_reward(rewards, result)
        if lanes:
            _draw_processes(below.pop(0), result)
        versions, agreement = below
        _draw_versions(versions, result)
        _draw_agreement(agreement, result)
        _draw_cost(cost, result)
        for axes in (rewards, agreement, cost):
            axes.grid(axis="y")
            for fault in result.faults if axes in loop else ():
                colour, _ = _OUTCOMES[fault.outcome]
                axes.axvline(fault.step - 0.5, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
        if result.large.rows:
            cost.set_xlabel(
                f"update of a larger model, {result.large.nbytes / 1e6:.0f} MB, apart from the run"
            )
        figure.savefig(path)


def _lost(count: int) -> str:
    return f", {count} lost with its trainer" if count else ""


def _label(axes: "Axes", text: str, at: tuple[float, float], colour: str, **style: Any) -> None:
    """Write beside a point, over the edge of the panel where that must be."""
    style |= {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(text, at, xytext=(10, 0), color=colour, **style)


def _draw_reward(axes: "Axes", result: DemoResult) -> None:
    steps = [row.step for row in result.rows]
    reward, bare = [row.reward for row in result.rows], [row.reward for row in result.bare]
    if bare:
        # The curves may end close to each other or on the axis: labels keep their distance.
        axes.plot(steps, bare, color=_RED, linewidth=1.8)
        height = max(min(bare[-1], reward[-1] - 0.1), 0.04)
        text = f"without the bridge\n{bare[-1]:.2f}"
        _label(axes, text, (steps[-1], height), _RED, weight="bold")
    axes.plot(steps, reward, color=_BLUE, linewidth=2.6)
    _label(axes, f"reward {reward[-1]:.2f}", (steps[-1], reward[-1]), _BLUE, weight="bold")
    axes.plot(steps[0], reward[0], marker="o", color=_BLUE)
    _label(axes, f"{reward[0]:.2f} untrained", (steps[0], reward[0] - 0.04), _BLUE)
    axes.set_ylim(0.0, 1.04)
    axes.set_ylabel("share that is right")


def _draw_processes(axes: "Axes", result: DemoResult) -> None:
    """Draw who lived when: the trainer that was killed, the next one, and the engines."""
    end = len(result.rows) + 0.5
    began = [("trainer", "", 0.5, _BLUE), ("engine", "", 0.5, _SKY)]
    for event in result.events:
        if event.kind != "killed":
            colour = _BLUE if event.who == "trainer" else _SKY
            text = f"{event.kind}, from v{event.version}"
            began.append((event.who, text, event.step - 0.5, colour))
    killed = [event for event in result.events if event.kind == "killed"]
    count: dict[str, int] = {}
    for who, text, since, colour in sorted(began, key=lambda one: one[0] == "engine"):
        count[who] = count.get(who, 0) + 1
        height = -sum(count.values())
        is_killed = who == "trainer" and count[who] <= len(killed)
        until = killed[count[who] - 1].step - 0.5 if is_killed else end
        axes.barh(height, until - since, left=since, height=0.76, color=colour)
        inside: Any = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        label = f"{who} {count[who]}{f': {text}' if text else ''}"
        ink = "white" if who == "trainer" else _INK
        axes.annotate(label, (since, height), xytext=(5, -1), color=ink, **inside)
        if is_killed:
            axes.plot(until, height, marker="X", markersize=11, color=_INK, markeredgecolor="white")
            said = f"killed while it published v{killed[count[who] - 1].version}"
            axes.annotate(
                said, (until, height), xytext=(9, -1), color=_INK, weight="bold", **inside
            )
    axes.set_ylim(-sum(count.values()) - 0.6, -0.4)
    axes.set_yticks([])
    axes.set_ylabel("processes")
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _draw_versions(axes: "Axes", result: DemoResult) -> None:
    installed = [row for row in result.rows if row.update == "installed"]
    steps = [row.step for row in installed]
    axes.scatter(steps, [0.0] * len(steps), marker="|", s=90, color=_BLUE, linewidths=1.3)
    centred: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
    for row in installed[:: max(1, len(steps) // 8)]:
        axes.annotate(f"v{row.version}", (row.step, 0.0), xytext=(0, -18), color=_MUTED, **centred)
    for index, fault in enumerate(result.faults):
        colour, marker = _OUTCOMES[fault.outcome]
        at = (fault.step - 0.5, 0.0)
        axes.plot(*at, marker=marker, markersize=9, color=colour, markeredgecolor="white")
        # Neighbouring labels stand on different lines.
        text, above = f"v{fault.version} {fault.kind}: {fault.outcome}", (0, 11 + 13 * (index % 3))
        axes.annotate(text, at, xytext=above, color=colour, weight="bold", **centred)
    axes.set_ylim(-1.0, 2.0)
    axes.set_yticks([])
    axes.set_ylabel("versions")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _draw_agreement(axes: "Axes", result: DemoResult) -> None:
    """Draw what each batch proves: it was sampled with the version that the rollout reports."""
    steps = [row.step for row in result.rows]
    reported = [row.logprob_max_abs_diff for row in result.rows]
    older = [
        (row.step, row.logprob_max_abs_diff_older)
        for row in result.rows
        if row.logprob_max_abs_diff_older is not None
    ]
    wrong = [row for row in result.bare if row.logprob_max_abs_diff > LOGPROB_VISIBLE]
    axes.scatter(steps, reported, s=12, color=_BLUE)
    for row in wrong:
        axes.plot(row.step, row.logprob_max_abs_diff, marker="o", markersize=9, color=_RED)
    numbers, differences = zip(*older, strict=True)
    axes.scatter(numbers, differences, s=14, color=_MUTED, marker="x", linewidths=1.0)
    axes.set_yscale("log")
    # Room for the label of two lines beside the lowest point.
    axes.set_ylim(bottom=min((value for value in reported if value > 0), default=1e-7) / 10)
    axes.set_ylim(top=3 * axes.get_ylim()[1])
    axes.set_ylabel("log-probs differ")
    _label(axes, "if it sampled with\nthe version before", older[-1], _MUTED, fontsize=9)
    _label(axes, "from the version\nthat it reports", (steps[-1], reported[-1]), _BLUE, fontsize=9)


def _draw_cost(axes: "Axes", result: DemoResult) -> None:
    steps = [row.step for row in result.cost_rows]
    base = [0.0] * len(steps)
    for phase, values in phases(result.cost_rows).items():
        colour = _COLOURS.get(phase, _INK)
        axes.bar(steps, values, bottom=base, width=0.86, color=colour, label=phase)
        base = [low + value for low, value in zip(base, values, strict=True)]
    # The first updates make memory and plans: cut them off rather than flatten all the others.
    usual = sorted(base)[int(0.95 * (len(base) - 1))]
    ceiling = min(max(base), usual * 1.35) * 1.08 or 1.0
    axes.set_ylim(0.0, ceiling)
    boxed: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
    cut = {"textcoords": "offset points", "va": "top", "fontsize": 8, "bbox": boxed}
    for step, total in zip(steps, base, strict=True):
        if total > ceiling and step < 0.95 * len(steps):  # no label over the legend
            text = f"{total:.0f} ms"
            axes.annotate(text, (step, ceiling), xytext=(5, -3), color=_MUTED, **cut)
    axes.set_ylabel("ms per update")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        handlelength=1.0,
        labelspacing=0.35,
        borderaxespad=0.0,
    )
