"""What staging is said to take is what it takes."""

from pathlib import Path

import pytest

from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.errors import IncompatibleUpdate
from tests.engines import models
from tests.engines.drive import Setting, model_of, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer
from tests.peaks import peak_nbytes

# Tables, masks and products of canaries: no tensor of the model is among them.
SLACK = 0.1


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
        said = installer._staging_nbytes(installer._plan_of(manifest, is_here=True))
        peak = peak_nbytes(lambda: installer.prepare(manifest, weights))
        staged = installer._staged
        assert staged is not None
        peak += sum(memory.nbytes for memory in staged.memory.values())  # which is not torch's
        assert peak <= said * (1 + SLACK)
        # Both keep their weight, and have a pack beside it, which oneDNN takes past torch.
        beside = [weights[name].nbytes for name in ("model.embed_tokens.weight", "lm_head.weight")]
        assert said >= manifest.total_nbytes + sum(beside)
        assert said <= peak * 1.5, "it refuses what would fit"
        installer.abandon()


@pytest.mark.timeout(120)
def test_the_first_update_of_a_large_vocabulary_takes_no_more_than_the_next(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models._SHAPE, "vocab_size", 151_936)
    kind, checkpoints = Kind(tied=True, dtype="bfloat16"), Checkpoints(tmp_path)
    weights = checkpoints.weights(kind, 1)
    with start(Setting(kind), checkpoints.path(kind, 0)) as llm:
        model, config = model_of(llm), llm.llm_engine.vllm_config
        manifest = trainer.publish(weights)
        small = VLLMModelInstaller(model, config, memory_budget_nbytes=manifest.total_nbytes)

        def refused() -> None:
            with pytest.raises(IncompatibleUpdate, match=r"staging it .* takes \d+ bytes more"):
                small.prepare(manifest, weights)

        assert peak_nbytes(refused) < manifest.total_nbytes * SLACK
        learner = VLLMModelInstaller(model, config)
        said = learner._staging_nbytes(learner._plan_of(manifest, is_here=True))
        # What staging takes is enough for all: nobody is refused because of learning.
        exact = VLLMModelInstaller(model, config, memory_budget_nbytes=said)
        assert peak_nbytes(lambda: exact._plan_of(manifest, is_here=True)) <= said * (1 + SLACK)
        exact.prepare(manifest, weights)
        exact.abandon()
