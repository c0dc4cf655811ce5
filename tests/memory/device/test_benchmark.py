"""`benchmarks/gpu_digest.py` says why it cannot measure, and runs through where it is asked to."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.transports.cuda import cuda_cause

ROOT = Path(__file__).resolve().parents[3]
LANES = {"sum", "pack", "pack_2_bytes_off", "pack_float32_to_bfloat16", "digest", "digest_in_torch"}


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_digest.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_without_a_gpu_it_says_blocked_and_the_cause(tmp_path: Path) -> None:
    if cuda_cause() is None:
        pytest.skip("a GPU is here")
    row = run("--out", str(tmp_path / "out.json"))
    assert row["status"] == "blocked"
    assert row["notes"] == cuda_cause()
    assert not list(tmp_path.iterdir())


def test_a_dry_run_goes_through_every_lane_and_writes_nothing(tmp_path: Path) -> None:
    row = run("--dry-run", "--rounds", "1", "--out", str(tmp_path / "out.json"))
    assert row["status"] == "dry-run"
    assert [one["tensors"] for one in row["ratios"]] == [300, 20_000]
    for one in row["ratios"]:
        assert {f"{name}_vs_copy" for name in LANES} <= one.keys()
        assert set(one["aims_met"]) == {"digest_tb_per_s", "digest_vs_copy", "pack_vs_copy"}
    assert not list(tmp_path.iterdir())
