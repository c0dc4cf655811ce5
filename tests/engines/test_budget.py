"""What staging is said to take is what it takes."""

from collections.abc import Callable

import pytest
import torch

from rl_bridge.installers.vllm.model_installer import VLLMModelInstaller
from tests.engines.drive import Setting, model_of, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer

# Tables, masks and products of canaries: no tensor of the model is among them.
SLACK = 0.1


def peak_nbytes(action: Callable[[], None]) -> int:
    """The most that torch had allocated on the host at any time, beyond what there was."""
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        action()
    size = peak = 0
    for event in sorted(seen.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            size += event.nbytes()
            peak = max(peak, size)
    return peak


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_budget_of_packed_experts_counts_all_that_is_there_at_once(
    checkpoints: Checkpoints, trainer: Trainer, dtype: str
) -> None:
    kind = Kind("moe", dtype=dtype)
    weights = checkpoints.weights(kind, 1)
    with start(Setting(kind), checkpoints.path(kind, 0)) as llm:
        installer = VLLMModelInstaller(model_of(llm), llm.llm_engine.vllm_config)
        manifest = trainer.publish(weights)
        installer.prepare(manifest, weights)  # (learns the layout, which takes memory of its own)
        installer.abandon()
        installer._spares = type(installer._spares)()
        said = installer._spares.missing_nbytes(installer._plan(manifest))
        peak = peak_nbytes(lambda: installer.prepare(manifest, weights))
        assert peak <= said * (1 + SLACK)
        # Both keep their weight, and have a pack beside it, which oneDNN takes past torch.
        beside = [weights[name].nbytes for name in ("model.embed_tokens.weight", "lm_head.weight")]
        assert said >= manifest.total_nbytes + sum(beside)
        assert said <= peak * 1.5, "it refuses what would fit"
        installer.abandon()
