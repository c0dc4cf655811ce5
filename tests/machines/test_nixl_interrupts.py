"""Interrupts before any line cost neither side of `nixl` a slot."""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.groups import GroupBridge, GroupManifest
from rl_bridge.groups.bridge import GroupEnd
from rl_bridge.testing.processes import until
from rl_bridge.transports.nixl import serving_process
from rl_bridge.transports.nixl.agent import AgentError, Region
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.publisher import NIXLPublisher
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.serving_process import ServingProcess
from rl_bridge.transports.nixl.shelf import LiveShelf, SlotShelf
from tests.groups.meshes import cut, model
from tests.groups.rig import trainers
from tests.helpers import tracing
from tests.interrupts import InterruptBefore
from tests.machines.roles import shapes

WEIGHTS = {"w": torch.arange(100)}
SHAPES = shapes(600)


@pytest.mark.parametrize("what", ["lease", "end of a lease", "end of a connection", "release"])
def test_an_interrupt_before_any_line_keeps_nothing_for_a_reader_that_is_gone(what: str) -> None:
    options: dict[str, Any] = {"serve": "inline", "timeout_s": 1.0, "suspicious": "off"}
    trainer = cast("NIXLTensorBridge", make_weight_bridge("nixl", **options))
    reader = cast("NIXLTensorBridge", make_weight_bridge("nixl"))
    with trainer, reader:
        publisher = cast("NIXLPublisher", trainer.publisher.end)
        server, shelf = publisher._server, publisher._shelf
        number, version, struck = 0, 0, True
        while struck:
            version += 1
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            end = cast("NIXLConsumer", reader.consumer.end)
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
            assert all(entry.update_id is None for entry in trainer.catalog()), number
            number += 2  # (the trainer's own thread serves readers, too)
        assert number > 40


def test_an_import_that_was_cut_off_before_any_line_keeps_no_slot_for_long() -> None:
    options: dict[str, Any] = {"serve": "inline", "timeout_s": 1.0, "suspicious": "off"}
    trainer = cast("NIXLTensorBridge", make_weight_bridge("nixl", **options))
    reader = cast("NIXLTensorBridge", make_weight_bridge("nixl"))
    with trainer, reader:
        publisher = cast("NIXLPublisher", trainer.publisher.end)
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
            end = cast("NIXLConsumer", reader.consumer.end)
            assert not end._held.parked
            slots = [s for one in end._held.sources.values() for s in one.arrivals._ring._slots]
            assert all(slot.update_id is None for slot in slots), f"before line {number}"

            def is_free(update_id: str = manifest.update_id) -> bool:
                publisher._server.catch_up()
                return publisher._shelf.slot_of(update_id) is None

            until(is_free, what=f"the end of what was cut off before line {number}", deadline_s=10)
            number += 5
        assert number > 800


# Of an interrupt in the middle of a finalizer Python tells, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lands", [False, True], ids=["parts", "landing"])
def test_a_fan_in_that_was_cut_off_before_any_line_keeps_no_slot_and_no_lease(lands: bool) -> None:
    dims = {"embed": 0, "wide": 0 if lands else 1}
    with (
        trainers(2, "nixl", serve="inline") as group,
        GroupBridge(transports={"nixl": {"timeout_s": 20.0}}) as reader,
    ):
        number, version, struck = 0, 0, True
        while struck:
            version += 1
            manifest = group.publish(cut(model(SHAPES, version), 2, dims), version)
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                reader.import_update(manifest)
            struck = tracer.struck
            found = reader.import_update(manifest)
            for name, expected in model(SHAPES, version).items():
                assert torch.equal(found[name], expected), f"{name}, before line {number}"
            del found
            reader.acknowledge(manifest)
            reader.release(manifest)
            group.release(manifest)
            end = cast("GroupEnd", reader.consumer.end)
            held = cast("NIXLConsumer", end._ends["nixl"])._held
            assert (held.landings is not None) == lands
            assert not held.parked
            assert held.under_way is None
            slots = [s for one in held.sources.values() for s in one.arrivals._ring._slots]
            slots += [] if end._ring is None else end._ring[1]._ring._slots
            assert all(slot.update_id is None for slot in slots), f"before line {number}"
            ends = [cast("NIXLPublisher", one.publisher.end) for one in group.bridges]

            def is_free(
                ends: list[NIXLPublisher] = ends, manifest: GroupManifest = manifest
            ) -> bool:
                for one in ends:
                    one._server.catch_up()
                pairs = zip(ends, manifest.parts, strict=True)
                return all(one._shelf.slot_of(part.update_id) is None for one, part in pairs)

            until(is_free, what=f"the end of what was cut off before line {number}", deadline_s=10)
            number += 23
        assert number > 1000


