"""LoRA of peft's in Megatron-Core models: what ranks publish is what Hugging Face's model has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.processes import free_port
from rl_bridge.trainers import write_peft
from tests.trainers.megatron_lora_cases import in_hf
from tests.trainers.test_megatron import DEGREES, saved
from tests.trainers_torch.worlds import World, as_lists, assembled, placements_of

CASES = "megatron_lora_cases"
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
QKV = "base_model.model.decoder.layers.0.self_attention.linear_qkv"
Worlds = Callable[[int, str], World]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a checkpoint lies."""
    found: Path = tmp_path_factory.mktemp("models") / "qwen2"
    saved("Qwen2", found)
    return str(found)


def by_peft(path: str, targets: list[str], **options: Any) -> dict[str, Any]:
    """What peft would save of the adapter in Hugging Face's model."""
    state = get_peft_model_state_dict(in_hf(path, targets, **options), save_embedding_layers=False)
    return {name: [str(one.dtype), list(one.shape), as_lists(one)] for name, one in state.items()}


@pytest.mark.parametrize(("ranks", "degrees"), [pytest.param(1, {}, id="alone"), *DEGREES])
def test_parts_and_gathers_through_a_bridge_are_what_peft_would_save(
    worlds: Worlds, path: str, ranks: int, degrees: dict[str, int]
) -> None:
    whole = by_peft(path, TARGETS)
    reports = worlds(ranks, CASES).run("report", path=path, targets=TARGETS, is_hf=True, **degrees)
    assert assembled(reports) == whole
    for report in reports:
        assert report["full"] == whole
        assert report["asked"][0] == 0


@pytest.mark.parametrize(("ranks", "degrees"), DEGREES)
def test_without_a_bridge_they_are_what_one_rank_alone_would_hold(
    worlds: Worlds, path: str, ranks: int, degrees: dict[str, int]
) -> None:
    options = {"path": path, "targets": TARGETS, "is_hf": False}
    (alone,) = worlds(1, CASES).run("report", **options)
    reports = worlds(ranks, CASES).run("report", **options, **degrees)
    assert assembled(reports) == alone["tensors"]
    assert {name.rpartition(".lora_")[0] for name in alone["tensors"]} == {
        f"base_model.model.decoder.layers.{layer}.{one}"
        for layer in (0, 1)
        for one in (
            *("self_attention.linear_qkv", "self_attention.linear_proj"),
            *("mlp.linear_fc1", "mlp.linear_fc2"),
        )
    }
    gathered: dict[str, Any] = {}
    for report in reports:
        gathered |= report["full"]
        assert report["full"].items() <= alone["tensors"].items()
        assert report["asked"][0] == 0
    assert gathered == alone["tensors"]


def test_one_matrix_of_a_pair_is_cut_and_the_other_one_is_copied(worlds: Worlds, path: str) -> None:
    reports = worlds(2, CASES).run("report", path=path, targets=TARGETS, is_hf=False, tp=2)
    first, second = map(placements_of, reports)
    cut = {f"{QKV}.lora_B.weight", f"{QKV.replace('qkv', 'proj')}.lora_A.weight"}
    for name in (*cut, f"{QKV}.lora_A.weight", f"{QKV.replace('qkv', 'proj')}.lora_B.weight"):
        replicas = [placed[name].pieces[0].replica for placed in (first, second)]
        assert replicas == ([0, 0] if name in cut else [0, 1])
    gated = second["base_model.model.decoder.layers.0.mlp.linear_fc1.lora_B.weight"]
    assert [piece.offset for piece in gated.pieces] == [(6, 0), (18, 0)]


@pytest.mark.parametrize("wrapped", ["inside", "outside"])
def test_wrappers_around_peft_and_inside_of_it_leave_no_word_in_names(
    worlds: Worlds, path: str, wrapped: str
) -> None:
    options = {"path": path, "targets": ["linear_fc2"], "wrapped": wrapped, "dtype": "bfloat16"}
    reports = worlds(2, CASES).run("report", **options, is_hf=True, tp=2)
    assert assembled(reports).keys() == by_peft(path, ["linear_fc2"]).keys()
    assert {dtype for dtype, *_ in reports[0]["full"].values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(("ranks", "degrees"), [(2, {"tp": 2}), (2, {"pp": 2})])
def test_ranks_publish_an_adapter_as_one_version_that_peft_loads(
    worlds: Worlds, path: str, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    targets = [*TARGETS, "output_layer"]
    options = {"path": path, "targets": targets}
    reports = worlds(ranks, CASES).run("published", **options, port=free_port(), **degrees)
    for report in reports:
        assert report["tensors"] == by_peft(path, targets)
        assert report["collectives"] == []
    spec = AdapterSpec(**reports[0]["spec"])
    assert (spec.name, spec.config["r"], spec.scaling, spec.scalings) == ("policy", 2, 2.0, {})
    assert spec.base_root == "0" * 32
    tensors = {
        name: torch.tensor(values).view(shape)
        for name, (_, shape, values) in reports[0]["tensors"].items()
    }
    write_peft(tmp_path / "v1", spec, tensors)
    read = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), str(tmp_path / "v1")
    )
    in_one = read.merge_and_unload().state_dict()
    # What Megatron computes with, which knows no names of Hugging Face's.
    (report, *_) = worlds(ranks, CASES).run("merged", **options, by_peft=True, **degrees)
    own = report["full"]
    assert own.keys() == in_one.keys()
    assert all(own[name][2] == as_lists(one) for name, one in in_one.items())


