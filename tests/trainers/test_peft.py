"""peft under FSDP2: merged weights, base weights, or adapters alone, under the right names."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import (
    IncompatibleUpdate,
    MalformedManifest,
    SuspiciousUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.hooks import StepPublisher
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.processes import free_port
from rl_bridge.trainers import StateDictExtractor, read_peft, write_peft
from tests.trainers import peft_cases
from tests.trainers_torch.worlds import World, assembled


@pytest.fixture
def two(worlds: Callable[[int, str], World]) -> World:
    return worlds(2, "peft_cases")


@pytest.mark.parametrize(
    ("adapters", "is_merged"),
    [("merged", True), ("merged", False), ("base", False), ("only", False)],
)
def test_ranks_publish_what_peft_itself_would_save(
    two: World, adapters: str, *, is_merged: bool
) -> None:
    reports = two.run("parts", adapters=adapters, is_merged=is_merged)
    whole = peft_cases.expected(adapters)
    assert assembled(reports) == whole
    assert [report["full"] for report in reports] == [whole, whole]


@pytest.mark.parametrize(
    ("trainer", "dtype"),
    [
        *product(
            ["fsdp1", "fsdp1-apart", "fsdp1-whole", "fsdp2", "zero1", "zero2", "zero3"],
            ["float32", "bfloat16"],
        ),
        ("fsdp1-apart", "mixed"),
    ],
)
def test_ranks_merge_to_the_bit_what_peft_merges_and_train_on_with_the_same_weights(
    two: World, trainer: str, dtype: str
) -> None:
    reports = two.run("merged", trainer=trainer, dtype=dtype)
    whole = peft_cases.expected("merged", is_exact=False, dtype=dtype)
    assert assembled(reports) == whole
    assert [report["full"] for report in reports] == [whole, whole]
    trained = {name for report in reports for name in report["trainable"]}
    assert trained == peft_cases.TRAINED, "merged weights are watched, although they are frozen"


@pytest.mark.parametrize("trainer", ["fsdp1", "zero3"])
def test_merging_takes_the_memory_of_a_ranks_part_and_of_a_chunk(two: World, trainer: str) -> None:
    for peak, count, nbytes in two.run("peak", trainer=trainer):
        assert count > 5
        assert peak < nbytes / 2 + (12 << 20)


@pytest.mark.parametrize("trainer", ["fsdp1", "zero1", "zero3"])
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("not_by_adding", "q_proj' has an adapter that is not merged by adding"),
        ("tied_head", "lm_head.weight' and 'model.embed_tokens.weight' are one tensor"),
        ("with_biases", "bias='lora_only'"),
    ],
)
def test_ranks_refuse_what_one_process_refuses_all_of_them(
    two: World, case: str, says: str, trainer: str
) -> None:
    for answer in two.run(case, trainer=trainer):
        assert says in answer


def test_a_hook_publishes_what_peft_itself_would_merge_and_casts_it() -> None:
    model, engine = peft_cases.adapted(), peft_cases.base().bfloat16()
    with (
        make_weight_bridge("shared-memory") as bridge,
        make_weight_bridge("shared-memory") as rollout,
        RolloutExecutor(rollout, ModuleInstallAdapter(engine, mode="copy")) as executor,
    ):
        extractor = StateDictExtractor(model)
        StepPublisher(bridge, extractor, executor.update_weights, dtype=torch.bfloat16).publish()
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert all(torch.equal(one, merged[n].bfloat16()) for n, one in engine.state_dict().items())


# ---- an adapter alone, as a version of its own ---------------------------------------------------


def test_a_published_adapter_is_what_peft_would_save_with_its_configuration() -> None:
    model = peft_cases.adapted()
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        manifest = bridge.publish(model, weight_version=1, adapter="policy")
        expected = get_peft_model_state_dict(model)
        found = it.import_update(manifest)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(one) for name, one in expected.items())
        spec = manifest.adapter
        assert spec is not None
        assert (spec.name, spec.config["r"], spec.scaling) == ("policy", 2, 2.0)
        assert list(spec.config["modules_to_save"]) == ["lm_head"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ],
    ids=["plain", "saved modules", "tokens", "dora", "bias of B", "embeddings"],
)
def test_an_adapter_has_every_tensor_that_peft_would_save_of_it(options: dict[str, Any]) -> None:
    model = get_peft_model(peft_cases.base(), LoraConfig(r=2, **options))
    # Without copies of the base's embeddings, which peft adds where these are adapted.
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        found = it.import_update(bridge.publish(model, weight_version=1, adapter="policy"))
        assert found.keys() == expected.keys()
        assert all(found[name].equal(one) for name, one in expected.items())


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_adapter_with_biases_of_the_base_is_refused_and_merged_weights_have_them(
    bias: Any,
) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    options = LoraConfig(r=2, target_modules=["0"], bias=bias)
    model = get_peft_model(layer, options)
    with torch.no_grad():
        model.get_parameter("base_model.model.0.base_layer.bias").fill_(7)
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        with pytest.raises(IncompatibleUpdate, match=rf"bias='{bias}'.*merged=True"):
            bridge.publish(model, weight_version=1, adapter="policy")
        with pytest.raises(IncompatibleUpdate, match=rf"bias='{bias}'"):
            bridge.publish(StateDictExtractor(model, adapters="only"), weight_version=1)
        found = it.import_update(bridge.publish(model, weight_version=1, merged=True))
        assert found["0.bias"].eq(7).all()


def test_scalings_are_those_that_the_layers_compute_with() -> None:
    options = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 1},
        alpha_pattern={"down_proj": 16},
        use_rslora=True,
    )
    model = get_peft_model(peft_cases.base(), options)
    spec = StateDictExtractor(model, adapter="policy").adapter
    assert spec is not None
    layers = {
        name.removeprefix("base_model.model."): one.scaling["default"]
        for name, one in model.named_modules()
        if isinstance(getattr(one, "scaling", None), dict)
    }
    assert len(set(layers.values())) == 3
    assert {name: spec.scaling_of(name) for name in layers} == layers


def test_each_adapter_of_a_model_is_published_alone_under_its_own_name() -> None:
    model = peft_cases.adapted()
    model.add_adapter("other", LoraConfig(r=1, lora_alpha=3, target_modules=["v_proj"]))
    with make_weight_bridge("local") as bridge:
        other = bridge.publish(model, weight_version=1, adapter="other")
        assert {name.split(".")[-3] for name in other.tensors} == {"v_proj"}
        with pytest.raises(IncompatibleUpdate, match=r"'default', 'other'.*expected one of"):
            bridge.publish(model, weight_version=2, adapter="policy")


def test_a_peft_model_is_refused_until_it_is_said_what_of_it_is_published() -> None:
    with (
        make_weight_bridge("local") as bridge,
        pytest.raises(IncompatibleUpdate, match=r"adapter='NAME'.*merged=True.*adapters='base'"),
    ):
        bridge.publish(peft_cases.adapted(), weight_version=1)


def test_merged_weights_are_what_peft_would_merge_and_the_model_stays_as_it_is() -> None:
    model = peft_cases.adapted()
    before = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        manifest = bridge.publish(model, weight_version=1, merged=True)
        found = it.import_update(manifest)
        assert manifest.adapter is None
        assert found.keys() == expected.keys()
        assert all(found[name].equal(one) for name, one in expected.items())
    assert all(one.equal(before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("options", [{"adapter": "default"}, {"merged": True}], ids=str)
def test_a_sound_run_is_silent_and_one_without_steps_is_not(options: dict[str, Any]) -> None:
    model = peft_cases.adapted(is_exact=False, dtype="bfloat16")
    trained = [one for one in model.parameters() if one.requires_grad]
    masters = [one.detach().float() for one in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    with make_weight_bridge("shared-memory", suspicious="reject") as bridge:

        def publish(version: int) -> WeightUpdateManifest:
            made = bridge.publish(model, weight_version=version, **options)
            bridge.release(made.update_id)
            return made

        for version in range(30):
            for master, one in zip(masters, trained, strict=True):
                master.grad = torch.randn(master.shape)
                one.data.copy_(master)
            assert "1" in (publish(version).table.trainable or "")
            optimizer.step()
        with pytest.raises(SuspiciousUpdate, match="changes nothing that is trained"):
            publish(30)


def test_only_the_active_adapter_is_merged_into_the_layers_that_have_it() -> None:
    model = peft_cases.adapted()
    model.add_adapter("other", LoraConfig(r=1, lora_alpha=3, target_modules=["v_proj"]))
    model.set_adapter("other")
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    found = StateDictExtractor(model)
    merged = {name: one for chunk in found.local() for name, one in chunk.items()}
    assert all(merged[name].equal(one) for name, one in expected.items() if "lm_head" not in name)


def test_an_adapter_of_one_of_two_tied_layers_is_not_merged() -> None:
    model = get_peft_model(peft_cases.base(), LoraConfig(r=2, target_modules=["lm_head"]))
    model.base_model.model.lm_head.base_layer.weight = model.get_input_embeddings().weight
    with (
        make_weight_bridge("local") as bridge,
        pytest.raises(IncompatibleUpdate, match=r"lm_head.*embed_tokens.*are one tensor"),
    ):
        bridge.publish(model, weight_version=1, merged=True)


@pytest.mark.parametrize("more", ["use_dora", "lora_bias"])
def test_what_is_not_merged_by_adding_is_refused(more: str) -> None:
    options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], more: True}
    model = get_peft_model(peft_cases.base(), LoraConfig(**options))
    with (
        make_weight_bridge("local") as bridge,
        pytest.raises(IncompatibleUpdate, match=r"q_proj.*not merged by adding.*merge_adapter"),
    ):
        bridge.publish(model, weight_version=1, merged=True)


@pytest.mark.parametrize("trainer", ["fsdp1", "fsdp2", "zero1", "zero3"])
def test_ranks_publish_the_shards_of_an_adapter_as_one_version_without_a_gather(
    two: World, trainer: str
) -> None:
    reports = two.run("published_adapter", trainer=trainer, port=free_port())
    expected = peft_cases.expected("only")
    assert [report["tensors"] for report in reports] == [expected, expected]
    assert [report["spec"] for report in reports] == [["policy", 2, 2.0]] * 2
    assert [report["collectives"] for report in reports] == [0, 0]


def test_a_scaling_that_changes_between_two_versions_is_the_next_ones() -> None:
    model = peft_cases.adapted()
    layers = [one for one in model.modules() if isinstance(getattr(one, "scaling", None), dict)]
    with make_weight_bridge("local") as bridge:
        first = bridge.publish(model, weight_version=1, adapter="policy").adapter
        for layer in layers:
            layer.scaling["default"] = 99.0
        second = bridge.publish(model, weight_version=2, adapter="policy").adapter
        options = LoraConfig(r=2, lora_alpha=64, target_modules=["v_proj"])
        model.add_adapter("next", options)
        model.set_adapter("next")
        model.delete_adapter("default")
        third = bridge.publish(model, weight_version=3, adapter="policy")
    specs = [first, second, third.adapter]
    assert [None if one is None else one.scaling for one in specs] == [2.0, 99.0, 32.0]
    assert {name.split(".")[-3] for name in third.tensors} == {"v_proj"}


def test_an_adapter_whose_name_is_a_number_keeps_the_numbers_of_layers() -> None:
    options = LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj"])
    model = get_peft_model(peft_cases.base(), options, adapter_name="0")
    with make_weight_bridge("local") as bridge:
        manifest = bridge.publish(model, weight_version=1, adapter="0")
    assert manifest.tensors.keys() == get_peft_model_state_dict(model, adapter_name="0").keys()


# ---- directories ---------------------------------------------------------------------------------


def test_peft_loads_a_written_version_and_what_it_saved_is_published_again(tmp_path: Path) -> None:
    options = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(peft_cases.base(), options)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.copy_((torch.arange(one.numel()) % 5 - 2).view(one.shape) / 4)
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as it:
        manifest = bridge.publish(model, weight_version=1, adapter="policy")
        assert manifest.adapter is not None
        write_peft(tmp_path / "v1", manifest.adapter, it.import_update(manifest))
        read = PeftModel.from_pretrained(peft_cases.base(), str(tmp_path / "v1"))
        expected = get_peft_model_state_dict(model)
        found = get_peft_model_state_dict(read)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(one) for name, one in expected.items())
        merged, own = read.merge_and_unload().state_dict(), model.merge_and_unload().state_dict()
        assert all(merged[name].equal(one) for name, one in own.items())
        spec, tensors = read_peft(tmp_path / "v1", "policy")
        again = bridge.publish(tensors, weight_version=2, adapter=spec)
        assert again.root == manifest.root
        assert again.adapter is not None
        assert again.adapter.scaling == manifest.adapter.scaling
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_directory_is_never_written_over_and_never_half_written(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.q_proj.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q_proj.lora_B.weight": torch.ones(4, 2),
    }
    shapes = {name: tuple(one.shape) for name, one in tensors.items()}
    spec = AdapterSpec.inferred("policy", shapes, lora_alpha=4)
    write_peft(tmp_path / "v1", spec, tensors)
    with pytest.raises(WeightBridgeUnavailableError, match="it exists already"):
        write_peft(tmp_path / "v1", spec, tensors)
    broken = {**tensors, "base_model.model.q_proj.lora_A.weight": torch.ones(2, 4, device="meta")}
    with pytest.raises(NotImplementedError):
        write_peft(tmp_path / "v2", spec, broken)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    (tmp_path / "v1" / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(MalformedManifest, match="is damaged"):
        read_peft(tmp_path / "v1", "policy")
    with pytest.raises(WeightBridgeUnavailableError, match="name a directory"):
        read_peft(tmp_path / "v3", "policy")


def test_a_scaling_that_peft_s_files_cannot_say_is_not_written(tmp_path: Path) -> None:
    model = peft_cases.adapted()
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 0.5
    with make_weight_bridge("shared-memory") as bridge:
        manifest = bridge.publish(model, weight_version=1, adapter="policy")
        assert manifest.adapter is not None
        tensors = get_peft_model_state_dict(model)
        with pytest.raises(
            IncompatibleUpdate, match=r"q_proj' has scaling 0\.5.*PEFT would read 2"
        ):
            write_peft(tmp_path / "v1", manifest.adapter, tensors)