def test_reads_that_an_interrupt_keeps_from_being_given_up_are_given_up_by_the_next_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network failed, and Ctrl-C comes while a new agent takes the place of the old one."""
    options: dict[str, Any] = {"serve": "inline", "timeout_s": 1.0, "suspicious": "off"}
    trainer = cast("NIXLTensorBridge", make_weight_bridge("nixl", **options))
    reader = cast("NIXLTensorBridge", make_weight_bridge("nixl"))
    failed: list[int] = []
    move = Reading._move

    def failing(one: Reading) -> bool:
        if failed:
            return move(one)
        failed.append(1)
        one._window.append((one._prepared.stamp[0], 0))
        raise AgentError("it broke")

    monkeypatch.setattr(Reading, "_move", failing)
    with trainer, reader:
        number, version, struck = 0, 0, True
        while struck:
            version += 1
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            tracer = InterruptBefore(number)
            renew = NIXLConsumer._renew_agent

            def cut_off(*given: Any, tracer: InterruptBefore = tracer, renew: Any = renew) -> None:
                with tracing(tracer):
                    renew(*given)

            failed.clear()
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(NIXLConsumer, "_renew_agent", cut_off)
                reader.import_update(manifest)
            struck = tracer.struck
            assert failed
            assert torch.equal(reader.import_update(manifest)["w"], WEIGHTS["w"]), number
            end = cast("NIXLConsumer", reader.consumer.end)
            reader.release(manifest.update_id)
            trainer.release(manifest.update_id)
            assert not end._held.parked
            slots = [s for one in end._held.sources.values() for s in one.arrivals._ring._slots]
            assert all(slot.update_id is None for slot in slots), f"before line {number}"
            number += 3
        assert number > 20


def test_an_interrupt_before_any_line_of_the_last_read_in_place_keeps_nothing_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"in_place": True, "suspicious": "off"}
    with cast("NIXLTensorBridge", make_weight_bridge("nixl", **options)) as trainer:
        number, struck = 0, True
        while struck:
            first = trainer.publish({"w": torch.arange(100)}, weight_version=2 * number + 1)
            publisher = cast("NIXLPublisher", trainer.publisher.end)
            shelf = cast("LiveShelf", publisher._shelf)
            region = shelf._held[first.update_id].region
            shelf._published[first.update_id].readers["reader"] = "it"
            trainer.release(first.update_id)
            # Other tensors: what the first ones were registered as is kept for its reader alone.
            second = trainer.publish({"w": torch.arange(200)}, weight_version=2 * number + 2)
            tracer = InterruptBefore(number)
            with monkeypatch.context() as patch:
                ended: list[Region] = []
                patch.setattr(publisher._host, "deregister", ended.append)
                with suppress(KeyboardInterrupt), tracing(tracer):
                    shelf.unlease(first.update_id, "reader")
                struck = tracer.struck
                shelf.unlease(first.update_id, "reader")
            assert shelf.slot_of(first.update_id) is None
            assert region in ended, f"before line {number}"
            trainer.release(second.update_id)
            number += 1
        assert number > 5


def test_an_interrupt_before_any_line_of_making_a_slot_keeps_nobody_from_making_the_next() -> None:
    options: dict[str, Any] = {"serve": "inline", "suspicious": "off"}
    with cast("NIXLTensorBridge", make_weight_bridge("nixl", **options)) as trainer:
        trainer.publish(WEIGHTS, weight_version=1)
        shelf = cast("SlotShelf", cast("NIXLPublisher", trainer.publisher.end)._shelf)
        number, struck = 0, True
        while struck:
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                shelf._make_slot(4096)
            struck = tracer.struck
            shelf._make_slot(4096).close()
            number += 1
        assert number > 10


@contextmanager
def served() -> Iterator[tuple[NIXLTensorBridge, NIXLTensorBridge]]:
    """A trainer whose reads another process serves, as by default, and a reader."""
    trainer = make_weight_bridge("nixl", suspicious="off", serve="process")
    reader = make_weight_bridge("nixl")
    with trainer, reader:
        yield cast("NIXLTensorBridge", trainer), cast("NIXLTensorBridge", reader)


def test_an_answer_that_an_interrupt_left_is_not_taken_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_readable = serving_process._is_readable

    def interrupted(*given: Any) -> bool:
        is_readable(*given)  # the answer is there, and nobody takes it
        raise KeyboardInterrupt

    with served() as (trainer, reader):
        trainer.publish(WEIGHTS, weight_version=1)
        monkeypatch.setattr(serving_process, "_is_readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.publish({"w": torch.arange(200_000)}, weight_version=2)  # in a new slot
        monkeypatch.setattr(serving_process, "_is_readable", is_readable)
        for version in (3, 4):
            weights = torch.full((version * 200_000,), version)
            manifest = trainer.publish({"w": weights}, weight_version=version)
            assert torch.equal(reader.import_update(manifest)["w"], weights)


# Of what an interrupt drops before anything refers to it Python tells, and ends it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_whose_start_an_interrupt_cut_off_before_any_line_does_not_seem_to_serve() -> (
    None
):
    with served() as (trainer, reader):
        number, version, struck = 0, 1, True
        manifest = trainer.publish(WEIGHTS, weight_version=version)
        publisher = cast("NIXLPublisher", trainer.publisher.end)
        host = cast("ServingProcess", publisher._host)

        def has_ended() -> bool:
            host.look()
            return host.is_lost

        while struck:
            with publisher._server.changed:  # it is the trainer's own thread that starts another
                os.kill(host.pid, signal.SIGKILL)
                until(has_ended, what="its end")
                tracer = InterruptBefore(number)
                with suppress(KeyboardInterrupt), tracing(tracer):
                    publisher._shelf.attend()
                struck = tracer.struck
            assert torch.equal(reader.import_update(manifest)["w"], WEIGHTS["w"]), number
            reader.release(manifest.update_id)
            trainer.release(manifest.update_id)
            version += 1
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            number += 5
        assert number > 60
