"""A LoRA by files, by SkyRL's names: what its trainer writes and sends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict

from rl_bridge.compat.skyrl import (
    LoRAConfig,
    LoRADiskLoader,
    LoRADiskWriter,
    is_lora_disk_loading_request,
)
from rl_bridge.errors import IncompatibleUpdate, MalformedManifest
from rl_bridge.installers import ModuleInstallAdapter
from rl_bridge.trainers import StateDictExtractor, read_peft
from tests.trainers import peft_cases
from tests.trainers_torch.worlds import World


def config(folder: Path, rank: int = 2) -> LoRAConfig:
    return LoRAConfig(rank=rank, lora_sync_path=folder)


def test_each_version_has_a_directory_of_its_own_and_the_request_names_it(tmp_path: Path) -> None:
    model, writer = peft_cases.adapted(), LoRADiskWriter(config(tmp_path / "shared"))
    for version in (1, 2, 3):
        request = writer.write(model, weight_version=version)
        assert request is not None
        assert is_lora_disk_loading_request(request)
        assert request["names"] == ["lora_disk_load"]
        folder = Path(request["extras"][0]["lora_disk_path"])
        assert folder.parent == tmp_path / "shared"
        assert folder.name.startswith(f"policy-{version}-")
        spec, tensors = read_peft(folder, "policy")
        expected = get_peft_model_state_dict(model)
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].equal(one) for name, one in expected.items())
        assert spec.name == "policy"
    kept = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "shared").iterdir())
    assert kept == ["policy-2", "policy-3"]
    # A trainer that begins anew at an earlier step.
    assert LoRADiskWriter(config(tmp_path / "shared")).write(model, weight_version=2) is not None


def test_ranks_of_a_sharded_trainer_write_one_adapter_and_the_first_one_sends(
    worlds: Callable[[int, str], World], tmp_path: Path
) -> None:
    first, second = worlds(2, "peft_cases").run("written_for_skyrl", folder=str(tmp_path))
    assert second is None
    _, tensors = read_peft(first["extras"][0]["lora_disk_path"], "policy")
    expected = get_peft_model_state_dict(peft_cases.adapted())
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(one) for name, one in expected.items())


def test_what_is_no_adapter_or_of_another_rank_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model = peft_cases.adapted()
    with pytest.raises(IncompatibleUpdate, match=r"rank \[2\], and lora.rank is 4"):
        LoRADiskWriter(config(tmp_path, 4)).write(model, weight_version=1)
    base = StateDictExtractor(model, adapters="base")
    with pytest.raises(IncompatibleUpdate, match="expected an adapter"):
        LoRADiskWriter(config(tmp_path)).write(base, weight_version=1)
    assert not list(tmp_path.iterdir())


def test_without_a_rank_no_adapter_is_trained_and_other_requests_are_not_loaded() -> None:
    assert not LoRAConfig().is_lora
    assert LoRAConfig(rank=1).is_lora
    request = {"names": ["model.embed_tokens.weight"], "extras": [{}]}
    assert not is_lora_disk_loading_request(request)
    with (
        LoRADiskLoader(ModuleInstallAdapter(torch.nn.Linear(2, 2))) as loader,
        pytest.raises(MalformedManifest, match="weights' own loader"),
    ):
        loader.load(request)
