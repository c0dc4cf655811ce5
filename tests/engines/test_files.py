"""Versions in files: a vLLM engine's ranks read them, and vLLM loads one as a model."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.vllm import VLLMEngineAdapter
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints, Kind

SETTING = Setting(Kind("qwen3"))
pytestmark = pytest.mark.timeout(600)  # engines start


def test_an_engine_that_starts_when_the_trainer_is_gone_answers_as_one_that_loaded_the_version(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    old, new = (checkpoints.path(SETTING.kind, version) for version in (0, 1))
    with FilesTensorBridge(url=run, config_dir=new) as trainer:
        trainer.publish(load_file(f"{new}/model.safetensors"), weight_version=7)
    (folder,) = run.glob("0000000007-*")
    with start(SETTING, str(folder)) as llm:  # as a checkpoint
        due = answers(llm)
    with (
        start(SETTING, old) as llm,
        FilesTensorBridge(url=run, source_worker="vllm") as bridge,
        RolloutExecutor(
            weight_bridge=bridge,
            weight_install_adapter=VLLMEngineAdapter(llm, transports={"files": {"url": str(run)}}),
        ) as executor,
    ):
        assert answers(llm) != due
        executor.update_weights(bridge.newest() or "")
        assert answers(llm) == due
        ack = executor.last_ack
        assert ack is not None
        assert ack.weight_version == 7
        assert ack.proof.method.startswith("digest")
