"""What a run shows while it goes on: a panel on a terminal, a line for each step elsewhere."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_bridge.demo.records import FaultRow, StepRow

__all__ = ["LiveView", "sparkline"]

_BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """Draw values between 0 and 1 as a row of at most `width` bars, the latest last."""
    stride = max(1, -(-len(values) // width))
    chunks = [values[start : start + stride] for start in range(0, len(values), stride)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    return "".join(_BARS[max(1, min(8, round(8 * mean)))] for mean in means)


def _phases_text(phases: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in phases.items())


class LiveView:
    """Shows steps and faults as they come; used with `with`, so that the terminal is restored."""

    def __init__(self, console: Console, *, title: str, num_steps: int) -> None:
        """Show nothing yet."""
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._rows: list[StepRow] = []
        self._live = (
            Live(self._panel(), console=console, refresh_per_second=10, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        """Start to draw."""
        if self._live is not None:
            self._live.start()
        else:
            self._console.print(self._title, soft_wrap=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print one line of progress that stays."""
        self._console.print(message, soft_wrap=True, highlight=False)

    def step(self, row: StepRow) -> None:
        """Show a step."""
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._console.print(
                f"step {row.step:>3}/{self._num_steps}  reward {row.reward:.3f}  "
                f"version {row.version:>3}  log-probs agree {row.logprob_max_abs_diff:.0e}  "
                f"update {row.update_ms:.2f} ms  trainer: {_phases_text(row.publish_ms)}  "
                f"rollout: {_phases_text(row.install_ms)}",
                soft_wrap=True,
                highlight=False,
            )

    def fault(self, row: FaultRow) -> None:
        """Show what became of a planted fault; it stays on the screen."""
        after = (
            f"           the rollout stays at v{row.active_version}, log-probs still agree "
            f"({row.logprob_max_abs_diff:.0e}), training goes on"
        )
        text = Text.assemble(
            (f" {row.outcome.upper()} ", "bold white on dark_orange3"),
            f" step {row.step}: {row.kind}, v{row.version}: ",
            (row.error, "bold"),
            ": ",
        )
        limit = max(20, self._console.width - len(text)) if self._live is not None else 120
        text.append(f"{_shorten(row.message, limit)}\n").append(after, "green")
        self._console.print(text, soft_wrap=True)

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=11)
        table.add_column(overflow="fold")
        done, width = len(self._rows), max(8, min(60, self._console.width - 32))
        table.add_row(
            f"step {done}/{self._num_steps}",
            ProgressBar(total=self._num_steps, completed=done, width=width + 6),
        )
        if done:
            self._add_facts(table, self._rows[-1], width)
        else:
            table.add_row("", "starting")
        return Panel(table, title=self._title, title_align="left", border_style="blue")

    def _add_facts(self, table: Table, row: StepRow, width: int) -> None:
        curve = sparkline([one.reward for one in self._rows], width)
        table.add_row(
            "reward",
            Text.assemble((f"{row.reward:.3f} ", "bold blue"), (curve, "blue")),
        )
        table.add_row("version", f"{row.version}   root {row.root[:16]}")
        agree = f"{row.logprob_max_abs_diff:.1e}"
        if row.logprob_max_abs_diff_older is not None:
            agree += f"   (one version older: {row.logprob_max_abs_diff_older:.2f})"
        table.add_row("log-probs", f"agree within {agree}")
        table.add_row("trainer ms", _phases_text(row.publish_ms))
        table.add_row("rollout ms", _phases_text(row.install_ms))
        table.add_row("update ms", f"{row.update_ms:.2f} from publish to acknowledgement")


def _shorten(message: str, limit: int) -> str:
    first = message.splitlines()[0] if message else ""
    return first if len(first) <= limit else first[: limit - 3] + "..."
