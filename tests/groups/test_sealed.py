"""What ranks seal beside their parts: a group's manifest that was changed on its way is refused."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.errors import (
    DigestMismatch,
    MalformedManifest,
    SlotsExhausted,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.groups.bridge import GroupBridge
from rl_bridge.groups.wanted import slices
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from tests.groups.meshes import cut, model
from tests.groups.rig import trainers

SHAPES = {"a": (8, 3), "b": (8, 3)}
SHARDS = cut(model(SHAPES), 2, {"a": 0, "b": 0})


def of_parts(
    manifest: GroupManifest, parts: list[WeightUpdateManifest], layout: GroupLayout | None = None
) -> GroupManifest:
    """A manifest of other parts, with every digest that anybody can make himself."""
    layout = layout or manifest.layout
    return GroupManifest.build(parts, layout, [None] * len(parts), metadata=manifest.metadata)


def each(manifest: GroupManifest, **changes: Any) -> GroupManifest:
    return of_parts(manifest, [part.model_copy(update=changes) for part in manifest.parts])


def first(manifest: GroupManifest, **changes: Any) -> GroupManifest:
    parts = list(manifest.parts)
    return of_parts(manifest, [parts[0].model_copy(update=changes), *parts[1:]])


def with_other_halves(manifest: GroupManifest) -> GroupManifest:
    """Each rank is said to hold the other one's half: that covers as well."""
    placements = [placed for _, placed in reversed(SHARDS)]
    layout = GroupLayout.build([part.table for part in manifest.parts], placements)
    return of_parts(manifest, list(manifest.parts), layout)


def with_metadata(manifest: GroupManifest) -> GroupManifest:
    parts = list(manifest.parts)
    return GroupManifest.build(parts, manifest.layout, [None, None], metadata={"step": 7})


def elsewhere(manifest: GroupManifest) -> GroupManifest:
    return first(manifest, handle={})


CHANGES: dict[str, Callable[[GroupManifest], GroupManifest]] = {
    "a later version": lambda manifest: each(manifest, weight_version=99),
    "other metadata": with_metadata,
    # (The second half alone is wanted below: of the first rank's part nothing is read.)
    "another stream": lambda manifest: first(manifest, publisher_id="0" * 32),
    "another id": lambda manifest: first(manifest, update_id="0" * 32),
    "exchanged ranges": with_other_halves,
}


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_manifest_is_refused_and_the_published_one_still_arrives(
    change: str, transport: str
) -> None:
    wanted = slices({"a": [slice(4, 8)]})
    with trainers(2, transport) as group, GroupBridge(wanted) as bridge:
        manifest = group.publish(SHARDS, 1)
        with pytest.raises(DigestMismatch, match="changed on its way"):
            bridge.import_update(CHANGES[change](manifest).to_json())
        found = bridge.import_update(manifest.to_json())
        assert torch.equal(found["a"], model(SHAPES)["a"][4:])


def test_a_header_that_was_sent_before_the_group_is_compared_with_its_part() -> None:
    with trainers(2, "broadcast", backend="gloo") as group, GroupBridge() as bridge:
        for version in (1, 2):
            manifest = group.publish(SHARDS, version)
            later = each(manifest, weight_version=99)
            with pytest.raises(DigestMismatch, match="changed on its way"):
                bridge.import_update(later)
            bridge.import_update(manifest)
            bridge.acknowledge(manifest)


def test_a_changed_copy_is_refused_again_without_a_read() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        copy = elsewhere(group.publish(SHARDS, 1))
        with pytest.raises(MalformedManifest):
            bridge.import_update(copy)
        with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
            bridge.import_update(copy)


def test_a_handle_that_leads_nowhere_does_not_reject_what_was_published() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(SHARDS, 1)
        with pytest.raises(MalformedManifest):
            bridge.import_update(elsewhere(manifest))
        bridge.import_update(manifest)
        bridge.acknowledge(manifest)
        (report,) = group.publishers[1].consumers(manifest)
        assert report.state == "acknowledged"


def test_a_changed_copy_does_not_replace_the_report_about_the_published_one() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(SHARDS, 1)
        bridge.import_update(manifest)
        bridge.acknowledge(manifest)
        bridge.release(manifest)
        with pytest.raises(MalformedManifest):
            bridge.import_update(elsewhere(manifest))
        (report,) = group.publishers[1].consumers(manifest)
        assert report.state == "released"


def test_a_part_says_that_it_comes_with_its_group() -> None:
    with trainers(2) as group, make_weight_bridge("shared-memory") as bridge:
        manifest = group.publish(SHARDS, 1)
        with pytest.raises(DigestMismatch, match="import that with GroupBridge"):
            bridge.import_update(manifest.parts[0])


# ---- what this side lacks -----------------------------------------------------------------------


def test_a_version_that_finds_no_room_may_come_again() -> None:
    with trainers(2) as group, GroupBridge(max_slots=1) as bridge:
        first_one = group.publish(SHARDS, 1)
        held = bridge.import_update(first_one)
        second = group.publish(SHARDS, 2)
        with pytest.raises(SlotsExhausted):
            bridge.import_update(second)
        assert group.publishers[0].consumers(second) == []
        bridge.release(first_one)
        del held
        assert torch.equal(bridge.import_update(second)["a"], model(SHAPES)["a"])


@contextmanager
def no_more_files() -> Iterator[None]:
    """A process that may open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_descriptors_may_import_the_version_later() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(SHARDS, 1)
        with no_more_files(), pytest.raises((OSError, WeightBridgeError)):
            bridge.import_update(manifest)
        assert torch.equal(bridge.import_update(manifest)["a"], model(SHAPES)["a"])
