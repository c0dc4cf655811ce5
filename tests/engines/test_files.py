"""Versions in files: a vLLM engine's ranks read them, and vLLM loads one as a model."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from rl_bridge import RolloutExecutor
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.cli.program import app
from rl_bridge.vllm import VLLMEngineAdapter
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints, Kind
from tests.groups.meshes import flat_cut
from tests.groups.rig import trainers

SETTING = Setting(Kind("qwen3"))
pytestmark = pytest.mark.timeout(600)  # engines start


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_that_starts_when_the_trainer_is_gone_answers_as_one_that_loaded_the_version(
    checkpoints: Checkpoints, tmp_path: Path, num_ranks: int
) -> None:
    run, folder = tmp_path / "run", tmp_path / "whole"
    old, new = (checkpoints.path(SETTING.kind, version) for version in (0, 1))
    weights = load_file(f"{new}/model.safetensors")
    if num_ranks == 1:
        with FilesTensorBridge(url=run, config_dir=new) as trainer:
            trainer.publish(weights, weight_version=7)
        (folder,) = run.glob("0000000007-*")
    else:
        with trainers(num_ranks, "files", url=run, config_dir=new) as group:
            group.publish(flat_cut(weights, num_ranks), version=7)
        assert not list(run.glob("*/config.json"))  # no part is a model
        said = CliRunner().invoke(app, ["export", str(run), str(folder)])
        assert said.exit_code == 0, said.output
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
