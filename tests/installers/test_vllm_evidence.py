"""What layers compute with beside their parameters is part of the proof, down to its bytes."""

from collections.abc import Iterator

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.staging import AttributeChange, Staged
from rl_bridge.errors import ProofFailed


@pytest.fixture
def evidence() -> Iterator[Evidence]:
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish({"weight": torch.ones(3)}, weight_version=1)
        yield Evidence(manifest, LoadPlan([]), num_threads=1)
        bridge.release(manifest.update_id)


def staged() -> tuple[Staged, torch.Tensor]:
    """A layer that computes with a tensor of its own, as convolutions on the CPU do."""
    layer, tensor = torch.nn.Module(), torch.arange(64, dtype=torch.bfloat16)
    made = Staged()
    for key, value in (("unpacked", tensor), ("product", lambda: None)):
        vars(layer)[key] = value
        made.attributes.append(AttributeChange("conv", layer, key, value))
    return made, tensor


def test_a_tensor_that_holds_what_was_staged_is_proven(evidence: Evidence) -> None:
    version, _ = staged()
    evidence.seal({}, version)
    assert evidence.check(version).method == "digest"


@pytest.mark.parametrize("place", [0, 31, 63])
def test_a_tensor_that_changed_behind_its_staging_is_named(evidence: Evidence, place: int) -> None:
    version, tensor = staged()
    evidence.seal({}, version)
    tensor.view(torch.uint8)[2 * place] ^= 1
    with pytest.raises(ProofFailed, match=r"'conv\.unpacked' .*does not hold what was staged"):
        evidence.check(version)


def test_another_tensor_of_the_same_bytes_is_not_the_one_that_was_made(evidence: Evidence) -> None:
    version, tensor = staged()
    evidence.seal({}, version)
    vars(version.attributes[0].module)["unpacked"] = tensor.clone()
    with pytest.raises(ProofFailed, match="layer 'conv': its unpacked is not the one"):
        evidence.check(version)
