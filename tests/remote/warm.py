"""Side-cars without the seconds of their imports: a program that has them already, and forks.

Each is a process with a log, a working directory and a command line of its own, and runs
`python -m rl_bridge` from its first line on.
"""

import faulthandler
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forking_program import Program, serve, settle_in

__all__ = ["Warm"]

END_S = 60.0


class Warm:
    """The program below, as its user sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._program = Program([sys.executable, __file__], environment)

    def start(self, arguments: Sequence[str], *, cwd: Path, log: Path) -> int:
        """Start one; returns its process id."""
        pid: int = self._program.ask(arguments=list(arguments), cwd=str(cwd), log=str(log))
        return pid

    def close(self) -> None:
        """End it; the side-cars go on."""
        self._program.close(within_s=END_S)


# ---- the other process --------------------------------------------------------------------------


def become(arguments: list[str], cwd: str, log: str) -> int:
    """Be a process of the program, as if Python had been started for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    settle_in(cwd, log)
    faulthandler.enable()
    sys.argv = ["rl_bridge", *arguments]
    sys.path[0] = cwd
    runpy.run_module("rl_bridge", run_name="__main__", alter_sys=True)
    return 0


def main() -> None:
    import anyio  # noqa: F401 - for the side-cars
    import fastapi  # noqa: F401 - for the side-cars
    import h11  # noqa: F401 - for the side-cars

    import rl_bridge.cli.sidecar  # noqa: F401 - for the side-cars
    import tests.helpers  # noqa: F401 - for the side-cars

    # Nobody here asks how they end: whoever started one sees that it did.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve(become, lambda pid: pid)


if __name__ == "__main__":
    main()
