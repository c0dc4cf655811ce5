"""A short run of the demo with a real engine, which must keep every promise."""

import io
import json
import multiprocessing
from pathlib import Path

from rich.console import Console

from rl_bridge.demo import run_demo
from rl_bridge.demo.rollout import Engine
from rl_bridge.demo.trainer import MIN_STEPS, USUAL_FAULTS, Fault, logprob_tolerance


def run_shortly(
    engine: Engine,
    out: Path,
    *,
    product: str,
    processes: int,
    fails: str,
    steps: int = MIN_STEPS,
    lora: bool = False,
) -> None:
    """Run it with planted faults.

    Args:
        engine: which.
        out: where its files go.
        product: how the engine's name begins.
        processes: how many there are, the engine's own not counted.
        fails: what the install says that fails half-way.
        steps: of the trainer.
        lora: whether it trains an adapter.

    """
    screen, before = io.StringIO(), set(multiprocessing.active_children())  # other tests' engine
    console = Console(file=screen, width=120)
    run_demo(engine=engine, lora=lora, steps=steps, out=out, console=console)
    assert set(multiprocessing.active_children()) <= before
    found, tolerance = json.loads((out / "demo.json").read_text("utf-8")), logprob_tolerance(engine)
    assert found["engine"] == engine
    assert found["engine_name"].startswith(product)
    assert (found["refused"], found["undone"], found["num_processes"]) == (2, 1, processes)
    assert found["versions_installed"] == steps - 2
    assert found["reward_last"] > found["reward_first"]
    assert found["logprob_max_abs_diff"] <= tolerance
    assert found["logprob_min_diff_if_stale"] > 100 * tolerance
    # 64 prompts with 8 answers each step, and 8 prompts behind each of the three faults.
    assert found["labels_checked"] == steps * 512 + 3 * 64
    faults = {fault["kind"]: fault for fault in found["faults"]}
    assert list(faults) == [fault.value for fault in USUAL_FAULTS]
    assert faults[Fault.CORRUPTED]["error"] == "ChecksumMismatch"
    assert faults[Fault.STALE]["error"] == "StaleUpdate"
    assert faults[Fault.HALF_WAY]["outcome"] == "undone"
    assert f"EngineFault: the engine failed {fails}" in faults[Fault.HALF_WAY]["message"]
    for fault in faults.values():
        assert fault["active_version"] != fault["version"]
        assert fault["logprob_max_abs_diff"] <= tolerance
    for words in (found["engine_name"], "REFUSED", "UNDONE", "outputs, each with the label"):
        assert words in screen.getvalue()
    assert "install failed" not in screen.getvalue()  # the planted fault's traceback is the log's
    assert "EngineFault" in (out / f"{engine}.log").read_text("utf-8")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
