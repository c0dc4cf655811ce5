"""A `World` in another environment: trainers and engines pin packages that exclude each other."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing import processes
from rl_bridge.testing.processes import DEADLINE_S, ChildError, Line
from tests.trainers_torch.worlds import World

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TRAINERS_PYTHON", str(ROOT / ".venv-trainers" / "bin" / "python"))
"""The interpreter of the environment that ``make test-trainers`` makes."""


class Elsewhere:
    """Ranks that run the functions of a module under another interpreter; used as a `World`."""

    def __init__(self, size: int, tmp_path: Path, cases: str, python: str, imports: str) -> None:
        """Start it; ranks are started when they are first asked for.

        Args:
            size: how many ranks.
            tmp_path: where they meet.
            cases: module whose functions they run.
            python: the interpreter.
            imports: a module that takes seconds to import: it is imported once for all of them.

        """
        here, there = multiprocessing.Pipe()
        given = [str(there.fileno()), str(size), str(tmp_path), cases, imports]
        self._process = subprocess.Popen(
            [python, "-m", __name__, *given],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            pass_fds=[there.fileno()],
        )
        there.close()
        self._line = Line(here)

    def run(self, case: str, **options: Any) -> list[Any]:
        """What each rank answers."""
        return list(self._call("run", case=case, **options))

    def kill(self, rank: int | None = None) -> None:
        """See `World`."""
        self._call("kill", rank=rank)

    def pids(self) -> list[int]:
        """See `World`."""
        return list(self._call("pids"))

    def _call(self, name: str, /, **options: Any) -> Any:
        self._line.send([name, options])
        answer = self._line.receive(deadline_s=4 * DEADLINE_S)
        if "error" in answer:
            kind, message = answer["error"]
            raise ChildError(kind, (), message, "")
        return answer["ok"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._line.close()  # by which it ends
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert kind is not None or code == 0


def _main(number: str, size: str, tmp_path: str, cases: str, imports: str) -> None:
    processes.PRELOADED.append(imports)
    line = Line(Connection(int(number)))
    with World(int(size), Path(tmp_path), cases) as world:
        while True:
            try:
                name, options = line.receive(deadline_s=20 * DEADLINE_S)
            except EOFError:
                return
            try:
                answer = {"ok": getattr(world, name)(**options)}
            except WeightBridgeError as error:
                answer = {"error": [type(error).__name__, str(error)]}
            line.send(answer)


if __name__ == "__main__":
    _main(*sys.argv[1:])
