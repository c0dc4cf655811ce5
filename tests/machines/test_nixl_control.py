"""The control connections of `nixl`: leases, reports and records, also if something fails."""

import gc
import select
import socket
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeUnavailableError
from rl_bridge.groups import GroupBridge
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.testing.tensors import bytes_of
from rl_bridge.transports.nixl import consumer as nixl_consumer
from rl_bridge.transports.nixl.agent import Agent, AgentError, MemoryRefused
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.messages import NIXLEndpoint
from rl_bridge.transports.nixl.reading import Reading
from tests.groups.meshes import cut, model
from tests.groups.rig import trainers
from tests.helpers import held_before_its_poll
from tests.machines.nixl_roles import (
    both,
    consumer_end,
    leasing,
    publisher_end,
    source_of,
    weights,
)

WEIGHTS = {"w": torch.arange(100)}

inline = partial(both, trainer={"serve": "inline"})


def test_a_reader_is_helped_if_the_trainers_thread_read_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with inline() as (publisher, consumer):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        end = publisher_end(publisher)
        consumer.catalog(manifest)  # which connects
        helped: list[bool] = []
        monkeypatch.setattr(end._host, "help", lambda *, is_needed: helped.append(is_needed))
        server = end._server
        (member,) = server.members
        with held_before_its_poll(server):
            leasing(consumer, manifest)
            arrived = select.poll()
            arrived.register(member.channel.socket, select.POLLIN)
            assert arrived.poll(DEADLINE_S * 1e3)
            publisher.consumers()
            assert list(member.leases) == [manifest.update_id]
            helped.clear()
        until(lambda: True in helped, what="the reader to be helped", deadline_s=20)


@contextmanager
def three_trainers() -> Iterator[tuple[list[WeightUpdateManifest], NIXLConsumer]]:
    """What each of them published, and an engine that did not read it yet."""
    with ExitStack() as stack:
        make = partial(make_weight_bridge, "nixl", suspicious="off", serve="inline")
        trainers = [stack.enter_context(make()) for _ in range(3)]
        manifests = [one.publish(WEIGHTS, weight_version=1) for one in trainers]
        engine = stack.enter_context(make())
        assert isinstance(engine, NIXLTensorBridge)
        yield manifests, cast("NIXLConsumer", engine.consumer.end)


def test_publishers_that_only_get_a_report_share_a_short_wait_and_are_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is needed of them, so an import does not wait for them; but it does not give up."""
    clock, asked = [1000.0], list[tuple[str, float]]()
    monkeypatch.setattr(nixl_consumer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with three_trainers() as (manifests, end):
        names = [one.publisher_id for one in manifests]

        def silent(endpoint: NIXLEndpoint, *, is_observer: bool, within_s: float) -> None:
            assert not is_observer
            asked.append((endpoint.publisher_id, within_s))
            clock[0] += within_s
            raise TransferTimeout("it does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(end, "_source", silent)
            for _ in range(5):  # imports
                end.meet(manifests)
            assert asked == [(name, 2.0) for name in names]
            clock[0] += 60.0
            end.meet(manifests[:1])
            assert list(end._unreachable) == names[:1], "of the others nothing is kept"
        clock[0] += 60.0
        end.meet(manifests)
        assert list(end._resources.sources) == names


def test_a_publisher_that_others_left_no_time_hears_of_the_next_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = [1000.0], list[tuple[str, float]]()
    monkeypatch.setattr(nixl_consumer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with three_trainers() as (manifests, end):

        def slow(endpoint: NIXLEndpoint, *, is_observer: bool, within_s: float) -> None:
            assert not is_observer
            asked.append((endpoint.publisher_id, within_s))
            clock[0] += min(within_s, 1.5)
            raise TransferTimeout("it does not answer")

        monkeypatch.setattr(end, "_source", slow)
        for _ in range(3):  # imports
            end.meet(manifests)
        first, second, third = (one.publisher_id for one in manifests)
        assert asked == [(first, 2.0), (second, 0.5), (second, 2.0), (third, 0.5), (third, 2.0)]


def test_the_error_of_a_failed_read_does_not_keep_the_librarys_agent_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may write to slots for as long as it lives, and they are used again."""
    used: list[weakref.ref[object]] = []

    def failing(agent: object, *_: object) -> str:
        used.append(weakref.ref(agent))
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    with inline(timeout_s=0.2) as (publisher, consumer):
        consumer.import_update(publisher.publish(WEIGHTS, weight_version=1))
        second = publisher.publish(WEIGHTS, weight_version=2)
        agent = consumer_end(consumer)._resources.agent
        assert agent is not None
        with monkeypatch.context() as patch:
            patch.setattr(type(agent._agent), "transfer", failing)
            with pytest.raises(WeightBridgeUnavailableError, match="DISCONNECT") as kept:
                consumer.import_update(second)
        gc.collect()
        assert used
        assert not [one for one in used if one() is not None]
        assert kept.value.__cause__ is not None


