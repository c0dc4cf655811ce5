"""Engines for side-cars of these tests: `rl-bridge sidecar tests.engines.sidecars:NAME`.

The server's URL is in a file of the side-car's working directory.
"""

import os
import signal
from pathlib import Path
from typing import Any

from rl_bridge import make_weight_bridge
from rl_bridge.engines import EngineDriver
from rl_bridge.remote import TwoPhaseExecutor
from rl_bridge.vllm import VLLMEngineAdapter

DEATH = Path("die-here")
"""Where it names a step, that step is the side-car's last."""
URL = Path("engine-url")


def dying_executor(driver: EngineDriver) -> TwoPhaseExecutor:
    """An executor that is killed right behind the step that the file names."""
    for step in ("prepare", "install", "resume", "commit"):
        vars(driver)[step] = _dying(getattr(driver, step), step)
    return TwoPhaseExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="sidecar"),
        weight_install_adapter=driver,
        suspicious="off",
    )


def _dying(action: Any, step: str) -> Any:
    def acts(*given: Any) -> Any:
        done = action(*given)
        if DEATH.exists() and DEATH.read_text() == step:
            DEATH.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return acts


def dying() -> TwoPhaseExecutor:
    """A vLLM server's."""
    return dying_executor(VLLMEngineAdapter(URL.read_text(), take_over=True))
