"""Engines that a rank refuses, by what their configuration says; and what a deadline looks like."""

import json
from types import SimpleNamespace

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError, make_weight_bridge
from rl_bridge.engines.vllm.host import manifest_of, require_supported
from rl_bridge.errors import MalformedManifest


def config(**parallel: int) -> SimpleNamespace:
    alone = {"data_parallel_size": 1, "data_parallel_index": 0, "pipeline_parallel_size": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**alone, **parallel}))


def test_an_engine_that_stands_alone_is_supported() -> None:
    require_supported(config())
    require_supported(
        SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1)
        )
    )  # an older vLLM has no index


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2, expected 1"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3, expected 1"),
        # By its number, as vLLM counts: the first one of its group has 0.
        ({"data_parallel_index": 1}, r"is replica 1 of a data-parallel group"),
    ],
    ids=str,
)
def test_what_cannot_decide_together_is_refused_by_its_own_number(
    parallel: dict[str, int], says: str
) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=says):
        require_supported(config(**parallel))


def test_a_manifest_is_read_from_its_text_or_from_that_text_parsed() -> None:
    with make_weight_bridge("local-clone") as bridge:
        text = bridge.publish({"w": torch.ones(2)}, weight_version=1).to_json()
    assert manifest_of(text).to_json() == manifest_of(json.loads(text)).to_json() == text


@pytest.mark.parametrize("given", [None, 7, ["w"], {}, {"update_info": 1}, {"w": {"w": 1}}, "w"])
def test_what_is_no_manifest_is_refused_as_one(given: object) -> None:
    with pytest.raises(MalformedManifest):
        manifest_of(given)
