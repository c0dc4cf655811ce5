"""The demo with a real SGLang engine: a short run with planted faults."""

from pathlib import Path

from rl_bridge.demo.rollout import Engine
from tests.engines.demo_run import run_shortly


def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    run_shortly(
        Engine.SGLANG, tmp_path, product="SGLang 0.", processes=2, fails="after 9 of 19 exchanges"
    )
