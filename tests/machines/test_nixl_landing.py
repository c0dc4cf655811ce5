"""Reads over `nixl` that land where they belong, and what can end them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from rl_bridge.assembly.end import GroupEnd
from rl_bridge.assembly.wanted import TensorParallel, parallel
from rl_bridge.errors import ForeignTransport, StaleUpdate, TransferTimeout, WeightBridgeError
from rl_bridge.groups import GroupBridge, GroupManifest
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.slots import ARRIVING, Slot
from rl_bridge.testing.processes import Child, until
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.server import NIXLPublisher
from tests.groups.meshes import Shards, cut, model
from tests.groups.rig import Trainers, trainers
from tests.helpers import stop
from tests.machines.nixl_roles import Between, overwrite
from tests.machines.roles import Owner, owners_of, publish, shapes

# Several steps of a read in each half, and small tensors in between.
ROWS = 12 << 10
SHAPES = shapes(ROWS)
BY_ROWS: dict[str, Any] = {"rows": ROWS, "all_by_rows": True}
DIMS: dict[str, int | None] = {**dict.fromkeys(SHAPES), "embed": 0, "layer.w": 0, "wide": 0}


def shards(version: int) -> list[Shards]:
    return cut(model(SHAPES, version), 2, DIMS)


def consumer_of(bridge: GroupBridge) -> NIXLConsumer:
    end = bridge.consumer.end
    assert isinstance(end, GroupEnd)
    return cast("NIXLConsumer", end._by_transport["nixl"])


def ring_of(bridge: GroupBridge) -> list[Slot]:
    end = bridge.consumer.end
    assert isinstance(end, GroupEnd)
    assert end._ring is not None
    return end._ring[1]._ring._slots


def update(group: Trainers, bridge: GroupBridge, version: int) -> None:
    manifest = group.publish(shards(version), version)
    check(bridge, manifest, version)
    bridge.acknowledge(manifest)
    bridge.release(manifest)
    group.release(manifest)


def check(bridge: GroupBridge, manifest: object, version: int) -> None:
    found = bridge.import_update(manifest)  # type: ignore[arg-type]  # a text does as well
    for name, expected in model(SHAPES, version).items():
        assert torch.equal(found[name], expected), name
    assert consumer_of(bridge)._resources.landings is not None, "it was copied"


@contextmanager
def reading(**options: object) -> Iterator[GroupBridge]:
    with GroupBridge(transports={"nixl": options}) as bridge:
        yield bridge


def test_no_memory_is_taken_for_the_parts_and_nothing_is_made_once_warm() -> None:
    with trainers(2, "nixl") as group, reading() as bridge:
        counts = []
        for version in range(1, 11):
            update(group, bridge, version)
            end = consumer_of(bridge)
            counts.append(bridge.nixl_counters)
            assert [len(one.arrivals._ring) for one in end._resources.sources.values()] == [0, 0]
            agent = end._resources.agent
            assert agent is not None
            assert agent.num_registered == 2 + len(ring_of(bridge))  # stamps' pages and slots
        assert all(one == counts[4] for one in counts[4:]), counts
        assert len(ring_of(bridge)) <= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_overwritten_while_it_lands_ends_its_version_alone(rank: int) -> None:
    with trainers(2, "nixl") as group, reading(timeout_s=0.5) as bridge:
        update(group, bridge, 1)
        second = group.publish(shards(2), 2)
        part = second.parts[rank]

        def write() -> None:
            overwrite(cast("NIXLPublisher", group.bridges[rank].publisher.end), part)

        with (
            Between(write, at="bytes", times=1) as seen,
            pytest.raises(StaleUpdate, match="wrote to it while it was read"),
        ):
            bridge.import_update(second)
        assert seen.calls == 1
        assert all(slot.update_id is None for slot in ring_of(bridge))
        update(group, bridge, 3)
        assert len(ring_of(bridge)) == 1


def test_an_owner_that_is_killed_while_its_part_lands_ends_its_version_alone() -> None:
    with (
        owners_of(2, **BY_ROWS) as (owners, meet),
        reading(timeout_s=6.0) as bridge,
    ):
        check(bridge, publish(owners, 1), 1)
        second = publish(owners, 2)

        def kill() -> None:
            owners[1].process.kill()
            owners[1].process.join()

        with Between(kill, at="bytes", times=1) as seen, pytest.raises(WeightBridgeError):
            bridge.import_update(second)
        assert seen.calls == 1
        with Child(Owner, rank=1, world_size=2, store=meet, **BY_ROWS) as fresh:
            check(bridge, publish([owners[0], fresh.ready()], 3), 3)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads over TCP do not end while their owner stands still."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def stopped(owners: list[Child], bridge: GroupBridge, manifest: str) -> int:
    """Import while an owner stands still; gives up. Returns whom to wake."""
    part, pid = GroupManifest.from_json(manifest).parts[1].update_id, owners[1].pid
    move = Reading._move_window
    with pytest.MonkeyPatch.context() as patch:

        def moving(one: Reading) -> bool:
            if one._expected[0] == part and not one._next:
                stop(pid)  # before its first byte is asked for: none of them can be there
            return move(one)

        patch.setattr(Reading, "_move_window", moving)
        with pytest.raises(TransferTimeout, match="can be reached"):
            bridge.import_update(manifest)
    return pid


@pytest.mark.usefixtures("over_tcp")
def test_a_slot_where_bytes_may_yet_land_is_used_again_only_when_they_cannot() -> None:
    with (
        owners_of(2, **BY_ROWS, options={"serve": "inline"}) as (owners, _),
        reading(timeout_s=1.0) as bridge,
    ):
        check(bridge, publish(owners, 1), 1)
        pid = stopped(owners, bridge, publish(owners, 2))
        late = [slot for slot in ring_of(bridge) if slot.update_id == ARRIVING]
        end = consumer_of(bridge)
        try:
            assert len(late) == len(end._resources.parked) == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        third = publish(owners, 3)
        found = bridge.import_update(third)
        for name, expected in model(SHAPES, 3).items():
            assert torch.equal(found[name], expected), name

        def settled() -> bool:
            for owner in owners:
                owner.call("help", rounds=200)
            end._resources.sweep()
            return not end._resources.parked

        until(settled, what="the late reads to end")
        for name, expected in model(SHAPES, 3).items():
            assert torch.equal(found[name], expected), name
        assert late[0].update_id is None, "the slot is given back"


@pytest.mark.usefixtures("over_tcp")
def test_memory_goes_only_behind_the_agent_that_may_write_to_it() -> None:
    """Another stream of versions takes the place of one whose read did not end."""
    with (
        reading(timeout_s=1.0) as bridge,
        owners_of(2, **BY_ROWS, options={"serve": "inline"}) as (owners, _),
    ):
        check(bridge, publish(owners, 1), 1)
        pid = stopped(owners, bridge, publish(owners, 2))
        held = consumer_of(bridge)._resources
        ((agent, _),) = held.parked
        with owners_of(2, **BY_ROWS, options={"serve": "inline"}) as (others, _):
            check(bridge, publish(others, 1), 1)
            assert agent.is_closed
            assert not held.parked
        os.kill(pid, signal.SIGCONT)


def test_the_handle_of_another_share_is_not_taken_for_the_bytes_that_were_digested() -> None:
    """Two shares of one version, alike in all but their bytes."""
    sizes = {"a": (1024, 512), "b": (640, 1024), "n": (70_000,)}
    rows = dict.fromkeys(sizes, 0)
    shares = [parallel(tensor=TensorParallel(2, rank, rows)) for rank in range(2)]
    with (
        trainers(2, "nixl", serve="inline") as ranks,
        GroupBridge(shares[0]) as bridge,
        GroupBridge(shares[1], source_rank=1) as other,
    ):
        manifest = ranks.publish(cut(model(sizes, 1), 2, dict(rows)), 1)
        mine = bridge.consumer.import_update(manifest).manifest
        theirs = other.consumer.import_update(manifest).manifest
        assert mine is not None
        assert theirs is not None
        assert mine.table.digest == theirs.table.digest
        document = {name: getattr(mine, name) for name in type(mine).model_fields}
        document |= {"metadata": thaw(mine.metadata), "handle": thaw(theirs.handle)}
        with pytest.raises(ForeignTransport, match="nobody else reads its memory"):
            bridge.import_update(WeightUpdateManifest(**document))


def test_reads_that_never_end_do_not_take_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that hangs, again and again; then one that does not."""

    def late(_: Reading) -> bool:
        raise TransferTimeout("nothing arrived")

    with trainers(2, "nixl", serve="inline") as ranks, GroupBridge(max_slots=2) as bridge:
        manifest = ranks.publish(shards(1), 1)
        check(bridge, manifest, 1)
        bridge.acknowledge(manifest)
        monkeypatch.setattr(Reading, "in_flight", property(lambda _: True))
        monkeypatch.setattr(Reading, "drain", lambda _: False)
        for version in (2, 3):
            hung = ranks.publish(shards(version), version)
            with monkeypatch.context() as hanging:
                hanging.setattr(Reading, "step", late)
                with pytest.raises(TransferTimeout):
                    bridge.import_update(hung)
            kept = [slot.update_id for slot in ring_of(bridge)]
            assert kept == [None, ARRIVING]  # version 1 is leased by its tensors
        monkeypatch.undo()
        check(bridge, ranks.publish(shards(4), 4), 4)
