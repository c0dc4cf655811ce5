"""An engine of this process whose scheduler is killed in the middle of an update."""

import importlib
import json
from pathlib import Path

import pytest

from rl_bridge import EngineLost, TornEngine
from tests.engines.models import Kind
from tests.sglang.bench import Engines, executor_for

DEADLINE_S = 60


@pytest.mark.timeout(400)  # the second one starts engines
@pytest.mark.parametrize("step", ["install", pytest.param("prepare", marks=pytest.mark.full)])
def test_it_is_a_typed_error_and_nothing_is_servable(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    # It would end this process within a second.
    watchdog = importlib.import_module("sglang.srt.utils.watchdog").SubprocessWatchdog
    monkeypatch.setattr(watchdog, "_check_processes", lambda _: False)
    bench = engines.bench(Kind("qwen2"))
    try:
        with executor_for(bench.engine, timeout_s=DEADLINE_S) as executor:
            bench.update(executor)
            planted = {"ask": "plant", "step": step, "fault": "dies", "rank": 0}
            bench.ask(json.dumps(planted), tmp_path)
            manifest = bench.trainer.publish(bench.next())
            with pytest.raises((EngineLost, TornEngine), match="fresh engine"):
                executor.update_weights(manifest)
            with pytest.raises((EngineLost, TornEngine)):
                executor.recover()
            if step == "install":
                with pytest.raises((EngineLost, TornEngine)):
                    executor.check_servable()
    finally:
        engines.close()
