"""Versions in files, beside the packages that load them: a whole one is a model, a part is none."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from rl_bridge import make_weight_bridge
from rl_bridge.cli.program import app
from rl_bridge.errors import WeightBridgeUnavailableError
from tests.groups.meshes import flat_cut
from tests.groups.rig import trainers

CONFIG = Qwen2Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    made: torch.nn.Module = AutoModelForCausalLM.from_config(CONFIG)
    return made


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "config")
    return tmp_path / "config"


def assert_loads(folder: Path, model: torch.nn.Module) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(found[name].equal(one) for name, one in model.state_dict().items())


def test_a_whole_version_is_a_model(
    model: torch.nn.Module, config_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with make_weight_bridge("files", url=run, config_dir=config_dir) as trainer:
        trainer.publish(model, weight_version=1)
    (folder,) = run.glob("0*")
    assert_loads(folder, model)


def test_the_hub_is_refused_as_it_has_no_conditional_writes(model: torch.nn.Module) -> None:
    with (
        make_weight_bridge("files", url="hf://datasets/nobody/nothing") as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="HfFileSystem of fsspec, which looks"),
    ):
        trainer.publish(model, weight_version=1)


def test_a_rank_s_part_is_no_model_and_export_makes_one_of_all_parts(
    model: torch.nn.Module, config_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with trainers(2, "files", url=run, config_dir=config_dir) as group:
        group.publish(flat_cut(model.state_dict(), 2), version=1)
    parts = sorted(run.glob("0*"))
    assert len(parts) == 2
    for folder in parts:
        with pytest.raises(ValueError, match=r"config\.json"):
            AutoModelForCausalLM.from_pretrained(folder)
        # Not even with the configuration given.
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(folder, config=CONFIG)
    said = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "whole")])
    assert said.exit_code == 0, said.output
    assert_loads(tmp_path / "whole", model)
