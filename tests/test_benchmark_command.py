"""The smoke command of `benchmarks/`: one JSON row per mode, honest about what it cannot run."""

import csv
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from tests.cli_program import Said, run_as_process, said_by

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "benchmark_weight_sync_bridge.py"
FIELDS = {
    "timestamp",
    "mode",
    "status",
    "environment",
    "tensor_count",
    "total_nbytes",
    "publish_ms",
    "import_ms",
    "ack_ms",
    "release_ms",
    "active_weight_version",
    "notes",
}
TIMES = ("publish_ms", "import_ms", "ack_ms", "release_ms")
CPU_MODES = ("local", "shared-memory", "rollout-update")
GPU_MODES = (
    "cuda-ipc",
    "cuda-vmm",
    "cuda-vmm-rollout-update",
    "vllm-cuda-ipc-hot-update",
    "vllm-cuda-vmm-external-storage",
)
MODES = (*CPU_MODES, *GPU_MODES, "runtime-blockers")


# Wide enough that no message is broken.
PLAIN = {"COLUMNS": "400", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def benchmarks_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield


def run_command(*arguments: str) -> Said:
    """Run the command in this process: the same, without the seconds that torch's import takes."""
    command = importlib.import_module(SCRIPT.stem)
    with (
        mock.patch.dict(os.environ, PLAIN),
        mock.patch.object(sys, "argv", [str(SCRIPT), *arguments]),
    ):
        return said_by(lambda: typer.run(command.main))


def run_program(*arguments: str) -> Said:
    """Run the command the way users do: as a process of its own."""
    return run_as_process(str(SCRIPT), *arguments, environment=PLAIN)


def last_row(said: Said) -> dict[str, Any]:
    assert said.code == 0, said.err
    line = said.out.splitlines()[-1]
    row: dict[str, Any] = json.loads(line)
    assert json.dumps(row, sort_keys=True) == line, "the keys are not sorted"
    return row


def smoke(mode: str, *more: str) -> dict[str, Any]:
    return last_row(run_command("--smoke", "--mode", mode, *more))


@pytest.mark.parametrize("mode", CPU_MODES)
def test_a_mode_that_needs_no_gpu_passes_with_every_field_filled(mode: str) -> None:
    # The fullest of them as a process of its own, to see that the file is a program.
    run = run_program if mode == "rollout-update" else run_command
    row = last_row(run("--smoke", "--mode", mode, "--weight-version", "7"))
    assert set(row) == FIELDS
    assert row["mode"] == mode
    assert row["status"] == "pass"
    assert row["active_weight_version"] == 7
    assert row["tensor_count"] > 1
    assert row["total_nbytes"] > row["tensor_count"]
    assert all(row[phase] > 0 for phase in TIMES)
    assert row["environment"]["versions"]["torch"]


@pytest.mark.parametrize("mode", GPU_MODES)
def test_a_mode_of_a_later_release_is_blocked_with_its_cause(mode: str) -> None:
    row = smoke(mode)
    assert set(row) == FIELDS
    assert row["mode"] == mode
    assert row["status"] == "blocked"
    assert any(word in row["notes"] for word in ("libcuda", "CUDA", "device", "release"))
    assert ("VLLMEngineAdapter" in row["notes"]) == mode.startswith("vllm")
    # Nothing that could be installed would help this release to run it.
    assert "pip install" not in row["notes"]
    assert row["active_weight_version"] is None
    assert all(row[phase] is None for phase in TIMES)


def test_runtime_blockers_names_every_other_mode() -> None:
    row = smoke("runtime-blockers")
    assert set(row) == FIELDS
    assert row["status"] == "blocked"
    for mode in (*CPU_MODES, *GPU_MODES):
        assert f"{mode}: " in row["notes"]
    assert "shared-memory: nothing is missing" in row["notes"]


def test_rows_are_appended_to_the_csv_file_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = smoke("local", "--output", str(path))
    smoke("cuda-ipc", "--output", str(path))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["local", "cuda-ipc"]
    assert [row["status"] for row in rows] == ["pass", "blocked"]
    assert set(rows[0]) == FIELDS
    assert int(rows[0]["total_nbytes"]) == first["total_nbytes"]
    assert json.loads(rows[0]["environment"]) == first["environment"]


def test_a_checkpoint_can_be_moved_instead_of_made_up_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    row = smoke("local", "--model", str(tmp_path))
    assert (row["status"], row["tensor_count"], row["total_nbytes"]) == ("pass", 1, 64)


@pytest.mark.parametrize("text", [None, b"no such thing"], ids=["missing", "damaged"])
def test_a_checkpoint_that_cannot_be_read_is_a_usage_error(
    text: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    if text is not None:
        path.write_bytes(text)
    said = run_command("--smoke", "--mode", "local", "--model", str(path if text else tmp_path))
    assert said.code == 2
    assert "Traceback" not in said.err
    assert ".safetensors" in said.err


def test_an_unknown_mode_is_refused_with_the_list() -> None:
    said = run_command("--smoke", "--mode", "telepathy")
    assert said.code == 2
    assert all(word in said.err for word in ("telepathy", *MODES))


# ---- `make bench`: what it needs -----------------------------------------------------------------


def test_the_bench_leaves_out_the_flip_that_does_not_fit_and_names_it() -> None:
    plans, memory = (importlib.import_module(f"_lib.{name}") for name in ("plan", "memory"))
    full = plans.make_plan(quick=False)
    kept, left_out = plans.fit(full, 14 * memory.GIB)
    assert [group.name for group in left_out] == ["flip_4gib"]
    assert [*kept.groups(), *left_out] == full.groups()


def test_the_bench_starts_nothing_where_it_would_be_killed_for_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = importlib.import_module("core")
    monkeypatch.setattr(core, "available_nbytes", lambda: 3 << 30)
    monkeypatch.setattr(core, "_run", lambda *_: pytest.fail("it was started"))
    out = tmp_path / "core.json"
    monkeypatch.setattr(sys, "argv", ["core.py", "--quick", "--out", str(out)])
    said = said_by(lambda: typer.run(core.main))
    assert said.code == 1
    assert "needs about 4.0 GiB of memory, 3.0 GiB are available" in " ".join(said.err.split())
    assert not out.exists()
