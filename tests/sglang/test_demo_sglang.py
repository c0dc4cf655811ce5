"""The demo with a real SGLang engine: a short run with planted faults."""

import io
import json
import multiprocessing
from pathlib import Path

from rich.console import Console

from rl_bridge.demo import run_demo
from rl_bridge.demo.rollout import Engine
from rl_bridge.demo.trainer import Fault, logprob_tolerance

STEPS = 8
LOGPROB_TOLERANCE = logprob_tolerance(Engine.SGLANG)


def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    screen, before = io.StringIO(), set(multiprocessing.active_children())  # other tests' engine
    run_demo(engine="sglang", steps=STEPS, out=tmp_path, console=Console(file=screen, width=120))
    found = json.loads((tmp_path / "demo.json").read_text("utf-8"))
    assert found["engine_name"].startswith("SGLang 0.")
    assert (found["refused"], found["undone"], found["num_processes"]) == (2, 1, 2)
    assert found["versions_installed"] == STEPS - 2
    assert found["reward_last"] > found["reward_first"]
    assert found["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE
    assert found["logprob_min_diff_if_stale"] > 100 * LOGPROB_TOLERANCE
    # 64 prompts with 8 answers each step, and 8 prompts behind each of the three faults.
    assert found["labels_checked"] == STEPS * 512 + 3 * 64
    faults = {fault["kind"]: fault for fault in found["faults"]}
    assert list(faults) == [fault.value for fault in Fault]
    half_way = faults[Fault.HALF_WAY]
    assert half_way["outcome"] == "undone"
    assert half_way["message"].startswith("EngineFault: the engine failed after 9 of 19 exchanges")
    for fault in faults.values():
        assert fault["active_version"] != fault["version"]
        assert fault["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE
    for words in (found["engine_name"], "REFUSED", "UNDONE", "outputs, each with the label"):
        assert words in screen.getvalue()
    assert "EngineFault" in (tmp_path / "sglang.log").read_text("utf-8")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert set(multiprocessing.active_children()) <= before
