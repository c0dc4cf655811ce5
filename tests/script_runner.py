"""Runs scripts one after another, each as a program of its own, without the seconds of imports.

`ScriptRunner` starts this file as a program. It imports what every script begins with, and forks a
process for each; what a script imports, warns of, changes or leaves behind ends with its process.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["ScriptRunner"]

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0
# Of the longest, a conformance suite that starts processes, where the machine is busy.
TIMEOUT_S = 250.0
TIMED_OUT = -signal.SIGALRM


class ScriptRunner:
    """The program below, as its user sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._receive(START_S) == "ready"

    def run(self, script: Path, cwd: Path) -> None:
        """Run a script, or a file of tests; it must succeed."""
        said = cwd / f"{script.stem}.said"
        assert self._process.stdin is not None
        message = {"script": str(script), "cwd": str(cwd), "said": str(said)}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        code = self._receive(TIMEOUT_S + START_S)
        assert code == 0, f"{script.name}: {code}\n{said.read_text('utf-8', 'replace')}"

    def _receive(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"no answer within {timeout_s} s"
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.stdout.close()


# ---- the other process --------------------------------------------------------------------------


def answer(message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def become(script: str, cwd: str, said: str) -> int:
    """Be the process of a script, as if Python had been started for it."""
    os.setsid()
    os.chdir(cwd)
    with open(os.devnull, "rb") as nothing, open(said, "wb") as file:  # noqa: PTH123 - descriptors
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [script]
    if Path(script).name.startswith("test_"):
        # A page may show a test: then that is what its reader would run.
        import pytest

        sys.warnoptions.clear()
        warnings.resetwarnings()
        sys.path[0] = cwd
        return int(pytest.main(["-q", script]))
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    return 0


def ended(pid: int) -> int:
    """The exit code of a process, which is killed with its children where it does not end."""
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
    finally:
        os.close(descriptor)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if ready else TIMED_OUT


def main() -> None:
    # What the first optimizer of a process imports; it takes as long as torch itself.
    import torch._dynamo  # noqa: F401 - for the scripts

    import rl_bridge

    assert Path(rl_bridge.__file__).is_relative_to(ROOT)
    answer("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # Leaves as every program does, by the end of this one.
            sys.exit(become(**json.loads(line)))
        answer(ended(pid))


if __name__ == "__main__":
    main()
