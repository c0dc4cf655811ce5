"""What an update of an adapter says of itself, and which tensors are refused as one."""

import math
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate, MalformedManifest
from rl_bridge.manifest import AdapterSpec

_LAYER = "base_model.model.model.layers.0.self_attn"


def tensors(*modules: str, rank: int = 4) -> dict[str, torch.Tensor]:
    found = {}
    for module in modules or ("q_proj", "v_proj"):
        found[f"{_LAYER}.{module}.lora_A.weight"] = torch.randn(rank, 8)
        found[f"{_LAYER}.{module}.lora_B.weight"] = torch.randn(16, rank)
    return found


def shapes(given: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in given.items()}


def spec_of(given: dict[str, torch.Tensor], **options: Any) -> AdapterSpec:
    return AdapterSpec.inferred("policy", shapes(given), lora_alpha=8, **options)


def test_the_manifest_of_an_adapter_carries_its_spec_as_text_and_back() -> None:
    weights = tensors()
    spec = spec_of(weights, base_root="0" * 32)
    with make_weight_bridge("local") as bridge:
        manifest = bridge.publish(
            weights, weight_version=1, adapter=spec, metadata={"step": 3, "layout": {"rank": 0}}
        )
        again = WeightUpdateManifest.from_json(manifest.to_json())
        assert again.adapter == spec
        assert again.weight_layout.kind == "adapter"
        assert again.metadata["step"] == 3
        assert bridge.import_update(again).keys() == weights.keys()


def test_an_update_of_a_models_weights_is_no_adapter_whatever_its_metadata_say() -> None:
    with make_weight_bridge("local") as bridge:
        manifest = bridge.publish(tensors(), weight_version=1, metadata={"adapter": "mine"})
        assert manifest.adapter is None


def test_rank_and_modules_are_inferred_from_shapes_and_names() -> None:
    weights = tensors("q_proj") | tensors("v_proj", rank=2)
    spec = spec_of(weights)
    assert spec.config["r"] == 4
    assert list(spec.config["target_modules"]) == ["q_proj", "v_proj"]
    found = {pair.module: (pair.rank, pair.scaling) for pair in spec.pairs(shapes(weights))}
    prefix = "model.layers.0.self_attn"
    assert found == {f"{prefix}.q_proj": (4, 2.0), f"{prefix}.v_proj": (2, 4.0)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"q_proj": 4.0, "v_proj": 4.0}),
        ({"use_rslora": True}, {"q_proj": 16 / math.sqrt(4), "v_proj": 16 / math.sqrt(4)}),
        ({"alpha_pattern": {"v_proj": 4}}, {"q_proj": 4.0, "v_proj": 1.0}),
        ({"rank_pattern": {r"layers\.0\..*\.q_proj": 8}}, {"q_proj": 2.0, "v_proj": 4.0}),
        ({"alpha_pattern": {"^v_proj": 4}}, {"q_proj": 4.0, "v_proj": 4.0}),
    ],
)
def test_the_scaling_of_each_module_follows_from_pefts_configuration(
    options: dict[str, Any], expected: dict[str, float]
) -> None:
    config = {"r": 4, "lora_alpha": 16, "target_modules": {"v_proj", "q_proj"}, **options}
    modules = [f"layers.0.attn.{name}" for name in expected]
    spec = AdapterSpec.of_peft("policy", config, modules)
    found = {one.rpartition(".")[2]: spec.scaling_of(one) for one in modules}
    assert found == expected
    assert list(spec.config["target_modules"]) == ["q_proj", "v_proj"]


def half_of_a_pair() -> dict[str, torch.Tensor]:
    found = tensors()
    del found[f"{_LAYER}.v_proj.lora_B.weight"]
    return found


def of_two_ranks() -> dict[str, torch.Tensor]:
    return tensors() | {f"{_LAYER}.v_proj.lora_B.weight": torch.randn(16, 3)}


def twice() -> dict[str, torch.Tensor]:
    found = tensors()
    return found | {name.removeprefix("base_model.model."): one for name, one in found.items()}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (half_of_a_pair(), r"'model\.layers\.0\.self_attn\.v_proj' has .*lora_A.* and no .*lora_B"),
        (of_two_ranks(), r"lora_A\.weight' of shape \[4, 8\].*shape \[16, 3\]"),
        ({"weight": torch.ones(2)}, r"none of its 1 tensors is a lora_A"),
        (twice(), r"'model\.layers\.0\.self_attn\.q_proj' has .* of two pairs"),
    ],
)
def test_what_is_no_pair_of_matrices_is_refused_by_name_and_nothing_is_published(
    weights: dict[str, torch.Tensor], message: str
) -> None:
    with make_weight_bridge("shared-memory") as bridge:
        with pytest.raises(IncompatibleUpdate, match=message):
            bridge.publish(weights, weight_version=1, adapter=spec_of(tensors()))
        assert bridge.latest_manifest is None
        assert bridge.publish(tensors(), weight_version=1, adapter=spec_of(tensors()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType, expected a mapping"),
        ({"name": "../etc", "config": {}, "scaling": 1.0}, "field name"),
        ({"name": "a", "config": [], "scaling": 1.0}, "config is .*expected a mapping"),
        ({"name": "a", "config": {}, "scaling": "1"}, "scaling is '1', expected a number"),
        ({"name": "a", "config": {}, "scaling": 1, "scalings": {"x": None}}, "scalings is"),
        ({"name": "a", "config": {}, "scaling": 10**400}, "scaling is 1000"),
        ({"name": "a", "config": {"peft_type": "IA3"}, "scaling": 1.0}, "peft_type 'LORA'"),
        ({"name": "a", "config": {}, "scaling": 1.0, "base_root": "x"}, "field base_root"),
        ({"name": "a", "config": {}, "scaling": 1.0, "more": 1}, "no such field"),
    ],
)
def test_a_manifest_that_says_it_is_an_adapter_and_is_none_is_never_made(
    given: Any, message: str
) -> None:
    metadata = {"layout": {"kind": "adapter"}, "adapter": given}
    with make_weight_bridge("local") as bridge:
        with pytest.raises(MalformedManifest, match=message):
            bridge.publish(tensors(), weight_version=1, metadata=metadata)
        assert bridge.published_nbytes == 0


def test_a_layout_of_another_kind_is_refused_for_an_adapter() -> None:
    metadata = {"layout": {"kind": "replicated"}}
    with pytest.raises(MalformedManifest, match=r"'replicated', expected 'adapter'"):
        spec_of(tensors()).to_metadata(metadata)
