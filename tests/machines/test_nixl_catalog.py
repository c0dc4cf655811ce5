"""What a bridge over `nixl` lets its user look at: what a publisher holds, and what was made."""

from functools import partial
from typing import Any, cast

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import (
    BridgeClosed,
    ForeignTransport,
    MalformedManifest,
    SegmentError,
    TransferTimeout,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.transports.nixl.agent import AgentError, Counters
from rl_bridge.transports.wire.channel import Channel
from tests.groups.meshes import cut, model
from tests.groups.rig import trainers
from tests.machines.nixl_roles import Between, both, source_of, weights

WEIGHTS = {"w": torch.arange(100)}
inline = partial(both, trainer={"serve": "inline"})

SHAPES = {"embed": (8, 4), "layer.w": (6, 3)}


def nixl_bridge(worker: str = "rollout", **options: Any) -> NIXLTensorBridge:
    made = make_weight_bridge("nixl", source_worker=worker, suspicious="off", **options)
    return cast("NIXLTensorBridge", made)


def test_a_catalog_lists_versions_slots_and_readers_on_both_sides() -> None:
    with inline() as (publisher, consumer):
        assert publisher.catalog() == ()
        first = publisher.publish(weights(1), weight_version=1)
        second = publisher.publish(weights(2), weight_version=2)
        found = []

        def look() -> None:
            found.append(publisher.catalog())

        with Between(look, at="bytes", times=1):
            consumer.import_update(second)
        (held,) = found
        assert [entry.update_id for entry in held] == [first.update_id, second.update_id]
        assert held[0].slot != held[1].slot
        assert held[1].arena_nbytes == second.table.arena_nbytes <= held[1].nbytes
        assert held[0].readers == ()
        assert held[1].readers[0].startswith("worker 'rollout' rank 0")
        publisher.release(first.update_id)
        for given in (first, second, first.to_json()):  # the first is no version any more
            assert consumer.catalog(given) == publisher.catalog()
        assert [entry.update_id for entry in publisher.catalog()] == [None, second.update_id]


def test_a_catalog_leaves_no_record() -> None:
    with inline() as (publisher, looker):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        assert len(looker.catalog(manifest)) == 1
        assert publisher.consumers() == []


def test_a_catalog_over_a_new_connection_keeps_the_importers_record() -> None:
    with inline() as (publisher, consumer):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
        source_of(consumer).client.hang_up()
        consumer.catalog(manifest)
        found = [(one.presence, one.state) for one in publisher.holders(manifest)]
        assert found == [("alive", "acknowledged")]


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with inline() as (publisher, consumer):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        consumer.catalog(manifest)

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "receive", lambda _, *, until: None)
            with pytest.raises(TransferTimeout):
                consumer.catalog(manifest)
        publisher.consumers()  # it has answered by now
        publisher.release(manifest.update_id)
        assert [entry.update_id for entry in consumer.catalog(manifest)] == [None]


def test_a_catalog_without_a_way_to_the_publisher_is_refused_like_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with inline() as (publisher, _), nixl_bridge(timeout_s=0.1) as looker:
        manifest = publisher.publish(WEIGHTS, weight_version=1)

        def no_way(*_: object, **__: object) -> str:
            raise AgentError("as planned.")

        monkeypatch.setattr("rl_bridge.transports.nixl.agent.Agent.add_peer", no_way)
        with pytest.raises(WeightBridgeUnavailableError, match="as planned") as caught:
            looker.catalog(manifest)
        assert not isinstance(caught.value, AgentError)


def test_a_catalog_of_a_foreign_or_closed_publisher_is_refused() -> None:
    with inline() as (publisher, consumer):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        with make_weight_bridge("local-clone") as other:
            foreign = other.publish(WEIGHTS, weight_version=1)
        with pytest.raises(ForeignTransport, match="local-clone"):
            consumer.catalog(foreign)
        with pytest.raises(MalformedManifest, match="catalog got a int"):
            consumer.catalog(cast("Any", 5))
        publisher.close()
        assert publisher.catalog() == ()
        with pytest.raises(SegmentError):
            consumer.catalog(manifest)
        consumer.close()
        with pytest.raises(BridgeClosed):
            consumer.catalog(manifest)


def test_counters_are_a_snapshot_over_both_halves() -> None:
    with nixl_bridge(serve="inline") as bridge:
        assert bridge.counters == Counters()
        manifest = bridge.publish(WEIGHTS, weight_version=1)
        published = bridge.counters
        assert published == Counters(registrations=1)
        bridge.import_update(manifest)
        bridge.publish(WEIGHTS, weight_version=2)  # in another slot
        imported = bridge.counters
        assert published == Counters(registrations=1), "it changed behind its reader's back"
        assert imported.registrations > 2
        assert imported.connections == 1
        assert imported.plans > 0
    assert bridge.counters == imported


def test_a_group_bridge_has_counters_and_any_bridge_reads_a_ranks_catalog() -> None:
    shards = cut(model(SHAPES, 1), 2, dict.fromkeys(SHAPES, 0))
    with trainers(2, "nixl") as group, GroupBridge() as bridge, nixl_bridge() as looker:
        assert bridge.nixl_counters == Counters()
        manifest = group.publish(shards, 1)
        bridge.import_update(manifest)
        assert bridge.nixl_counters.connections == 2
        for part in manifest.parts:
            assert [entry.update_id for entry in looker.catalog(part)] == [part.update_id]