def test_a_version_that_could_not_be_read_for_a_while_is_imported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: Reading) -> bool:
        raise AgentError("a read failed: NIXL_ERR_REMOTE_DISCONNECT.")

    with inline(timeout_s=0.2) as (publisher, consumer):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        with monkeypatch.context() as patch:
            patch.setattr(Reading, "step", broken)
            with pytest.raises(WeightBridgeUnavailableError, match="then import it again"):
                consumer.import_update(manifest)
        assert torch.equal(consumer.import_update(manifest)["w"], WEIGHTS["w"])


def test_a_read_whose_lease_is_over_begins_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader was held up. Over TCP nobody helps it any more, so nothing would arrive."""
    stalled: list[Reading] = []
    step = Reading.step
    with inline(timeout_s=2.0) as (publisher, consumer):
        consumer.import_update(publisher.publish(WEIGHTS, weight_version=1))
        server: Any = publisher_end(publisher)._server
        source = source_of(consumer)
        source.client.lease_s = 0.0  # it is renewed at every step
        second = publisher.publish({"w": torch.arange(50)}, weight_version=2)

        def stalling(one: Reading) -> bool:
            if not stalled:
                stalled.append(one)
                with server.changed:
                    server._unlease(server.members[0], second.update_id)
            return one is not stalled[0] and step(one)

        monkeypatch.setattr(Reading, "step", stalling)
        assert torch.equal(consumer.import_update(second)["w"], torch.arange(50))
        assert stalled


def test_a_connection_that_fell_silent_is_not_used_again() -> None:
    """A firewall forgot it, for instance: nobody hears its words, and nobody says so."""
    here, nobody = socket.socketpair()
    here.setblocking(False)
    with inline(timeout_s=0.5) as (publisher, consumer), closing(here), closing(nobody):
        consumer.import_update(publisher.publish(WEIGHTS, weight_version=1))
        channel = source_of(consumer).client._channel
        whole, channel.socket = channel.socket, here
        second = publisher.publish({"w": torch.arange(50)}, weight_version=2)
        with closing(whole):
            with pytest.raises(TransferTimeout, match="could not answer"):
                consumer.import_update(second)
            assert torch.equal(consumer.import_update(second)["w"], torch.arange(50))


@pytest.mark.parametrize("is_alive", [True, False], ids=["cut", "dead"])
def test_a_connection_that_ends_at_the_first_message_costs_a_version_only_if_the_publisher_died(
    is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inline(timeout_s=20.0) as (publisher, consumer):
        consumer.import_update(publisher.publish(WEIGHTS, weight_version=1))
        second = publisher.publish({"w": torch.arange(50)}, weight_version=2)
        channel = source_of(consumer).client._channel

        def send(_: bytes) -> None:
            if not is_alive:
                publisher.close()
            channel.close()

        monkeypatch.setattr(channel, "send_raw", send)
        if is_alive:
            assert torch.equal(consumer.import_update(second)["w"], torch.arange(50))
        else:
            with pytest.raises(SegmentError, match="publish again"):
                consumer.import_update(second)


def test_all_owners_hear_of_a_version_whose_read_failed_at_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the failure all connections are made anew; nobody waits for the next import."""
    shapes, dims = {"first": (64, 8), "second": (64, 8)}, {"first": 0, "second": 0}
    options: dict[str, Any] = {"transports": {"nixl": {"timeout_s": 0.5}}}
    step = Reading.step
    with trainers(2, "nixl", serve="inline") as group, GroupBridge(**options) as reader:
        reader.import_update(group.publish(cut(model(shapes, 1), 2, dims), 1))
        manifest = group.publish(cut(model(shapes, 2), 2, dims), 2)
        part = manifest.parts[1].update_id
        with monkeypatch.context() as patch:
            patch.setattr(Reading, "step", lambda one: one._expected[0] != part and step(one))
            patch.setattr(Reading, "in_flight", property(lambda one: not one.is_done))
            with pytest.raises(TransferTimeout):
                reader.import_update(manifest)
        reader.reject(manifest, "the engine does without it")

        def have_heard() -> bool:
            states = [
                {one.state for one in bridge.consumers() if one.weight_version == 2}
                for bridge in group.bridges
            ]
            return states == [{"rejected"}, {"rejected"}]

        until(have_heard, what="both owners to hear of it", deadline_s=20)


