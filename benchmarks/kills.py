"""Kills trainers and SGLang servers at each step of an update: `python benchmarks/kills.py`.

Our updates beside SGLang's own route, in turn, in one run, over a real server of a small model on
the CPU. After each kill -9 the server's parameters are compared with those of the version before
and of the next, a request is sent, the server is told to go on and asked what it answers and which
version it says it has, and a trainer (the next one, if it was killed) updates it once more.
README.md beside this file says how each figure comes about. Needs the environment of
`make test-sglang`.
"""

import datetime as dt
import importlib.metadata
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from _lib import sglang_cpu
from _lib.environment import collect_environment, save
from _lib.killed_trainers import STEPS, OursTrainer, StockTrainer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge.errors import DeadlineExceeded
from rl_bridge.testing.processes import Child, ChildDied, ChildError

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from tests.engines.models import Checkpoints, Kind  # noqa: E402 - after the path
from tests.sglang.served import KEY, Served, served  # noqa: E402

__all__ = ["main"]

_OUT = _ROOT / "benchmarks" / "results" / "kills.json"
_KIND = Kind("qwen2")
_ANSWER_S = 5.0
_DEADLINE_S = 60.0
_TRAINERS = {"ours": OursTrainer, "stock": StockTrainer}
# A server that is killed is started anew, which takes most of the time.
_ENGINE_STEPS = {"stock": ("paused", "in a bucket"), "ours": ("in staging", "in the install")}


