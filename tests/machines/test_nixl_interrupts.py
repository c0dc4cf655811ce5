"""Interrupts before any line cost neither side of `nixl` a slot."""

import select
from contextlib import suppress
from typing import Any, cast

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.testing.processes import until
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.publisher import NIXLPublisher
from tests.helpers import tracing
from tests.interrupts import InterruptBefore

WEIGHTS = {"w": torch.arange(100)}


@pytest.mark.parametrize("what", ["lease", "end of a lease", "end of a connection", "release"])
def test_an_interrupt_before_any_line_keeps_nothing_for_a_reader_that_is_gone(what: str) -> None:
    options: dict[str, Any] = {"serve": "inline", "timeout_s": 1.0, "suspicious": "off"}
    trainer = cast("NIXLTensorBridge", make_weight_bridge("nixl", **options))
    reader = cast("NIXLTensorBridge", make_weight_bridge("nixl"))
    with trainer, reader:
        publisher = cast("NIXLPublisher", trainer._publisher_end()._end)
        server, shelf = publisher._server, publisher._shelf
        number, version, struck = 0, 0, True
        while struck:
            version += 1
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            end = cast("NIXLConsumer", reader._consumer_end()._end)
            handle = end._handle(manifest)
            link = end._source(handle.endpoint, is_observer=False).link
            lease = {"generation": handle.generation, "arena_nbytes": manifest.table.arena_nbytes}
            if what != "lease":
                link.ask(manifest.update_id, **lease)
                link.wait(manifest.update_id)
            tracer = InterruptBefore(number)
            with server.changed:  # its own thread has nothing to do with what comes now
                match what:
                    case "lease":
                        link.ask(manifest.update_id, **lease)
                    case "end of a lease":
                        trainer.release(manifest.update_id)
                        link.unlease(manifest.update_id)
                    case "end of a connection":
                        link.hang_up()
                arrived = select.poll()
                arrived.register(server.members[-1].channel.socket, select.POLLIN)
                assert what == "release" or arrived.poll(5000)
                with suppress(KeyboardInterrupt), tracing(tracer):
                    if what == "release":
                        trainer.release(manifest.update_id)
                    else:
                        server._step(0)
            struck = tracer.struck
            link.hang_up()
            trainer.release(manifest.update_id)

            def is_over(update_id: str = manifest.update_id) -> bool:
                server.catch_up()
                return not server.members and shelf.slot_of(update_id) is None

            until(is_over, what=f"what was cut off before line {number}", deadline_s=10)
            assert all(entry.update_id is None for entry in publisher.catalog()), number
            number += 2  # (the trainer's own thread serves readers, too)
        assert number > 40


def test_an_import_that_was_cut_off_before_any_line_keeps_no_slot_for_long() -> None:
    options: dict[str, Any] = {"serve": "inline", "timeout_s": 1.0, "suspicious": "off"}
    trainer = cast("NIXLTensorBridge", make_weight_bridge("nixl", **options))
    reader = cast("NIXLTensorBridge", make_weight_bridge("nixl"))
    with trainer, reader:
        publisher = cast("NIXLPublisher", trainer._publisher_end()._end)
        number, version, struck = 0, 0, True
        while struck:
            version += 1
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                reader.import_update(manifest)
            struck = tracer.struck
            assert torch.equal(reader.import_update(manifest)["w"], WEIGHTS["w"])
            reader.acknowledge(manifest.update_id)
            reader.release(manifest.update_id)
            trainer.release(manifest.update_id)
            end = cast("NIXLConsumer", reader._consumer_end()._end)
            assert not end._held.parked
            slots = [s for one in end._held.sources.values() for s in one.arrivals._ring._slots]
            assert all(slot.update_id is None for slot in slots), f"before line {number}"

            def is_free(update_id: str = manifest.update_id) -> bool:
                publisher._server.catch_up()
                return publisher._shelf.slot_of(update_id) is None

            until(is_free, what=f"the end of what was cut off before line {number}", deadline_s=10)
            number += 13
        assert number > 800
