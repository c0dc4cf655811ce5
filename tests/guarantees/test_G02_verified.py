"""G2 Verified: every byte is compared with the manifest before an engine may see it.

`import_update` returns only after all of them were digested through the mapping that will be
installed. An engine that imports by itself verifies there, and reports the root of what it read.
There is no option to turn it off.

It ends at intent: whoever can write both the bytes and the manifest can write a consistent lie.
"""

from collections.abc import Callable

import pytest
import torch

from rl_bridge import (
    InstallProof,
    RolloutExecutor,
    TransactionalAdapter,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import (
    ChecksumMismatch,
    DigestMismatch,
    WeightBridgeError,
    WeightManifestValidationError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing import BridgeOver, contents_of, random_tensor, sample_weights
from tests.guarantees.kit import Tensors, damage

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
]


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


# ---- what is good arrives -----------------------------------------------------------------------


def test_every_dtype_and_every_layout_arrives_byte_for_byte(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    source = {dtype: random_tensor(dtype, (6, 4), seed=5) for dtype in DTYPES}
    base = random_tensor("float32", (6, 4), seed=6)
    source |= {
        "transposed": base.t(),
        "stepped": base[::2],
        "expanded": base[:1].expand(3, 4),
        "tied": base,
        "tied to it": base,
        "overlapping": base[1:],
        "empty": base[:0],
        "a number": base[0, 0],
        "larger than a leaf": random_tensor("uint8", (300_001,), seed=7),
    }
    manifest = trainer.publish(source, weight_version=1)
    assert contents_of(rollout.import_update(manifest.to_json())) == contents_of(source)


# ---- what is damaged does not -------------------------------------------------------------------


def test_one_flipped_byte_anywhere_is_found_and_its_tensor_named(
    trainer: BridgeOver, make_bridge: Callable[..., BridgeOver]
) -> None:
    source = sample_weights(1)
    manifest = trainer.publish(source, weight_version=1)
    for name, tensor in manifest.tensors.items():
        for place in (0, tensor.nbytes // 2, -1) if tensor.nbytes else ():
            damage(trainer, manifest, name, place)
            with make_bridge() as rollout:
                with pytest.raises(ChecksumMismatch, match="checksum mismatch for") as caught:
                    rollout.import_update(manifest)
                assert repr(name) in str(caught.value) or tensor.tied_to
                assert rollout.update_status(manifest.update_id) == "rejected"
            damage(trainer, manifest, name, place)
    assert contents_of(make_bridge().import_update(manifest)) == contents_of(source)


def test_an_engine_never_sees_a_damaged_version(trainer: BridgeOver, rollout: BridgeOver) -> None:
    adapter = Watched()
    with RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter) as executor:
        bad = trainer.publish(sample_weights(1), weight_version=1)
        damage(trainer, bad, "layer.0.bias")
        with pytest.raises(ChecksumMismatch):
            executor.update_weights(bad)
        assert adapter.seen == []
        executor.update_weights(trainer.publish(sample_weights(2), weight_version=2))
        assert adapter.seen == [2, 2]


def test_a_damaged_version_stays_refused_and_its_publisher_hears_why(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    bad = trainer.publish(sample_weights(1), weight_version=1)
    damage(trainer, bad, "mask")
    with pytest.raises(ChecksumMismatch):
        rollout.import_update(bad)
    damage(trainer, bad, "mask")  # whole again, and still refused
    with pytest.raises(WeightUpdateRejectedError, match="rejected"):
        rollout.import_update(bad)
    with pytest.raises(WeightUpdateRejectedError):
        rollout.acknowledge(bad)
    (report,) = trainer.holders(bad)
    assert report.state == "rejected"
    assert "checksum mismatch" in str(report.reason)
    good = trainer.publish(sample_weights(2), weight_version=2)
    assert contents_of(rollout.import_update(good)) == contents_of(sample_weights(2))


# ---- what the manifest says must be true --------------------------------------------------------


def test_digests_of_other_bytes_are_refused(trainer: BridgeOver, rollout: BridgeOver) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    other = make_weight_bridge("local-clone").publish(sample_weights(2), weight_version=1)
    for changed in (other.digests, bytes(byte ^ 1 for byte in manifest.digests)):
        with pytest.raises(WeightManifestValidationError):
            rollout.import_update(manifest.model_copy(update={"digests": changed}))


def test_tensors_that_changed_places_are_found(trainer: BridgeOver, rollout: BridgeOver) -> None:
    swapped = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    manifest = trainer.publish(swapped, weight_version=1)
    first, second = manifest.digests[:16], manifest.digests[16:]
    with pytest.raises(WeightManifestValidationError):
        rollout.import_update(manifest.model_copy(update={"digests": second + first}))


def test_one_changed_character_of_a_manifest_is_refused(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=3, metadata={"step": 8})
    text = manifest.to_json()
    changes = {
        '"weight_version":3': '"weight_version":4',
        '"step":8': '"step":9',
        '"source_worker":"trainer"': '"source_worker":"another"',
        '"float64"': '"int64"',
        f'"root":"{manifest.root}"': f'"root":"{"0" * 32}"',
        '"embed"': '"embod"',
    }
    for old, new in changes.items():
        assert text.count(old) >= 1
        with pytest.raises(DigestMismatch):
            rollout.import_update(text.replace(old, new, 1))
    assert contents_of(rollout.import_update(text)) == contents_of(sample_weights(1))


def test_equal_weights_have_equal_roots_however_they_lie() -> None:
    weights = {"a": random_tensor("float32", (70, 70), seed=1), "b": torch.ones(3)}
    strange = {"b": torch.ones(6)[::2], "a": weights["a"].t().contiguous().t()}
    roots = {
        make_weight_bridge(name).publish(source, weight_version=version).root
        for name, version in (("local-clone", 1), ("shared-memory", 9))
        for source in (weights, strange)
    }
    assert len(roots) == 1


# ---- nobody is excused --------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["", "0" * 32])
def test_an_engine_that_verifies_by_itself_must_report_this_updates_root(
    claim: str, trainer: BridgeOver, rollout: BridgeOver
) -> None:
    adapter = Watched(claims=claim)
    with RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter) as executor:
        manifest = trainer.publish(sample_weights(1), weight_version=1)
        with pytest.raises(WeightBridgeError):
            executor.update_weights(manifest)
        assert adapter.seen == []
        later = trainer.publish(sample_weights(2), weight_version=2)
        adapter.claims = later.root
        executor.update_weights(later)
        assert adapter.seen == [2]


@pytest.mark.parametrize("option", ["verify", "check", "checksum", "digest", "skip_verification"])
def test_no_option_turns_verification_off(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        make_weight_bridge("shared-memory", **{option: False})  # type: ignore[arg-type]
