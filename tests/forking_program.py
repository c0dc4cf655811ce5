"""A program that has its imports already, and forks a process for each thing that it is to run.

`Program` is its user's side. `serve` is what the program does, and `settle_in` what each process
does first, to be as if Python had been started for it.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["START_S", "Program", "serve", "settle_in"]

START_S = 180.0


class Program:
    """The program, as its user sees it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._receive(START_S) == "ready"

    def ask(self, *, within_s: float = START_S, **arguments: str | Sequence[str]) -> Any:
        """Have it fork a process with these arguments; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        return self._receive(within_s)

    def _receive(self, within_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], within_s)
        assert ready, f"no answer within {within_s} s"
        return json.loads(self._process.stdout.readline())

    def close(self, *, within_s: float) -> None:
        """End it; a process that it forked goes on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(within_s)
        finally:
            self._process.kill()
            self._process.stdout.close()


def serve(become: Callable[..., int], told: Callable[[int], object]) -> None:
    """Run `become` in a process for each line that comes, and answer what `told` says of it."""
    _answer("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # Leaves as every program does, by the end of this one.
            sys.exit(become(**json.loads(line)))
        _answer(told(pid))


def _answer(message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def settle_in(cwd: str, log: str) -> None:
    """Have a directory and an output of its own, and no input."""
    os.chdir(cwd)
    with open(os.devnull, "rb") as nothing, open(log, "ab") as file:  # noqa: PTH123 - descriptors
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
