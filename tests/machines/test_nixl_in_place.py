"""Versions that lie in the trainer's own tensors: what a writer does is seen, and refused."""

from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import SlotsExhausted, StaleUpdate, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.memory.packing import checked_block
from rl_bridge.memory.parts import PartNeeds
from rl_bridge.testing.processes import Child
from rl_bridge.testing.tensors import bytes_of
from tests.machines.nixl_roles import (
    SIZE,
    Between,
    Reader,
    Trainer,
    both,
    publisher_end,
    weights,
)
from tests.machines.roles import Engine, owners_of, publish

in_place = partial(both, trainer={"in_place": True})


def take(consumer: NIXLTensorBridge, manifest: WeightUpdateManifest) -> bytes:
    """Import, copy out and let go."""
    tensors = consumer.import_update(manifest)
    found = bytes_of(tensors["w"])
    consumer.acknowledge(manifest.update_id)
    del tensors
    consumer.release(manifest.update_id)
    return found


def test_versions_are_read_where_they_lie_and_registered_once() -> None:
    live = weights(1)
    with in_place() as (publisher, consumer):
        counts = []
        for version in range(1, 8):
            live["w"].copy_(weights(version)["w"])
            manifest = publisher.publish(live, weight_version=version)
            assert take(consumer, manifest) == bytes_of(live["w"])
            publisher.release(manifest.update_id)
            counts.append((publisher.counters, consumer.counters))
        assert publisher_end(publisher).nbytes < SIZE, "there is a copy"
        assert all(one == counts[4] for one in counts[4:]), counts


def test_a_trainer_that_writes_during_the_read_without_a_word_is_found_out() -> None:
    live = weights(1)
    with in_place(timeout_s=0.5) as (publisher, consumer):
        manifest = publisher.publish(live, weight_version=1)
        with (
            Between(lambda: live["w"][-8:].fill_(7), at="bytes", times=1) as seen,
            pytest.raises(StaleUpdate, match="without releasing it"),
        ):
            consumer.import_update(manifest)
        assert seen.calls == 1
        publisher.release(manifest.update_id)
        newer = publisher.publish(live, weight_version=2)
        assert take(consumer, newer) == bytes_of(live["w"])


def test_a_torn_read_is_repeated_until_the_writer_is_done() -> None:
    live = weights(1)
    was = iter((torch.full((8,), 7), weights(1)["w"][-8:]))
    with in_place(timeout_s=20.0) as (publisher, consumer):
        manifest = publisher.publish(live, weight_version=1)
        # (First in the middle of a read, and then before the next one has come to those bytes.)
        with Between(lambda: live["w"][-8:].copy_(next(was)), at="bytes", times=2) as seen:
            found = take(consumer, manifest)
        assert seen.calls == 2
        assert found == bytes_of(weights(1)["w"])


def test_a_release_in_the_middle_of_a_read_ends_it() -> None:
    live = weights(1)
    with in_place(timeout_s=20.0) as (publisher, consumer):
        manifest = publisher.publish(live, weight_version=1)

        def step() -> None:
            publisher.release(manifest.update_id)
            live["w"].fill_(3)

        with Between(step, at="bytes", times=1), pytest.raises(StaleUpdate, match="released it"):
            consumer.import_update(manifest)
        newer = publisher.publish(live, weight_version=2)
        assert take(consumer, newer) == bytes_of(live["w"])


def test_a_version_that_was_not_released_is_in_the_way_of_the_next() -> None:
    with in_place() as (publisher, consumer):
        live = weights(1)
        first = publisher.publish(live, weight_version=1)
        with pytest.raises(SlotsExhausted, match="Release it before the weights change"):
            publisher.publish(live, weight_version=2)
        assert take(consumer, first) == bytes_of(live["w"])


def test_other_tensors_are_registered_in_place_of_the_first_ones() -> None:
    with in_place() as (publisher, consumer):
        for version in (1, 2, 3):
            live = weights(version)
            manifest = publisher.publish(live, weight_version=version)
            assert take(consumer, manifest) == bytes_of(live["w"])
            publisher.release(manifest.update_id)
            assert publisher_end(publisher)._host.num_registered == 3  # stamp, tensor, leaf list


