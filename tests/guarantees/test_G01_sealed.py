"""G1 Sealed: a published version never changes.

Not through the trainer's next step, not through anything that a consumer does with its tensors, not
through its release or its publisher's death. It begins when `publish` returns.

It ends at `directory=`, where a file cannot be sealed: an import copies and verifies it, so that
later changes cannot reach it. It ends at `fork()`: leases stay with the parent.
"""

import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import SegmentError, StaleUpdate, WeightBridgeError
from rl_bridge.testing import (
    BridgeOver,
    Child,
    bytes_of,
    contents_of,
    hashes,
    sample_weights,
)
from tests.guarantees.kit import Carrier, damage

# ---- the trainer goes on ------------------------------------------------------------------------


def test_the_trainers_next_step_does_not_reach_a_published_version(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    source = sample_weights(1)
    manifest = trainer.publish(source, weight_version=1)
    published = contents_of(source)
    for tensor in source.values():
        tensor.zero_()
    assert contents_of(rollout.import_update(manifest)) == published


def test_versions_that_follow_do_not_reach_one_that_is_still_held(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    first = trainer.publish(sample_weights(1), weight_version=1)
    held = rollout.import_update(first)
    for side in (rollout, trainer):
        side.release(first.update_id)
    for version in range(2, 8):
        later = trainer.publish(sample_weights(version), weight_version=version)
        assert contents_of(rollout.import_update(later)) == contents_of(sample_weights(version))
        for side in (rollout, trainer):
            side.release(later.update_id)
    assert contents_of(held) == contents_of(sample_weights(1))


def test_tensors_that_are_held_outlive_their_publisher(
    rollout: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    trainer = make_peer("trainer")
    held = rollout.import_update(trainer.call("publish", seed=1, weight_version=1))
    trainer.kill()
    assert contents_of(held) == contents_of(sample_weights(1))


def test_tensors_that_are_held_outlive_the_bridge_that_imported_them(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    held = rollout.import_update(trainer.publish(sample_weights(1), weight_version=1))
    rollout.close()
    trainer.close()
    assert contents_of(held) == contents_of(sample_weights(1))


@pytest.mark.parametrize(
    "view", [lambda t: t.conj(), lambda t: t.conj().imag], ids=["conjugate", "negative"]
)
def test_a_lazy_view_is_published_as_the_numbers_that_it_shows(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    shown = view(torch.tensor([1 + 2j, 3 - 4j]))
    with make_weight_bridge("shared-memory") as bridge:
        manifest = bridge.publish({"w": shown}, weight_version=1)
        found = bridge.import_update(manifest)["w"]
    assert bytes_of(found) == bytes_of(shown.clone().resolve_conj().resolve_neg())


# ---- consumers write ----------------------------------------------------------------------------


def test_what_one_consumer_writes_no_other_one_sees(
    trainer: BridgeOver, make_bridge: Callable[..., BridgeOver], transport: Carrier
) -> None:
    if not transport.declares.writable_import:
        pytest.skip("a write ends its process: the next test")
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    early, writer = (make_bridge(name).import_update(manifest) for name in ("early", "writer"))
    for tensor in writer.values():
        tensor.zero_()
    late = make_bridge("late").import_update(manifest)
    assert contents_of(early) == contents_of(late) == contents_of(sample_weights(1))


def test_what_another_process_writes_stays_in_that_process(
    trainer: BridgeOver, rollout: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    held = rollout.import_update(manifest)
    writer = make_peer("writer")
    writer.call("import_update", manifest=manifest.to_json())
    writer.tell("write", update_id=manifest.update_id)
    try:
        writer.answer()
    except WeightBridgeError:
        assert writer.exitcode() < 0, "a write that is not allowed ends its writer"
    late = make_peer("late").call("import_update", manifest=manifest.to_json())
    assert contents_of(held) == contents_of(sample_weights(1))
    assert late == hashes(sample_weights(1))


def test_the_published_bytes_come_back_with_the_next_import(
    trainer: BridgeOver, rollout: BridgeOver, transport: Carrier
) -> None:
    if not transport.declares.writable_import:
        pytest.skip("nobody can write to an import")
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    rollout.import_update(manifest)["scale"].zero_()
    assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))


def test_no_process_can_write_to_sealed_memory_or_cut_it_off() -> None:
    with make_weight_bridge("shared-memory") as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        slot: Any = manifest.handle["slot"]
        other = os.open(f"/proc/{slot['pid']}/fd/{slot['fd']}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(other, slot["nbytes"], flags=mmap.MAP_SHARED)
            for act in (lambda: os.ftruncate(other, 0), lambda: os.pwrite(other, b"x", 0)):
                with pytest.raises(PermissionError):
                    act()
        finally:
            os.close(other)


@pytest.mark.parametrize("transport", ["shared-memory-in-files"], indirect=True)
def test_a_change_of_the_file_does_not_reach_those_who_imported_it(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    held = rollout.import_update(manifest)
    damage(trainer, manifest, "embed")
    assert contents_of(held) == contents_of(sample_weights(1))


# ---- a version is withdrawn ---------------------------------------------------------------------


def test_a_released_version_cannot_be_imported_any_more(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    trainer.release(manifest.update_id)
    with pytest.raises((StaleUpdate, SegmentError)):
        rollout.import_update(manifest)


# ---- the manifest -------------------------------------------------------------------------------


@pytest.fixture
def manifest() -> WeightUpdateManifest:
    with make_weight_bridge("local-clone") as bridge:
        return bridge.publish({"w": torch.ones(3)}, weight_version=1, metadata={"tags": ["a"]})


def test_neither_fields_nor_metadata_nor_tensors_of_a_manifest_can_be_changed(
    manifest: WeightUpdateManifest,
) -> None:
    before = manifest.to_json()
    for name in ("weight_version", "digests", "handle", "root"):
        with pytest.raises((AttributeError, ValueError)):
            setattr(manifest, name, None)
    mappings: list[Any] = [manifest.metadata, manifest.handle, manifest.tensors]
    for mapping in (*mappings, manifest.metadata["layout"]):
        with pytest.raises(TypeError):
            mapping["w"] = None
    assert isinstance(manifest.metadata["tags"], tuple)
    assert manifest.to_json() == before


def test_the_tensors_of_a_manifest_cannot_be_replaced(manifest: WeightUpdateManifest) -> None:
    with pytest.raises((AttributeError, ValueError)):
        manifest.tensors = {}  # type: ignore[misc]  # that is the point
    with pytest.raises((AttributeError, ValueError)):
        del manifest.tensors


def test_a_version_that_was_forced_into_a_manifest_is_not_believed() -> None:
    with make_weight_bridge("shared-memory") as bridge:
        manifest = bridge.publish({"w": torch.ones(3)}, weight_version=1)
        vars(manifest)["weight_version"] = 7
        with pytest.raises(WeightBridgeError):
            bridge.import_update(manifest)
