"""The GPU's benchmarks say why they cannot measure, and run through where they are asked to."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.cuda.devices import cuda_cause

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ["gpu_digest.py", "gpu_updates.py"]
LANES = {"sum", "pack", "pack_2_bytes_off", "pack_float32_to_bfloat16", "digest", "digest_in_torch"}


def run(script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("script", [SCRIPTS[0], pytest.param(SCRIPTS[1], marks=pytest.mark.full)])
def test_without_a_gpu_it_says_blocked_and_the_cause(script: str, tmp_path: Path) -> None:
    if cuda_cause() is None:
        pytest.skip("a GPU is here")
    row = run(script, "--gigabytes", "14", "--out", str(tmp_path / "out.json"))
    assert row["status"] == "blocked"
    assert row["notes"] == cuda_cause()
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_dry_run_goes_through_every_lane_and_writes_nothing(tmp_path: Path) -> None:
    row = run("gpu_digest.py", "--dry-run", "--rounds", "1", "--out", str(tmp_path / "out.json"))
    assert row["status"] == "dry-run"
    assert [one["tensors"] for one in row["ratios"]] == [300, 20_000]
    for one in row["ratios"]:
        assert {f"{name}_vs_copy" for name in LANES} <= one.keys()
        assert set(one["aims_met"]) == {"digest_tb_per_s", "digest_vs_copy", "pack_vs_copy"}
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_dry_run_updates_undoes_and_goes_every_peers_way_and_writes_nothing(
    tmp_path: Path,
) -> None:
    row = run("gpu_updates.py", "--dry-run", "--rounds", "1", "--out", str(tmp_path / "out.json"))
    assert row["status"] == "dry-run"
    assert list(row["exchange_ms_by_handles"]) == ["1", "16", "256", "64"]
    assert [one["tensors"] for one in row["ratios"]] == [30, 200]
    for one in row["ratios"]:
        assert set(one["handoff_s"]) == {"flip", "copy", "tensors", "buckets", "host"}
        assert None not in one["handoff_s"].values()
        assert {"flip_ms", "copy_install_ms", "verify_ms", "undo_of_flip_ms"} <= one.keys()
        assert set(one["aims_met"]) == {"publish_vs_copy", "flip_ms"}
    assert not list(tmp_path.iterdir())