def test_tensors_of_other_sizes_where_others_were_are_read_without_a_failure() -> None:
    room = torch.arange(4096.0)
    with in_place() as (publisher, consumer):
        for version, (first, second) in enumerate(((64, 512), (512, 64), (64, 512)), 1):
            live = {"v": room[2048 : 2048 + second], "w": room[:first]}
            manifest = publisher.publish(live, weight_version=version)
            assert take(consumer, manifest) == bytes_of(live["w"])
            publisher.release(manifest.update_id)
        far: Any = consumer.consumer.end
        assert far._past.connections == 0, "an agent was given up"


def test_tensors_that_are_read_are_kept_though_others_take_their_place() -> None:
    with in_place(timeout_s=20.0) as (publisher, consumer):
        first = publisher.publish(weights(1), weight_version=1)
        kept: list[int] = []

        def replace() -> None:
            publisher.release(first.update_id)
            publisher.publish(weights(2), weight_version=2)
            kept.append(publisher_end(publisher)._host.num_registered)

        with Between(replace, at="bytes", times=1), pytest.raises(StaleUpdate):
            consumer.import_update(first)
        assert kept == [5], "what is being read is given back"
        assert publisher_end(publisher)._host.num_registered == 3


def test_the_leaf_list_lies_behind_the_tensors_of_each_version() -> None:
    live = weights(1)
    with in_place() as (publisher, consumer):
        for version in (1, 2):
            live["w"].add_(1)
            manifest = publisher.publish(live, weight_version=version)
            imported: Any = consumer.import_update(manifest)
            table = manifest.table
            raw = bytes(imported.pin.buffer)[table.leaves_offset :][: table.leaves_nbytes]
            assert raw == publisher.publisher.leaf_list == checked_block(manifest, raw)
            del imported
            consumer.release_imported(manifest.update_id)
            publisher.release(manifest.update_id)


def test_a_tensor_that_is_not_contiguous_is_refused_by_name() -> None:
    with (
        in_place() as (publisher, _),
        pytest.raises(WeightBridgeUnavailableError, match="'w' is strided"),
    ):
        publisher.publish({"w": torch.zeros(4, 4).t()}, weight_version=1)


def test_an_empty_tensor_is_no_range() -> None:
    with in_place() as (publisher, consumer):
        live = {"none": torch.empty(0), "w": torch.arange(5)}
        manifest = publisher.publish(live, weight_version=1)
        tensors = consumer.import_update(manifest)
        assert tensors["none"].shape == (0,)
        assert tensors["w"].tolist() == [0, 1, 2, 3, 4]


def test_what_a_reader_of_a_part_wrote_into_an_earlier_version_decides_nothing() -> None:
    live = {"w": torch.arange(4 * LEAF_NBYTES // 4, dtype=torch.int32).view(4, -1)}
    with in_place() as (publisher, consumer):
        for version in range(1, 4):
            live["w"].add_(1)
            manifest = publisher.publish(live, weight_version=version)
            needs = PartNeeds.of(manifest.table, [(0, 1, 3, 0, LEAF_NBYTES)])
            tensors = consumer.consumer.import_update(manifest, scope=needs)
            assert torch.equal(tensors["w"][1:3], live["w"][1:3])
            tensors["w"][1:3].zero_()
            consumer.release_imported(manifest)
            tensors.forget()
            publisher.release(manifest.update_id)


def test_another_process_reads_in_place_over_tcp() -> None:
    tcp = {"UCX_TLS": "tcp"}
    with (
        Child(Trainer, ucx=tcp, in_place=True) as trainer,
        Child(Reader, ucx=tcp, timeout_s=20.0) as reader,
    ):
        for version in (1, 2, 3):
            manifest = trainer.call("publish", version=version)
            assert reader.call("read", manifest=manifest) == version
            trainer.call("release_all")


def test_an_engine_reads_the_parts_of_several_trainers_in_place() -> None:
    with (
        owners_of(2, options={"in_place": True}) as (owners, _),
        Child(Engine, rank=1, degree=2) as engine,
    ):
        for version in (1, 2, 3):
            manifest = publish(owners, version)
            assert engine.call("update", manifest=manifest)
            for owner in owners:
                owner.call("release", manifest=manifest)
