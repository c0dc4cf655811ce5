"""G2 Verified: every byte is compared with the manifest before an engine may see it.

`import_update` returns only after all of them were digested through the mapping that will be
installed. An engine that imports by itself verifies there, and reports the root of what it read.
There is no option to turn it off.

It ends at intent: whoever can write both the bytes and the manifest can write a consistent lie.
"""

import pytest
import torch

from rl_bridge import (
    InstallProof,
    RolloutExecutor,
    TransactionalAdapter,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import ChecksumMismatch, WeightBridgeError
from rl_bridge.testing import BridgeOver, FaultInjecting, random_tensor, sample_weights
from tests.guarantees.kit import OverEachTransport, Tensors, scenarios


@scenarios(
    "test_every_dtype_arrives_in_every_shape",
    "test_odd_names_arrive",
    "test_tied_tensors_travel_once_and_are_tied_again",
    "test_overlapping_views_arrive_each_on_its_own",
    "test_a_flipped_byte_anywhere_is_a_checksum_mismatch",
    "test_a_corrupt_update_is_refused_for_good_and_the_next_one_arrives",
    "test_a_digest_that_was_changed_with_its_root_is_a_checksum_mismatch",
    "test_a_changed_header_is_refused_and_the_update_still_arrives",
    "test_a_changed_manifest_text_is_refused",
    "test_a_layout_that_does_not_fit_the_memory_is_refused",
)
class TestEachTransport(OverEachTransport):
    """What is good arrives byte for byte; what is damaged does not, and stays refused."""


def test_equal_weights_have_equal_roots_however_they_lie() -> None:
    weights = {"a": random_tensor("float32", (70, 70), seed=1), "b": torch.ones(3)}
    strange = {"b": torch.ones(6)[::2], "a": weights["a"].t().contiguous().t()}
    roots = {
        make_weight_bridge(name, nonfinite="off").publish(source, weight_version=version).root
        for name, version in (("local-clone", 1), ("shared-memory", 9))
        for source in (weights, strange)
    }
    assert len(roots) == 1


@pytest.mark.parametrize("option", ["verify", "check", "checksum", "digest", "skip_verification"])
def test_no_option_turns_verification_off(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        make_weight_bridge("shared-memory", **{option: False})  # type: ignore[arg-type]


# ---- the engine ---------------------------------------------------------------------------------


class Watched(TransactionalAdapter):
    """An engine that notes what it was given, and may claim to verify by itself."""

    def __init__(self, claims: str | None = None) -> None:
        self.claims = claims
        self.seen: list[int] = []

    @property
    def imports_itself(self) -> bool:
        return self.claims is not None

    @property
    def verified_root(self) -> str:
        return self.claims or ""

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        if not self.imports_itself:
            self.seen.append(manifest.weight_version)

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        self.seen.append(manifest.weight_version)
        self.root = manifest.root

    def prove(self) -> InstallProof:
        return InstallProof(method="digest", root=self.root)

    def undo(self) -> None:
        """Nothing was written."""

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


def test_an_engine_never_sees_a_damaged_version() -> None:
    adapter, memory = Watched(), FaultInjecting.over("shared-memory")
    with (
        BridgeOver(memory) as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        bad = bridge.publish(sample_weights(1), weight_version=1)
        memory.corrupt(bad, bad.tensors["layer.0.bias"].offset)
        with pytest.raises(ChecksumMismatch):
            executor.update_weights(bad)
        assert adapter.seen == []
        executor.update_weights(bridge.publish(sample_weights(2), weight_version=2))
        assert adapter.seen == [2, 2]


@pytest.mark.parametrize("claim", ["", "0" * 32])
def test_an_engine_that_verifies_by_itself_must_report_this_updates_root(claim: str) -> None:
    adapter = Watched(claims=claim)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        with pytest.raises(WeightBridgeError):
            executor.update_weights(bridge.publish(sample_weights(1), weight_version=1))
        assert adapter.seen == []
        later = bridge.publish(sample_weights(2), weight_version=2)
        adapter.claims = later.root
        executor.update_weights(later)
        assert adapter.seen == [2]
