"""Importing a group: what arrives, what is checked, what is refused, who is told, what is left."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.assembly.end import GroupEnd
from rl_bridge.assembly.wanted import TensorParallel, Wanted, everything, parallel, slices
from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    DigestMismatch,
    ForeignTransport,
    IncompatibleUpdate,
    MalformedManifest,
    SegmentError,
    SlotsExhausted,
    StaleUpdate,
    TransportUnavailable,
    WeightUpdateRejectedError,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.testing.leaks import assert_nothing_leaks
from tests.groups.meshes import DIMS, SHAPES, Shards, cut, flat_cut, model, same, shards, share
from tests.groups.rig import damage, everywhere, trainers

HALF = TensorParallel(2, 1, {"embed": 0, "layer.w": 1})
BIG = (2 * LEAF_NBYTES // 4,)  # elements of two leaves


def expected(version: int) -> dict[str, torch.Tensor]:
    """What half of an engine, the second, holds of a version."""
    return share(model(SHAPES, version), 2, 1, DIMS)


# ---- what arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
@pytest.mark.parametrize(("num", "consumers"), [(1, 4), (4, 1), (2, 2), (4, 2)])
def test_every_consumer_gets_its_share_of_every_version(
    num: int, consumers: int, transport: str
) -> None:
    with trainers(num, transport) as group, ExitStack() as stack:
        engines = [
            stack.enter_context(GroupBridge(parallel(tensor=TensorParallel(consumers, rank, cuts))))
            for rank, cuts in enumerate([{"embed": 0, "layer.w": 1}] * consumers)
        ]
        for version in (1, 2, 3):
            manifest = group.publish(shards(version, num), version)
            whole = model(SHAPES, version)
            for rank, engine in enumerate(engines):
                found = engine.import_update(manifest.to_json())
                assert torch.equal(found["embed"], whole["embed"].chunk(consumers)[rank])
                assert torch.equal(found["layer.w"], whole["layer.w"].chunk(consumers, 1)[rank])
                assert torch.equal(found["norm"], whole["norm"])
                engine.acknowledge(manifest)
                assert engine.active_weight_version == version
            for engine in engines:
                engine.release(manifest)
            group.release(manifest)


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_an_executor_takes_a_group_as_it_is(mode: str) -> None:
    engine = {name: torch.zeros_like(tensor).contiguous() for name, tensor in expected(0).items()}
    with trainers(2) as group, GroupBridge(parallel(tensor=HALF)) as bridge:
        adapter = ModuleInstallAdapter(engine, mode=mode)  # type: ignore[arg-type]
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            executor.update_weights(manifest)
            assert same(engine, expected(version))
            assert executor.active_weight_version == version
            assert executor.active_weight_update_id == manifest.update_id
            group.release(manifest)


def test_every_rank_hears_what_became_of_a_version() -> None:
    with trainers(3) as group, GroupBridge(slices({"norm": None})) as bridge:
        manifest = group.publish(shards(1, 3), 1)
        bridge.import_update(manifest)
        bridge.acknowledge(manifest)
        roots = set()
        for publisher in group.publishers:  # also those of which nothing was needed
            (report,) = publisher.consumers(manifest)
            assert report.state == "acknowledged"
            assert report.proof is not None
            assert report.proof["group_root"] == manifest.root
            roots.add(report.proof["assembled_root"])
        assert len(roots) == 1
        bridge.release(manifest)
        assert [p.consumers(manifest)[0].state for p in group.publishers] == ["released"] * 3


def test_assemblies_of_the_same_layout_are_compared() -> None:
    half = slices({"embed": [slice(0, 4)]})
    with trainers(2) as group, ExitStack() as stack:
        engines = [stack.enter_context(GroupBridge(one)) for one in (half, half, everything())]
        manifest = group.publish(shards(1), 1)
        for engine in engines:
            engine.import_update(manifest)
            engine.acknowledge(manifest)
        publisher = group.publishers[1]
        assert len(publisher.assembled_roots(manifest)) == 2
        other = slices({"embed": [slice(4, 8)]})
        liar = stack.enter_context(GroupBridge(other))
        lying = liar.consumer.import_update(manifest).manifest
        assert lying is not None
        wanted = engines[0].plan(manifest.layout).wanted_digest
        lying.__dict__["metadata"] = {**lying.metadata, "wanted": wanted}
        liar.acknowledge(manifest)
        with pytest.raises(ChecksumMismatch, match="wanted the same and assembled different bytes"):
            publisher.assembled_roots(manifest)


def test_the_parts_are_free_as_soon_as_they_are_assembled() -> None:
    with trainers(2, max_slots=1) as group, GroupBridge() as bridge:
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            found = bridge.import_update(manifest)
            bridge.acknowledge(manifest)
            group.release(manifest)
        assert same(found, model(SHAPES, 3))


def test_a_version_that_an_engine_still_reads_is_not_overwritten() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        held = []
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            held.append(bridge.import_update(manifest)["embed"])
            bridge.acknowledge(manifest)
            bridge.release(manifest)
            group.release(manifest)
        for version, tensor in enumerate(held, start=1):
            assert torch.equal(tensor, model(SHAPES, version)["embed"])


def test_the_plan_is_made_once() -> None:
    calls = []

    def wanted(wholes: Mapping[str, object]) -> object:
        calls.append(len(wholes))
        return everything()(wholes)  # type: ignore[arg-type]

    with trainers(2) as group, GroupBridge(wanted) as bridge:  # type: ignore[arg-type]
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            bridge.import_update(manifest)
            assert bridge.plan(manifest.layout).overfetch >= 1.0
            bridge.release(manifest)
            group.release(manifest)
        assert calls == [4]


def test_the_timings_tell_how_long_the_assembly_took() -> None:
    with trainers(1) as group, GroupBridge() as bridge:
        manifest = group.publish(shards(1, 1), 1)
        bridge.import_update(manifest)
        assert bridge.timings(manifest)["assemble"] > 0


# ---- what is verified ---------------------------------------------------------------------------


def test_a_flipped_byte_of_what_is_needed_is_found_before_anything_is_handed_out() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        first = group.publish(shards(1), 1)
        bridge.import_update(first)
        bridge.acknowledge(first)
        manifest = group.publish(shards(2), 2)
        damage(group, manifest, 1, manifest.parts[1].tensors["embed"].offset)
        with pytest.raises(ChecksumMismatch, match="'embed' in version 2, part of rank 1: bytes 0"):
            bridge.import_update(manifest)
        assert bridge.active_weight_version == 1
        assert bridge.update_status(manifest) == "rejected"
        for publisher in group.publishers:
            assert [one.state for one in publisher.consumers(manifest)] == ["rejected"]
        with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
            bridge.import_update(manifest)


@pytest.mark.parametrize("rank", [0, 1], ids=["copied", "not copied yet"])
def test_a_part_that_is_overwritten_in_the_middle_of_a_strided_copy_is_found(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, copyto, num_copied = model({"w": (64, 2 * LEAF_NBYTES // 4)}), np.copyto, 0
    with trainers(2) as group, GroupBridge(slices({"w": [None, slice(9)]})) as bridge:
        manifest = group.publish(cut(whole, 2, {"w": 0}), 1)

        def copy(here: npt.NDArray[Any], there: npt.NDArray[Any]) -> None:
            nonlocal num_copied
            copyto(here, there)
            if not num_copied:
                damage(group, manifest, rank, manifest.parts[rank].tensors["w"].offset)
            num_copied += 1

        monkeypatch.setattr(np, "copyto", copy)
        with pytest.raises(ChecksumMismatch, match=f"'w' in version 1, part of rank {rank}"):
            bridge.import_update(manifest)
        assert num_copied == 2
        again = group.publish(cut(whole, 2, {"w": 0}), 2)
        assert torch.equal(bridge.import_update(again)["w"], whole["w"][:, :9])


def test_only_the_leaves_that_are_needed_are_read() -> None:
    whole = model({"w": BIG})
    with trainers(1) as group, ExitStack() as stack:
        first, second = (
            stack.enter_context(GroupBridge(slices({"w": [where]})))
            for where in (slice(0, 10), slice(BIG[0] - 10, BIG[0]))
        )
        manifest = group.publish(cut(whole, 1, {"w": 0}), 1)
        damage(group, manifest, 0, manifest.parts[0].tensors["w"].offset + LEAF_NBYTES)
        assert torch.equal(first.import_update(manifest)["w"], whole["w"][:10])
        with pytest.raises(ChecksumMismatch, match="bytes 131072 to 262144"):
            second.import_update(manifest)


def test_a_damaged_leaf_list_is_found() -> None:
    few = slices({"w": [slice(0, 10)]})
    with trainers(1) as group, GroupBridge(few) as bridge:
        manifest = group.publish(cut(model({"w": BIG}), 1, {"w": 0}), 1)
        damage(group, manifest, 0, manifest.parts[0].table.leaves_offset)
        with pytest.raises(ChecksumMismatch, match="leaf list does not make its digest"):
            bridge.import_update(manifest)


def test_a_part_without_a_leaf_list_is_verified_tensor_by_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a part on a GPU has none.
    made = TensorTable.pack
    monkeypatch.setattr(
        TensorTable, "pack", lambda *args, **options: made(*args, **{**options, "leaves": False})
    )
    with trainers(2) as group, GroupBridge(slices({"embed": [slice(0, 1)]})) as bridge:
        manifest = group.publish(shards(1), 1)
        assert bridge.plan(manifest.layout).verified_nbytes == 4 * 6 * 4
        assert torch.equal(bridge.import_update(manifest)["embed"], model(SHAPES, 1)["embed"][:1])
        second = group.publish(shards(2), 2)
        damage(group, second, 0, second.parts[0].tensors["embed"].offset + 95)
        with pytest.raises(ChecksumMismatch, match="part of rank 0: bytes 0 to 96"):
            bridge.import_update(second)


def test_wrong_placements_are_found_where_the_whole_digest_is_known() -> None:
    """Two ranks whose placements are swapped cover everything, and mean another tensor."""
    whole = model({"w": (2 * BIG[0],)})
    ranks = flat_cut(whole, 2)
    swapped: list[Shards] = [(ranks[0][0], ranks[1][1]), (ranks[1][0], ranks[0][1])]
    with trainers(2) as group, make_weight_bridge("local-clone") as unsharded:
        right = unsharded.publish(whole, weight_version=1)
        assert group.publish(ranks, 1).root == right.root
        assert group.publish(swapped, 2).root != right.root


# ---- what is refused ----------------------------------------------------------------------------


def test_a_missing_wanted_tensor_is_reported_to_the_publishers() -> None:
    with trainers(2) as group, GroupBridge(slices({"lm_head": None})) as bridge:
        manifest = group.publish(shards(1), 1)
        with pytest.raises(IncompatibleUpdate, match="'lm_head' is wanted"):
            bridge.import_update(manifest)
        (report,) = group.publishers[1].consumers(manifest)
        assert (report.state, "lm_head" in (report.reason or "")) == ("rejected", True)


def test_a_withdrawn_version_cannot_be_imported_and_the_one_before_stays() -> None:
    with trainers(2, max_slots=2) as group, GroupBridge() as bridge:
        first = group.publish(shards(1), 1)
        bridge.import_update(first)
        bridge.acknowledge(first)
        second = group.publish(shards(2), 2)
        group.release(first)
        group.publishers[1].release(second)
        third = group.publishers[1].bridge
        third.publish({"x": torch.zeros(8)}, weight_version=3)
        third.publish({"x": torch.zeros(8)}, weight_version=4)
        with pytest.raises((StaleUpdate, SegmentError)):
            bridge.import_update(second)
        assert bridge.active_weight_version == 1


def test_a_rank_that_is_gone_takes_only_its_version_along() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        first = group.publish(shards(1), 1)
        found = bridge.import_update(first)
        bridge.acknowledge(first)
        second = group.publish(shards(2), 2)
        group.bridges[1].close()
        with pytest.raises(SegmentError):
            bridge.import_update(second)
        assert same(found, model(SHAPES, 1))
        (report,) = group.publishers[0].consumers(second)
        assert report.state == "rejected"


def test_a_bridge_for_groups_publishes_nothing() -> None:
    with GroupBridge() as bridge, pytest.raises(TransportUnavailable, match="with GroupPublisher"):
        bridge.publish({"w": torch.zeros(1)}, weight_version=1)


def test_an_ordinary_update_is_none_of_a_groups() -> None:
    with make_weight_bridge("shared-memory") as publisher, GroupBridge() as bridge:
        manifest = publisher.publish({"w": torch.zeros(1)}, weight_version=1)
        with pytest.raises(ForeignTransport, match="travels by 'shared-memory'"):
            bridge.import_update(manifest)


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_the_bridge_of_the_parts_transport_takes_a_group(transport: str) -> None:
    with trainers(2, transport) as group, make_weight_bridge(transport) as bridge:
        adapter = ModuleInstallAdapter(engine := model(SHAPES))
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            executor.update_weights(manifest.to_json())
            assert same(engine, model(SHAPES, version))
            group.release(manifest)
        states = [one.consumers(manifest)[0].state for one in group.publishers]
        assert states == ["acknowledged"] * 2


def test_a_bridge_reads_the_share_that_is_wanted() -> None:
    with (
        trainers(2) as group,
        make_weight_bridge("shared-memory", wanted=parallel(tensor=HALF)) as bridge,
    ):
        assert same(bridge.import_update(group.publish(shards(1), 1)), expected(1))


def test_a_bridge_holds_as_many_assembled_versions_as_it_has_slots() -> None:
    with trainers(2) as group, make_weight_bridge("shared-memory", max_slots=6) as bridge:
        held = []
        for version in range(1, 7):
            manifest = group.publish(shards(version), version)
            held.append(bridge.import_update(manifest))
            group.release(manifest)
        assert all(same(one, model(SHAPES, number)) for number, one in enumerate(held, start=1))
        with pytest.raises(SlotsExhausted, match="all 6 slots"):
            bridge.import_update(group.publish(shards(7), 7))


def test_a_bridge_refuses_parts_that_travel_by_another_transport() -> None:
    with trainers(2, "local-clone") as group, make_weight_bridge("shared-memory") as bridge:
        manifest = group.publish(shards(1), 1)
        with pytest.raises(ForeignTransport, match="import it by rl_bridge"):
            bridge.import_update(manifest)
        assert group.publishers[0].consumers(manifest) == []


def test_an_interrupted_assembly_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainers(2, max_slots=1) as group, GroupBridge(max_slots=1) as bridge:
        manifest = group.publish(shards(1), 1)

        def interrupted(*_: object) -> Wanted:
            raise KeyboardInterrupt

        monkeypatch.setattr("rl_bridge.assembly.end._assembled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bridge.import_update(manifest)
        monkeypatch.undo()
        group.release(manifest)
        manifest = group.publish(shards(2), 2)
        assert same(bridge.import_update(manifest), model(SHAPES, 2))


# ---- manifests that were changed on their way ----------------------------------------------------


EVEN = {"a": (8, 3), "b": (8, 3)}
SHARDS = cut(model(EVEN), 2, {"a": 0, "b": 0})


def of_parts(
    manifest: GroupManifest, parts: list[WeightUpdateManifest], layout: GroupLayout | None = None
) -> GroupManifest:
    """A manifest of other parts, with every digest that anybody can make himself."""
    layout = layout or manifest.layout
    return GroupManifest.build(parts, layout, [None] * len(parts), metadata=manifest.metadata)


def each_part(manifest: GroupManifest, **changes: Any) -> GroupManifest:
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
    "a later version": lambda manifest: each_part(manifest, weight_version=99),
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
        assert torch.equal(found["a"], model(EVEN)["a"][4:])


def test_a_header_that_was_sent_before_the_group_is_compared_with_its_part() -> None:
    with trainers(2, "broadcast", backend="gloo") as group, GroupBridge() as bridge:
        for version in (1, 2):
            manifest = group.publish(SHARDS, version)
            later = each_part(manifest, weight_version=99)
            with pytest.raises(DigestMismatch, match="changed on its way"):
                bridge.import_update(later)
            bridge.import_update(manifest)
            bridge.acknowledge(manifest)


def test_a_handle_that_leads_nowhere_does_not_reject_what_was_published() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(SHARDS, 1)
        with pytest.raises(MalformedManifest):
            bridge.import_update(elsewhere(manifest))
        bridge.import_update(manifest)
        bridge.acknowledge(manifest)
        (report,) = group.publishers[1].consumers(manifest)
        assert report.state == "acknowledged"


def test_a_changed_copy_is_refused_again_without_a_read() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        copy = elsewhere(group.publish(SHARDS, 1))
        with pytest.raises(MalformedManifest):
            bridge.import_update(copy)
        with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
            bridge.import_update(copy)


def test_a_part_says_that_it_comes_with_its_group() -> None:
    with trainers(2) as group, make_weight_bridge("shared-memory") as bridge:
        manifest = group.publish(SHARDS, 1)
        with pytest.raises(DigestMismatch, match="a part of a group comes with its group"):
            bridge.import_update(manifest.parts[0])


# ---- what this side lacks -----------------------------------------------------------------------


# ---- what is left behind -------------------------------------------------------------------------


def test_the_memory_of_a_released_version_is_used_again() -> None:
    with trainers(2, max_slots=1) as group, GroupBridge(max_slots=1) as bridge:
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            bridge.import_update(manifest)
            bridge.acknowledge(manifest)
            bridge.release(manifest)
            group.release(manifest)


def test_threads_that_import_in_turn_do_not_take_each_others_memory() -> None:
    with trainers(2) as group, GroupBridge(max_slots=3) as bridge:
        manifests = [group.publish(shards(version), version) for version in (1, 2, 3)]
        for found, version in zip(
            everywhere([lambda m=m: bridge.import_update(m) for m in manifests]),  # type: ignore[misc]
            (1, 2, 3),
            strict=True,
        ):
            assert isinstance(found, Mapping)
            assert torch.equal(found["embed"], model(SHAPES, version)["embed"])


def test_many_updates_leave_nothing_behind() -> None:
    wanted = parallel(tensor=TensorParallel(2, 1, {"embed": 0, "layer.w": 1}))
    engine = share(model(SHAPES), 2, 1, DIMS)
    with trainers(2) as group, GroupBridge(wanted) as bridge:
        adapter = ModuleInstallAdapter(engine, mode="flip")
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        versions = iter(range(1, 10_000))

        def update() -> None:
            version = next(versions)
            manifest = group.publish(shards(version), version)
            executor.update_weights(manifest)
            assert torch.equal(engine["embed"], model(SHAPES, version)["embed"][4:])
            group.release(manifest)

        assert_nothing_leaks(update, num_cycles=8)


def test_a_bridge_that_is_dropped_is_gone_and_its_tensors_stay() -> None:
    with trainers(1) as group:
        bridge = GroupBridge()
        manifest = group.publish(cut(model(SHAPES), 1, {}), 1)
        tensor = bridge.import_update(manifest)["embed"]
        gone = weakref.ref(bridge)
        del bridge
        gc.collect()
        assert gone() is None
        assert torch.equal(tensor, model(SHAPES)["embed"])


@pytest.mark.parametrize("was_used", [True, False])
def test_a_closed_bridge_assembles_nothing(
    monkeypatch: pytest.MonkeyPatch, *, was_used: bool
) -> None:
    monkeypatch.setattr(GroupEnd, "assemble", lambda *_args: pytest.fail("it read the parts"))
    with trainers(2) as group:
        bridge = GroupBridge()
        if was_used:
            assert bridge.consumer
        bridge.close()
        with pytest.raises(BridgeClosed):
            bridge.import_update(group.publish(shards(1), 1))
