"""Side-cars without the seconds of their imports: a program that has them already, and forks.

Each is a process with a log, a working directory and a command line of its own, and runs
`python -m rl_bridge` from its first line on.
"""

import faulthandler
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Warm"]

START_S = 180.0
END_S = 60.0


class Warm:
    """The program below, as its user sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._receive()

    def start(self, arguments: Sequence[str], *, cwd: Path, log: Path) -> int:
        """Start one; returns its process id."""
        assert self._process.stdin is not None
        message = {"arguments": list(arguments), "cwd": str(cwd), "log": str(log)}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        pid: int = self._receive()
        return pid

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        assert ready, f"no answer within {START_S} s"
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it; the side-cars go on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.stdout.close()


# ---- the other process --------------------------------------------------------------------------


def answer(message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def become(arguments: list[str], cwd: str, log: str) -> None:
    """Be a process of the program, as if Python had been started for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(cwd)
    with open(os.devnull, "rb") as nothing, open(log, "ab") as file:  # noqa: PTH123 - descriptors
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    sys.argv = ["rl_bridge", *arguments]
    sys.path[0] = cwd
    runpy.run_module("rl_bridge", run_name="__main__", alter_sys=True)


def main() -> None:
    import fastapi  # noqa: F401 - for the side-cars
    import uvicorn  # noqa: F401 - for the side-cars

    import rl_bridge.cli  # noqa: F401 - for the side-cars
    import tests.helpers  # noqa: F401 - for the side-cars

    # Nobody here asks how they end: whoever started one sees that it did.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    answer("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(**json.loads(line))
            return
        answer(pid)


if __name__ == "__main__":
    main()