@pytest.mark.parametrize("is_hf", [True, False], ids=["bridge", "raw"])
@pytest.mark.parametrize(("ranks", "degrees"), [pytest.param(1, {}, id="alone"), *DEGREES])
def test_each_rank_merges_what_peft_merges_in_it_and_trains_on_with_the_same_weights(
    worlds: Worlds, path: str, ranks: int, degrees: dict[str, int], *, is_hf: bool
) -> None:
    targets = [*TARGETS, "output_layer"]
    options = {"path": path, "targets": targets, "is_hf": is_hf, "is_exact": False, **degrees}
    expected = worlds(ranks, CASES).run("merged", **options, by_peft=True)
    reports = worlds(ranks, CASES).run("merged", **options, wrapped="outside")
    assert [one["full"] for one in reports] == [one["full"] for one in expected]
    assert assembled(reports) == assembled(expected)
    assert [one["placements"] for one in reports] == [one["placements"] for one in expected]
    assert all(one["asked"][0] == 0 for one in reports)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}])
def test_ranks_together_merge_to_the_bit_what_peft_merges_in_one_process(
    worlds: Worlds, path: str, degrees: dict[str, int]
) -> None:
    options = {"path": path, "targets": TARGETS, "is_exact": False}
    (alone,) = worlds(1, CASES).run("merged", **options, by_peft=True)
    for report in worlds(2, CASES).run("merged", **options, **degrees):
        assert report["full"] == alone["full"]


def test_adapters_of_experts_are_merged_where_the_experts_are(worlds: Worlds) -> None:
    world = worlds(2, CASES)
    ours, theirs = world.run("merged_experts"), world.run("merged_experts", by_peft=True)
    assert [one["tensors"] for one in ours] == [one["tensors"] for one in theirs]
    trained = {name for one in ours for name in one["trainable"]}
    assert trained  # what is merged is trained


def test_scalings_and_ranks_of_layers_are_those_of_the_modules_in_them(
    worlds: Worlds, path: str
) -> None:
    options = {"path": path, "targets": TARGETS, "patterns": {"linear_qkv": 1}}
    reports = worlds(2, CASES).run("published", **options, port=free_port(), tp=2)
    hf = {"q_proj": 1, "k_proj": 1, "v_proj": 1}
    alpha = dict.fromkeys(hf, 16)
    expected = by_peft(path, TARGETS, rank_pattern=hf, alpha_pattern=alpha)
    assert [report["tensors"] for report in reports] == [expected] * 2
    spec = AdapterSpec(**reports[1]["spec"])
    modules = [f"model.layers.1.self_attn.{one}" for one in ("q_proj", "v_proj", "o_proj")]
    assert [spec.scaling_of(one) for one in modules] == [16.0, 16.0, 2.0]
    again = AdapterSpec.of_peft("policy", dict(spec.config), modules)
    assert [again.scaling_of(one) for one in modules] == [16.0, 16.0, 2.0]
    assert spec.config["megatron_config"] is None


def test_a_step_of_training_gives_two_ranks_what_it_gives_one(worlds: Worlds, path: str) -> None:
    (alone,) = worlds(1, CASES).run("trained", path=path, targets=TARGETS)
    reports = worlds(2, CASES).run("trained", path=path, targets=TARGETS, tp=2)
    found = assembled(reports)  # copies are the same to the bit
    assert found == reports[0]["full"] == reports[1]["full"]
    for name, (_, _, values) in alone["full"].items():
        assert values != alone["before"][name][2], f"{name} was not trained"
        assert found[name][2] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_what_is_not_known_of_an_adapter_is_refused(worlds: Worlds, path: str) -> None:
    for answer in worlds(2, CASES).run("refusals", path=path):
        assert "adapter='NAME'" in answer["unnamed"]
        assert "not merged by adding" in answer["not_merged"]
        assert "holds all experts of this rank" in answer["grouped"]
        assert "expected one of that name" in answer["no_peft"]
        assert "expected one of mbridge" in answer["exporter"]
        assert "layers.1.self_attention.linear_qkv.lora_magnitude_vector" in answer["dora"]
        assert "merge_and_unload" in answer["dora"]
        assert "[16, 2], expected [32, 2]" in answer["no_marks"]
        assert answer["sound"] == "nothing"
        assert "a way of its own" in answer["own_conversion"]
        assert "of Megatron-Bridge's own" in answer["other_layers"]
    for answer in worlds(2, CASES).run("expert_refusal"):
        assert "local_experts" in answer
        assert "is of an expert" in answer


def test_a_layer_of_which_peft_trains_a_copy_is_refused(worlds: Worlds, path: str) -> None:
    (answer,) = worlds(1, CASES).run("saved_refusal", path=path)
    assert "final_layernorm' is one of which peft trains a copy" in answer


def test_stages_whose_layers_differ_are_refused(worlds: Worlds, path: str) -> None:
    world = worlds(2, CASES)
    options = {"path": path, "targets": TARGETS, "patterns": {"linear_qkv": 1}}
    for answer in world.run("stage_refusal", **options, pp=2):
        assert "linear_qkv' has rank 1 and scaling 16.0, expected 2 and 2.0" in answer


def test_parts_of_a_virtual_pipeline_are_one_adapter(worlds: Worlds, path: str) -> None:
    ((names, scaling),) = worlds(1, CASES).run("two_chunks", path=path)
    assert [name.split(".")[4] for name in names] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert scaling == 2.0


# The last one: mbridge's table of names, once changed for a tied model, stays so in the process.
def test_a_head_that_is_the_embedding_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    saved("Qwen2", tmp_path / "tied", tie_word_embeddings=True)
    ((alone, *whole),) = worlds(1, CASES).run("tied_refusal", path=str(tmp_path / "tied"))
    assert "'output_layer' has the weight of the embedding" in alone
    assert all("are one tensor" in answer for answer in whole)
