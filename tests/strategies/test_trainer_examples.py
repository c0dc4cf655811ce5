"""The example with FSDP2, which needs nothing but torch, runs as its reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "trainers"


def run(name: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="broadcast"),
        pytest.param(("--colocated",), id="shared-memory", marks=pytest.mark.full),
    ],
)
def test_fsdp2_on_two_ranks_reaches_two_engines(arguments: tuple[str, ...], tmp_path: Path) -> None:
    said = run("fsdp2_to_two_engines.py", *arguments, cwd=tmp_path)
    assert "4 versions from 2 FSDP2 ranks in 2 engines, equal to the byte" in said
