"""Where no C compiler was at hand, the same promises hold: the suites over the Python pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# By name: importing it would hide the compiled module from this very process.
RUNNER = "tests.pure_python"
ROOT = Path(__file__).resolve().parents[1]
# Left out: who dies when, what stays behind after fifty rounds, and which handle is refused. That
# does not depend on who reads the bytes, and takes most of the suites' time.
LEFT_OUT = "not (fifty or killed or dead or hostile)"
TRANSPORTS = ("tests/transports/test_shared_memory.py", "tests/transports/test_local_clone.py")
MODULE = "tests/installers/test_module.py"
TIMEOUT_S = 240.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest without the compiled module."""
    return subprocess.run(
        [sys.executable, "-m", RUNNER, "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("chosen", "suites", "num"),
    [
        ("arrive and TestSealedMemory or byte_differs and TestCopy", (TRANSPORTS[0], MODULE), 5),
        pytest.param(LEFT_OUT, (*TRANSPORTS, "tests/installers"), 300, marks=pytest.mark.full),
    ],
    ids=["bytes", "whole suites"],
)
def test_transports_and_installers_keep_their_promises_without_the_compiled_module(
    chosen: str, suites: tuple[str, ...], num: int
) -> None:
    done = run("-k", chosen, *suites)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"([0-9]+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > num


def test_the_runner_notices_that_the_compiled_module_is_in_use() -> None:
    visible = f"import sys, {RUNNER} as runner; sys.meta_path.pop(0); runner.pytest_configure()"
    done = subprocess.run(
        [sys.executable, "-c", visible],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "the compiled module is in use: [None, " in done.stderr
    assert done.returncode
