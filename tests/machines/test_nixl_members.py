"""The readers of a publisher over `nixl`, as it knows them and tells of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.publisher import NIXLPublisher

WEIGHTS = {"w": torch.arange(100)}


@contextmanager
def trainer_and(*workers: str) -> Iterator[list[NIXLTensorBridge]]:
    """A trainer, and readers of these names."""
    publisher = make_weight_bridge("nixl", suspicious="off", serve="inline")
    readers = [make_weight_bridge("nixl", source_worker=worker) for worker in workers]
    try:
        yield [cast("NIXLTensorBridge", one) for one in (publisher, *readers)]
    finally:
        for one in (*readers, publisher):
            one.close()


def far(reader: NIXLTensorBridge) -> NIXLConsumer:
    return cast("NIXLConsumer", reader.consumer.end)


def states(publisher: NIXLTensorBridge, update_id: str) -> list[tuple[str, str]]:
    return [(one.presence, one.state) for one in publisher.holders(update_id)]


def take(reader: NIXLTensorBridge, manifest: WeightUpdateManifest) -> None:
    reader.import_update(manifest)
    reader.acknowledge(manifest.update_id)


def test_a_reader_whose_name_cannot_be_printed_keeps_nobody_from_the_catalog() -> None:
    with trainer_and("\U0010ffff" * 500, "rollout") as (publisher, odd, plain):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        handle = far(odd)._handle(manifest)
        client = far(odd)._source(handle.endpoint, is_observer=False).client
        nbytes = manifest.table.arena_nbytes
        client.ask_for_lease(manifest.update_id, generation=handle.generation, arena_nbytes=nbytes)
        client.wait_for_lease(manifest.update_id)
        for catalog in (publisher.catalog(), plain.catalog(manifest)):
            (reader,) = catalog[0].readers
            assert reader.startswith(r"worker '\U0010ffff")


def test_a_reader_that_connects_again_has_one_record_with_all_that_it_reported() -> None:
    with trainer_and("rollout") as (publisher, reader):
        first = publisher.publish(WEIGHTS, weight_version=1)
        take(reader, first)
        (source,) = far(reader)._resources.sources.values()
        for version in (2, 3):
            source.client.hang_up()
            source.client.reports.clear()  # who reported much repeats the last few alone
            manifest = publisher.publish({"w": WEIGHTS["w"] + version}, weight_version=version)
            take(reader, manifest)
            for one in (first, manifest):
                assert states(publisher, one.update_id) == [("alive", "acknowledged")]


def test_a_connection_whose_end_was_never_heard_makes_room_for_the_readers_next_one() -> None:
    with trainer_and("rollout") as (publisher, reader):
        first = publisher.publish(WEIGHTS, weight_version=1)
        take(reader, first)
        (source,) = far(reader)._resources.sources.values()
        unheard = source.client._channel.socket.dup()  # so it stays open, and nobody speaks
        with unheard:
            source.client.hang_up()
            second = publisher.publish({"w": WEIGHTS["w"] + 1}, weight_version=2)
            take(reader, second)
            server = cast("NIXLPublisher", publisher.publisher.end)._server
            assert len(server.members) == 1
            assert states(publisher, first.update_id) == [("alive", "acknowledged")]


def test_two_readers_of_one_name_and_process_have_a_record_each() -> None:
    with trainer_and("rollout", "rollout") as (publisher, one, other):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        take(one, manifest)
        far(one).close()
        take(other, manifest)
        found = sorted(states(publisher, manifest.update_id))
        assert found == [("alive", "acknowledged"), ("gone", "acknowledged")]
