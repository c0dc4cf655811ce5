"""The readers of a publisher over `nixl`, as it knows them and tells of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch

from rl_bridge import make_weight_bridge
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
    return cast("NIXLConsumer", reader._consumer_end()._end)


def test_a_reader_whose_name_cannot_be_printed_keeps_nobody_from_the_catalog() -> None:
    with trainer_and("\U0010ffff" * 500, "rollout") as (publisher, odd, plain):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        handle = far(odd)._handle(manifest)
        link = far(odd)._source(handle.endpoint, is_observer=False).link
        nbytes = manifest.table.arena_nbytes
        link.ask(manifest.update_id, generation=handle.generation, arena_nbytes=nbytes)
        link.wait(manifest.update_id)
        for catalog in (
            cast("NIXLPublisher", publisher._publisher_end()._end).catalog(),
            far(plain).catalog(manifest),
        ):
            (reader,) = catalog[0].readers
            assert reader.startswith(r"worker '\U0010ffff")
