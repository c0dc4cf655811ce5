"""Runs scripts one after another, each as a program of its own, without the seconds of imports.

`ScriptRunner` starts this file as a program. It imports what every script begins with, and forks a
process for each; what a script imports, warns of, changes or leaves behind ends with its process.
"""

import os
import runpy
import select
import signal
import sys
import warnings
from pathlib import Path
from typing import Self

from tests.forking_program import START_S, Program, serve, settle_in

__all__ = ["ScriptRunner"]

ROOT = Path(__file__).resolve().parents[1]
# Of the longest, a conformance suite that starts processes, where the machine is busy.
TIMEOUT_S = 250.0
TIMED_OUT = -signal.SIGALRM


class ScriptRunner:
    """The program below, as its user sees it."""

    def __init__(self) -> None:
        self._program = Program(
            [sys.executable, "-W", "error", __file__],
            os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def run(self, script: Path, cwd: Path, chosen: str = "") -> None:
        """Run a script, or the chosen ones of a file of tests; it must succeed."""
        log = cwd / f"{script.stem}.log"
        within_s = TIMEOUT_S + START_S
        code = self._program.ask(
            within_s=within_s, script=str(script), cwd=str(cwd), log=str(log), chosen=chosen
        )
        assert code == 0, f"{script.name}: {code}\n{log.read_text('utf-8', 'replace')}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.close(within_s=TIMEOUT_S)


# ---- the other process --------------------------------------------------------------------------


def become(script: str, cwd: str, log: str, chosen: str) -> int:
    """Be the process of a script, as if Python had been started for it."""
    os.setsid()
    settle_in(cwd, log)
    sys.argv = [script]
    if Path(script).name.startswith("test_"):
        # A page may show a test: then that is what its reader would run.
        import pytest

        sys.warnoptions.clear()
        warnings.resetwarnings()
        sys.path[0] = cwd
        return int(pytest.main(["-q", "-k", chosen, script]))
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
    for name in rl_bridge.__all__:
        getattr(rl_bridge, name)  # which imports it, for the scripts
    serve(become, ended)


if __name__ == "__main__":
    main()
