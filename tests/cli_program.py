"""Runs the command line program for tests: as a process of its own, or, faster, in this one."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rl_bridge.cli.program import main

TIMEOUT_S = 240
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Said:
    """What a run of the program left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, which must be one line of canonical JSON and nothing else."""
        value = json.loads(self.out)
        assert self.out == json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"
        return value

    def complains(self, error: str) -> bool:
        """Whether it failed with one message that names the error, and no traceback."""
        return (
            self.code == 1
            and self.err.startswith(f"error: {error}: ")
            and self.err.count("\n") == 1
            and "Traceback" not in self.err
        )


def run(*arguments: str | Path) -> Said:
    """Run the program the way users do: as a process of its own."""
    return run_as_process("-m", "rl_bridge", *map(str, arguments), environment=PLAIN)


def run_as_process(*arguments: str, environment: Mapping[str, str]) -> Said:
    """Run Python with these arguments."""
    kept = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "GITHUB_ACTIONS"}}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**kept, **environment},
    )
    return Said(done.returncode, done.stdout, done.stderr)


def call(*arguments: str | Path, text: str = "", columns: int = 100) -> Said:
    """Run the program in this process: the same, without the seconds that torch's import takes."""
    with (
        mock.patch.dict(os.environ, PLAIN | {"COLUMNS": str(columns)}),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()))),
    ):
        return said_by(lambda: main([str(argument) for argument in arguments]))


def said_by(command: Callable[[], object]) -> Said:
    """What a command of this process says until it exits."""
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as left,
    ):
        command()
    return Said(int(left.value.code or 0), out.getvalue(), err.getvalue())
