"""G1 Sealed: a published version never changes.

Not through the trainer's next step, not through anything that a consumer does with its tensors, not
through its release or its publisher's death. It begins when `publish` returns.

It ends at `directory=`, where a file cannot be sealed: an import copies and verifies it, so that
later changes cannot reach it. It ends at `fork()`: leases stay with the parent.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing import BridgeOver, FaultInjecting, bytes_of, contents_of, sample_weights
from tests.guarantees.kit import OverEachTransport, scenarios


@scenarios(
    "test_the_snapshot_survives_an_overwritten_source",
    "test_the_same_memory_under_new_values_arrives_anew",
    "test_a_newer_version_does_not_disturb_an_import_in_flight",
    "test_tensors_held_after_release_keep_their_bytes",
    "test_tensors_held_after_both_ends_closed_keep_their_bytes",
    "test_a_killed_publisher_leaves_consumers_their_bytes",
    "test_a_consumers_write_changes_nobody_elses_bytes",
    "test_what_a_consumer_wrote_is_gone_with_the_next_version",
    "test_a_write_ends_its_writer_exactly_if_it_is_not_allowed",
    "test_a_released_update_is_stale",
)
class TestEachTransport(OverEachTransport):
    """Not by the trainer, not by a consumer, not by a death."""


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


def test_a_change_of_the_file_does_not_reach_those_who_imported_it(tmp_path: Path) -> None:
    files = FaultInjecting.over("shared-memory", {"directory": tmp_path})
    with BridgeOver(files) as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        held = bridge.import_update(manifest)
        files.corrupt(manifest, manifest.tensors["embed"].offset)
        assert contents_of(held) == contents_of(sample_weights(1))


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