class Bench:
    """A server, the two sets of weights, and what the server's parameters are with each."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder, random.Random(seed)
        checkpoints = Checkpoints(folder)
        self.folders = [checkpoints.path(_KIND, number) for number in (0, 1)]
        self.version = 0
        self._starts = 0
        self._open: Any = None
        self._trainer: Child | None = None
        self._side = ""
        self.restart()
        self.sums, self.fresh = [self.server.sums()], [self.server.answers()]
        self.took_s: dict[str, dict[str, float]] = {}
        self._took_s: dict[str, float] = {}
        for side in _TRAINERS:  # the first update of a trainer takes longer than those behind it
            for number in (1, 0, 1):
                problem = self.update(self.running(side), number)
                assert not problem, problem
            self.took_s[side] = self._took_s
        self.sums.append(self.server.sums())
        self.fresh.append(self.server.answers())
        assert self.sums[0] != self.sums[1]
        assert self.fresh[0] != self.fresh[1]
        self.holds = 1

    server: Served

    def restart(self) -> None:
        """Start a server, which has the first weights of its checkpoint."""
        self.stop()
        self._starts += 1
        self._open = served(self.folders[0], self.folder / f"log-{self._starts}")
        self.server = self._open.__enter__()
        self.holds = 0

    def stop(self) -> None:
        """Kill the server and the trainer, if they run."""
        self.end_trainer()
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def running(self, side: str) -> Child:
        """The trainer that runs, or a new one, in a process of its own."""
        if self._side != side:
            self.end_trainer()
        if self._trainer is None:
            url = self.server.url
            self._trainer = Child(_TRAINERS[side], url=url, key=KEY, folders=self.folders)
            self._side = side
            self._trainer.ready(deadline_s=_DEADLINE_S)
        return self._trainer

    def end_trainer(self) -> None:
        """End the trainer that runs, if there is one."""
        if self._trainer is not None:
            self._trainer.__exit__(None, None, None)
        self._trainer, self._side = None, ""

    def update(self, trainer: Child, number: int, step: str = "", victim: int = 0) -> str:
        """Update; returns what came of it: empty if it went well."""
        self.version += 1
        within_s = self.took_s.get(self._side, {}).get(step, 0.0)
        trainer.tell(
            "update",
            number=number,
            version=self.version,
            step=step,
            behind_s=self.random.uniform(0, within_s),
            victim=victim,
        )
        try:
            self._took_s = trainer.answer(deadline_s=_DEADLINE_S)
        except ChildDied:
            return "killed"
        except ChildError as error:
            return f"{error.kind}: {error.message}"[:300]
        except DeadlineExceeded:
            return f"no answer within {_DEADLINE_S:.0f} s"
        return ""

    def weights(self, before: int) -> str:
        """What the server's parameters are, after an update of those that it had before."""
        try:
            found = self.server.sums()
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return f"unknown ({type(error).__name__})"
        if found == self.sums[before]:
            return "old"
        return "new" if found == self.sums[1 - before] else "mixed"

    def requests(self) -> str:
        """Whether requests are answered, or wait for somebody who lets the server go on."""
        body = {"input_ids": [1, 5, 9], "sampling_params": {"max_new_tokens": 2}}
        try:
            reply = self.server.call("generate", json=body, timeout=_ANSWER_S)
        except httpx.HTTPError:
            return "wait"
        return "answered" if reply.is_success else "wait"

    def goes_on(self, before: int) -> dict[str, str]:
        """What the server answers when it is told to go on, and which version it says it has."""
        try:
            self.server.call("continue_generation", json={}).raise_for_status()
            found, label = self.server.answers(), self.server.label()
        except (httpx.HTTPError, AssertionError) as error:
            return {"answers": f"unknown ({type(error).__name__})", "label": "unknown"}
        known = {before: "old", 1 - before: "new"}
        answers = [known[number] for number in (0, 1) if found == self.fresh[number]]
        labels = {str(self.version - 1): "old", str(self.version): "new"}
        return {"answers": answers[0] if answers else "neither", "label": labels.get(label, label)}

    def kill_trainer(self, side: str, step: str) -> dict[str, Any]:
        """One round: the trainer dies at a step, and the next one updates."""
        before = self.holds
        said = self.update(self.running(side), 1 - before, step)
        self.end_trainer()
        row = {"side": side, "killed": "trainer", "step": step, "trainer": said}
        row |= {"weights": self.weights(before), "requests": self.requests()}
        return row | self.goes_on(before) | self.following(side, 1 - before)

    def kill_server(self, side: str, step: str) -> dict[str, Any]:
        """One round: the server dies at a step, is started anew, and the next trainer updates."""
        began = time.monotonic()
        victim = self.server.process.pid
        said = self.update(self.running(side), 1 - self.holds, step, victim)
        told_s = round(time.monotonic() - began, 2)
        self.end_trainer()
        self.restart()
        row = {"side": side, "killed": "server", "step": step, "trainer": said, "told_s": told_s}
        row |= {"weights": self.weights(0), "requests": self.requests()}
        return row | self.following(side, 1)

    def following(self, side: str, number: int) -> dict[str, str]:
        """The next trainer's update; a server that does not take it is replaced."""
        try:
            said = self.update(self.running(side), number)
        except (ChildDied, ChildError, DeadlineExceeded) as error:
            said = f"{type(error).__name__}: {error}"[:300]
        if not said and self.weights(1 - number) == "new" and self.requests() == "answered":
            self.holds = number
            return {"next": "lands", "why": said}
        self.end_trainer()
        self.restart()
        return {"next": "lost", "why": said}


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts for each side, each victim and each step."""
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        counts = found.setdefault((row["killed"], row["side"], row["step"]), Counter())
        counts.update(["rounds", row["weights"].split()[0], row["requests"], row["next"]])
        told = {row.get("answers"), row.get("label")}
        counts["neither"] += "neither" in told
        counts["mislabelled"] += told in ({"old", "new"}, {"neither", "old"}, {"neither", "new"})
    return [
        {"killed": killed, "side": side, "step": step, **+counts}
        for (killed, side, step), counts in found.items()
    ]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="For each step of a trainer.")] = 10,
    starts: Annotated[int, typer.Option(min=0, help="For each step of a server.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the moments within the steps.")] = 1,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the rows go.")] = _OUT,
) -> None:
    """Kill, look, and write what came of it."""
    console = Console()
    sglang_cpu.set_up()
    began = dt.datetime.now(dt.UTC)
    plan = [
        ("kill_trainer", side, step)
        for _ in range(rounds)
        for side, steps in STEPS.items()  # in turn
        for step in steps
    ] + [
        ("kill_server", side, step)
        for _ in range(starts)
        for side, steps in _ENGINE_STEPS.items()
        for step in steps
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), seed)
        try:
            for kill, side, step in track(plan, "kills", console=console):
                rows.append(getattr(bench, kill)(side, step))
        finally:
            bench.stop()
    summary = _summary(rows)
    document = {
        "format": 1,
        "timestamp": began.isoformat(timespec="seconds"),
        "environment": collect_environment()
        | {"sglang": importlib.metadata.version("sglang"), "model": str(_KIND)},
        "seed": seed,
        "took_s": bench.took_s,
        "summary": summary,
        "rows": rows,
    }
    save(document, out)
    names = ("rounds", "old", "new", "mixed", "neither", "mislabelled", "wait", "lands")
    table = Table("killed", "side", "step", *names)
    for one in summary:
        table.add_row(one["killed"], one["side"], one["step"], *(str(one.get(n, 0)) for n in names))
    console.print(table)
    console.print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
