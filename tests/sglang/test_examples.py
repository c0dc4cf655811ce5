"""The program that the documentation shows for SGLang runs as it stands."""

import subprocess
import sys
from pathlib import Path

from tests.engines.models import Checkpoints, Kind

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sglang_engines" / "one_engine.py"


def test_the_example_of_the_documentation_runs(checkpoints: Checkpoints) -> None:
    path = checkpoints.path(Kind("qwen2", tied=True), 0)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), path],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\n3 [" in done.stdout, done.stdout[-2000:]
