"""Importing a group: what arrives, what is checked, who is told; the executor takes it as it is."""

from collections.abc import Mapping
from contextlib import ExitStack

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import (
    ChecksumMismatch,
    ForeignTransport,
    IncompatibleUpdate,
    SegmentError,
    StaleUpdate,
    TransportUnavailable,
    WeightUpdateRejectedError,
)
from rl_bridge.groups.bridge import GroupBridge
from rl_bridge.groups.wanted import TensorParallel, Wanted, everything, parallel, slices
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.testing.faults import arena_address, flip_byte
from tests.groups.meshes import Shards, cut, flat_cut, model, same, share
from tests.groups.rig import Trainers, trainers

SHAPES = {"embed": (8, 6), "layer.w": (6, 8), "norm": (5,), "scale": ()}
DIMS: dict[str, int | None] = {"embed": 0, "layer.w": 1, "norm": None, "scale": None}
HALF = TensorParallel(2, 1, {"embed": 0, "layer.w": 1})
BIG = (2 * LEAF_NBYTES // 4,)  # elements of two leaves


def shards(version: int, num: int = 2) -> list[Shards]:
    return cut(model(SHAPES, version), num, DIMS)


def expected(version: int) -> dict[str, torch.Tensor]:
    """What half of an engine, the second, holds of a version."""
    return share(model(SHAPES, version), 2, 1, DIMS)


def damage(group: Trainers, manifest: GroupManifest, rank: int, offset: int) -> None:
    """Flip a byte of a published part, behind everybody's back."""
    part = manifest.parts[rank]
    end = group.bridges[rank].publisher.end
    flip_byte(arena_address(end, part.update_id, dict(part.handle)) + offset)


# ---- what arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
@pytest.mark.parametrize("consumers", [1, 2, 4])
@pytest.mark.parametrize("num", [1, 2, 4])
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


def test_a_failed_install_leaves_the_version_before() -> None:
    engine = {name: torch.zeros_like(tensor).contiguous() for name, tensor in expected(0).items()}

    class Failing(ModuleInstallAdapter):
        fails = False

        def install(self, manifest: object, tensors: object) -> None:
            super().install(manifest, tensors)  # type: ignore[arg-type]
            if self.fails:
                raise OSError("no more")

    with trainers(2) as group, GroupBridge(parallel(tensor=HALF)) as bridge:
        adapter = Failing(engine)
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        executor.update_weights(group.publish(shards(1), 1))
        adapter.fails = True
        second = group.publish(shards(2), 2)
        with pytest.raises(OSError, match="no more"):
            executor.update_weights(second)
        assert same(engine, expected(1))
        assert executor.active_weight_version == 1
        for publisher in group.publishers:
            (report,) = publisher.consumers(second)
            assert report.state == "rejected"
            assert "no more" in (report.reason or "")
        adapter.fails = False
        executor.update_weights(group.publish(shards(3), 3))
        assert same(engine, expected(3))


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
        liar.import_update(manifest)
        known = liar.consumer.end._groups
        known[manifest.update_id][1]["wanted"] = engines[0].plan(manifest.layout).wanted_digest  # type: ignore[index]
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
        damage(group, manifest, 0, manifest.parts[0].tensors["rl_bridge.leaves"].offset)
        with pytest.raises(ChecksumMismatch, match="leaf list does not make its digest"):
            bridge.import_update(manifest)


def test_a_part_without_a_leaf_list_is_verified_tensor_by_tensor() -> None:
    with trainers(2) as group, GroupBridge(slices({"embed": [slice(0, 1)]})) as bridge:
        for publisher in group.publishers:
            publisher._leaves.add = lambda tensors, trainable: dict(tensors)  # type: ignore[method-assign]
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


def test_a_stale_version_is_refused_before_anything_is_assembled() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        first, second = (group.publish(shards(n), n) for n in (1, 2))
        bridge.import_update(second)
        bridge.acknowledge(second)
        with pytest.raises(StaleUpdate, match="version 2 of publisher"):
            bridge.import_update(first)
        (report,) = group.publishers[0].consumers(first)
        assert (report.state, "StaleUpdate" in (report.reason or "")) == ("rejected", True)


def test_a_version_can_be_rejected_unseen() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(shards(1), 1)
        bridge.reject(manifest, "not today")
        for publisher in group.publishers:
            assert [one.reason for one in publisher.consumers(manifest)] == ["not today"]
        with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
            bridge.import_update(manifest)


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


def test_an_ordinary_bridge_says_what_a_groups_manifest_is_not() -> None:
    with trainers(1) as group, make_weight_bridge("shared-memory") as bridge:
        manifest = group.publish(shards(1, 1), 1)
        with pytest.raises(Exception, match="expected a WeightUpdateManifest"):
            bridge.import_update(manifest)  # type: ignore[arg-type]


def test_options_of_parts_are_checked_when_the_bridge_is_made() -> None:
    with pytest.raises(TypeError, match="max_slots"):
        GroupBridge(max_slots="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        GroupBridge(transports={"shared-memory": {"colour": "red"}})


def test_an_interrupted_assembly_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainers(2, max_slots=1) as group, GroupBridge(max_slots=1) as bridge:
        manifest = group.publish(shards(1), 1)

        def interrupted(*_: object) -> Wanted:
            raise KeyboardInterrupt

        monkeypatch.setattr("rl_bridge.groups.bridge.GroupEnd._manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bridge.import_update(manifest)
        monkeypatch.undo()
        group.release(manifest)
        manifest = group.publish(shards(2), 2)
        assert same(bridge.import_update(manifest), model(SHAPES, 2))


def test_an_assembled_version_that_is_never_imported_is_released() -> None:
    with trainers(2) as group, GroupBridge(max_slots=1) as bridge:
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            bridge.resolve_update(manifest)
            group.release(manifest)
        assert same(bridge.import_update(manifest), model(SHAPES, 3))