def test_an_engine_whose_memory_is_refused_for_a_while_reads_from_everybody_later() -> None:
    """A read fails, and what is registered anew for the next one is refused in the middle of it."""
    with (
        make_weight_bridge("nixl", suspicious="off") as one,
        make_weight_bridge("nixl", suspicious="off") as other,
        make_weight_bridge("nixl") as engine,
    ):
        for trainer in (one, other):
            first = trainer.publish(weights(1), weight_version=1)
            engine.import_update(first)
            engine.release(first)  # its slot is used again
        second = one.publish(weights(2), weight_version=2)
        tries = []

        def refusing(*_: object) -> None:
            tries.append(1)
            raise MemoryRefused("no more memory may be locked.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reading, "step", refusing)
            patch.setattr(Agent, "register", refusing)
            patch.setattr(Agent, "register_segment", refusing)
            with pytest.raises(WeightBridgeUnavailableError, match="cannot be read"):
                engine.import_update(second)
        assert len(tries) == 2, "the read, and the memory: asking for more would not help"
        assert bytes_of(engine.import_update(second)["w"]) == bytes_of(weights(2)["w"])
        engine.release(second.update_id)
        newer = other.publish(weights(2), weight_version=2)
        assert bytes_of(engine.import_update(newer)["w"]) == bytes_of(weights(2)["w"])
        newer = one.publish(weights(3), weight_version=3)
        assert bytes_of(engine.import_update(newer)["w"]) == bytes_of(weights(3)["w"])


# ---- what the publisher knows of its readers ----------------------------------------------------


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


def states(publisher: NIXLTensorBridge, update_id: str) -> list[tuple[str, str]]:
    return [(one.presence, one.state) for one in publisher.holders(update_id)]


def take(reader: NIXLTensorBridge, manifest: WeightUpdateManifest) -> None:
    reader.import_update(manifest)
    reader.acknowledge(manifest.update_id)


def test_a_reader_whose_name_cannot_be_printed_does_not_break_the_catalog() -> None:
    with trainer_and("\U0010ffff" * 500, "rollout") as (publisher, odd, plain):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        client = leasing(odd, manifest)
        client.wait_for_lease(manifest.update_id)
        for catalog in (publisher.catalog(), plain.catalog(manifest)):
            (reader,) = catalog[0].readers
            assert reader.startswith(r"worker '\U0010ffff")


def test_a_half_open_connection_makes_room_for_the_readers_next_one() -> None:
    with trainer_and("rollout") as (publisher, reader):
        first = publisher.publish(WEIGHTS, weight_version=1)
        take(reader, first)
        source = source_of(reader)
        unheard = source.client._channel.socket.dup()  # so it stays open, and nobody speaks
        with unheard:
            source.client.hang_up()
            second = publisher.publish({"w": WEIGHTS["w"] + 1}, weight_version=2)
            take(reader, second)
            server = publisher_end(publisher)._server
            assert len(server.members) == 1
            assert states(publisher, first.update_id) == [("alive", "acknowledged")]


def test_a_reader_that_connects_again_has_one_record_with_all_that_it_reported() -> None:
    with trainer_and("rollout") as (publisher, reader):
        first = publisher.publish(WEIGHTS, weight_version=1)
        take(reader, first)
        source = source_of(reader)
        for version in (2, 3):
            source.client.hang_up()
            source.client.reports.clear()  # who reported much repeats the last few alone
            manifest = publisher.publish({"w": WEIGHTS["w"] + version}, weight_version=version)
            take(reader, manifest)
            for one in (first, manifest):
                assert states(publisher, one.update_id) == [("alive", "acknowledged")]


def test_two_readers_of_one_name_and_process_have_a_record_each() -> None:
    with trainer_and("rollout", "rollout") as (publisher, one, other):
        manifest = publisher.publish(WEIGHTS, weight_version=1)
        take(one, manifest)
        consumer_end(one).close()
        take(other, manifest)
        found = sorted(states(publisher, manifest.update_id))
        assert found == [("alive", "acknowledged"), ("gone", "acknowledged")]
