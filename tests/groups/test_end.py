"""What a group leaves behind: nothing that grows, nothing that is held for nobody."""

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor
from rl_bridge.errors import BridgeClosed
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.bridge import _REMEMBERED, GroupEnd
from rl_bridge.groups.wanted import TensorParallel, parallel
from rl_bridge.testing.leaks import assert_nothing_leaks
from tests.groups.meshes import Shards, cut, model
from tests.groups.rig import everywhere, trainers

SHAPES = {"embed": (8, 6), "layer.w": (6, 8), "norm": (5,)}
DIMS: dict[str, int | None] = {"embed": 0, "layer.w": 1, "norm": None}


def shards(version: int) -> list[Shards]:
    return cut(model(SHAPES, version), 2, DIMS)


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
    whole = model(SHAPES)
    engine = {
        "embed": torch.zeros(4, 6, dtype=torch.int32),
        "layer.w": torch.zeros(6, 4, dtype=torch.int32),
        "norm": torch.zeros_like(whole["norm"]),
    }
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

        assert_nothing_leaks(update, num_cycles=30)


def test_refused_versions_leave_nothing_behind() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        versions = iter(range(1, 10_000))

        def refuse() -> None:
            version = next(versions)
            manifest = group.publish(shards(version), version)
            bridge.import_update(manifest)
            bridge.reject(manifest, "not this one")
            group.release(manifest)

        assert_nothing_leaks(refuse, num_cycles=30)


def test_the_active_version_is_still_reported_after_many_refused_ones() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        active = group.publish(shards(1), 1)
        found = bridge.import_update(active)
        bridge.acknowledge(active)
        for version in range(2, 2 + 2 * _REMEMBERED):
            refused = group.publish(shards(version), version)
            bridge.reject(refused, "not this one")
            group.release(refused)
        again = bridge.import_update(active)
        assert all(torch.equal(again[name], one) for name, one in found.items())
        bridge.release(active)
        assert [one.state for one in group.publishers[1].consumers(active)] == ["released"]


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


def test_tensors_outlive_a_closed_bridge() -> None:
    with trainers(1) as group:
        with GroupBridge() as bridge:
            manifest = group.publish(cut(model(SHAPES), 1, {}), 1)
            found = bridge.import_update(manifest)
            tensor = found["layer.w"]
        group.release(manifest)
        assert torch.equal(tensor, model(SHAPES)["layer.w"])
        bridge.close()


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("method", ["import_update", "resolve_update"])
def test_a_closed_bridge_assembles_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch, *, was_used: bool
) -> None:
    monkeypatch.setattr(GroupEnd, "assemble", lambda *_args: pytest.fail("it read the parts"))
    with trainers(2) as group:
        bridge = GroupBridge()
        if was_used:
            assert bridge.consumer
        bridge.close()
        with pytest.raises(BridgeClosed):
            getattr(bridge, method)(group.publish(shards(1), 1))
