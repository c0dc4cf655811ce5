"""Where no C compiler was at hand, the same promises hold: the suites over the Python pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

# By name: importing it would hide the compiled module from this very process.
RUNNER = "tests.pure_python"
ROOT = Path(__file__).resolve().parents[1]
SUITES = (
    "tests/transports/test_shared_memory.py",
    "tests/transports/test_local_clone.py",
    "tests/installers",
)
# Left out: who dies when, what stays behind after fifty rounds, and which handle is refused. That
# does not depend on who reads the bytes, and takes most of the suites' time.
LEFT_OUT = "fifty or killed or dead or hostile"
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


def test_transports_and_installers_keep_their_promises_without_the_compiled_module() -> None:
    done = run("-k", f"not ({LEFT_OUT})", *SUITES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"([0-9]+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 300


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
