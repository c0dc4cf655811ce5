"""A `World` in another environment: trainers and engines pin packages that exclude each other."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing import processes
from rl_bridge.testing.processes import DEADLINE_S, Child, Target
from tests.trainers_torch.worlds import World

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TRAINERS_PYTHON", str(ROOT / ".venv-trainers" / "bin" / "python"))
"""The interpreter of the environment that ``make test-trainers`` makes."""


class Elsewhere(Child):
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
        self._program = [python, "-m", __name__, imports]
        super().__init__(World, size=size, tmp_path=str(tmp_path), cases=cases)

    def _started(self, there: Connection, _: Target) -> Any:
        return _Program(
            [*self._program, str(there.fileno()), json.dumps(self.arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            pass_fds=[there.fileno()],
        )

    def ask(self, name: str, /, **options: Any) -> Any:
        """Call a method of the `World`, which may take minutes."""
        self.ready(deadline_s=4 * DEADLINE_S).tell(name, **options)
        return self.answer(deadline_s=4 * DEADLINE_S)

    def __exit__(self, kind: object = None, *_: object) -> None:
        if kind is None:
            self.ask("leave")
            assert self.stop() == 0
        else:
            with suppress(WeightBridgeError):
                self.ask("kill")
        super().__exit__()


class _Program(subprocess.Popen[bytes]):
    """Ended and waited for as a process of `multiprocessing` is."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    def close(self) -> None:
        """Nothing of it is left."""


if __name__ == "__main__":
    imports, number, arguments = sys.argv[1:]
    processes.PRELOADED.append(imports)
    processes.serve(Connection(int(number)), World, json.loads(arguments))
