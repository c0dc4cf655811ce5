"""The demo with trainer, side-car and vLLM server as processes of their own: a short run."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from rl_bridge.demo import run_demo
from rl_bridge.demo.rollout import Engine
from rl_bridge.demo.trainer import MIN_STEPS, Fault, logprob_tolerance

LOGPROB_TOLERANCE = logprob_tolerance(Engine.VLLM_HTTP)


def below(pid: int) -> set[str]:
    """The processes that any thread of this one started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {child for path in lists for child in path.read_text().split()}


@pytest.mark.timeout(420)
def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    screen, before = io.StringIO(), below(os.getpid())
    run_demo(
        engine="vllm-http", steps=MIN_STEPS, out=tmp_path, console=Console(file=screen, width=120)
    )
    assert below(os.getpid()) <= before
    found = json.loads((tmp_path / "demo.json").read_text("utf-8"))
    assert found["engine_name"].startswith("a server of vLLM 0.")
    assert (found["refused"], found["undone"], found["num_processes"]) == (2, 1, 4)
    assert found["versions_installed"] == MIN_STEPS - 2
    assert found["reward_last"] > found["reward_first"]
    assert found["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE
    assert found["logprob_min_diff_if_stale"] > 100 * LOGPROB_TOLERANCE
    # 64 prompts with 8 answers each step, and 8 prompts behind each of the three faults.
    assert found["labels_checked"] == MIN_STEPS * 512 + 3 * 64
    faults = {fault["kind"]: fault for fault in found["faults"]}
    assert {kind: fault["error"] for kind, fault in faults.items()} == {
        Fault.CORRUPTED: "ChecksumMismatch",
        Fault.STALE: "StaleUpdate",
        Fault.HALF_WAY: "WeightUpdateRejectedError",
    }
    assert faults[Fault.HALF_WAY]["message"].startswith(
        "EngineFault: the engine failed after 10 of "
    )
    for fault in faults.values():
        assert fault["active_version"] != fault["version"]
        assert fault["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE
    for words in ("a server of vLLM", "REFUSED", "UNDONE"):
        assert words in screen.getvalue()
    log = (tmp_path / "vllm-http.log").read_text("utf-8")
    assert "EngineFault" in log
    assert "could not commit update" in log  # the side-car's own line
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
