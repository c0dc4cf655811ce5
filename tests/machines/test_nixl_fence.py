"""What a one-sided reader sees of a publisher that writes, forgets, hangs or lies."""

import gc
import os
import re
import signal
import weakref
from typing import cast

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import SegmentError, StaleUpdate, TransferTimeout
from rl_bridge.memory import vm
from rl_bridge.memory.slots import ARRIVING, parse_stamp
from rl_bridge.testing.processes import Child, until
from rl_bridge.testing.tensors import bytes_of
from rl_bridge.transports.base import PartRequest
from rl_bridge.transports.nixl import reading
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.server import NIXLPublisher
from rl_bridge.transports.nixl.serving_process import ServingProcess
from tests.helpers import stop
from tests.machines.nixl_roles import (
    SIZE,
    Between,
    Trainer,
    both,
    consumer_end,
    leasing,
    overwrite,
    publisher_end,
    source_of,
    weights,
)

SERVE = ("process", "inline")
SMALL = {"w": torch.arange(100)}


@pytest.mark.parametrize("serve", SERVE)
def test_a_version_that_is_overwritten_while_it_is_read_is_refused(serve: str) -> None:
    with both(timeout_s=0.5, serve=serve) as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        end = publisher_end(publisher)
        with (
            Between(lambda: overwrite(end, manifest), at="bytes", times=1) as seen,
            pytest.raises(StaleUpdate, match="wrote to it while it was read"),
        ):
            consumer.import_update(manifest)
        assert seen.calls == 1
        newer = publisher.publish(weights(2), weight_version=2)
        assert bytes_of(consumer.import_update(newer)["w"]) == bytes_of(weights(2)["w"])


def test_a_torn_read_is_repeated_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with both(timeout_s=20.0) as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        end = publisher_end(publisher)
        slot = end.snapshot(manifest.update_id)
        header = manifest.header_digest

        def scribble() -> None:
            overwrite(end, manifest)
            monkeypatch.setattr(reading.Reading, "_checked", restoring)

        checked = reading.Reading._checked

        def restoring(one: reading.Reading) -> bool:
            found = checked(one)
            # Behind the look at the stamp: the writer is done, and what it wrote is this version.
            slot.generation -= 1
            vm.tensor_at(slot.address, SIZE).copy_(weights(1)["w"].view(torch.uint8))
            slot.stamp(manifest.update_id, manifest.table.arena_nbytes, header)
            monkeypatch.setattr(reading.Reading, "_checked", checked)
            return found

        with Between(scribble, at="bytes", times=1):
            assert bytes_of(consumer.import_update(manifest)["w"]) == bytes_of(weights(1)["w"])


def test_a_leased_version_is_not_overwritten() -> None:
    """Its publisher lets go of it and publishes three more, in the middle of the read."""
    with both() as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        newer = iter((2, 3, 4))

        def publish() -> None:
            publisher.release(manifest.update_id)
            version = next(newer)
            publisher.release(publisher.publish(weights(version), weight_version=version).update_id)

        with Between(publish, at="bytes", times=3) as seen:
            assert bytes_of(consumer.import_update(manifest)["w"]) == bytes_of(weights(1)["w"])
        assert seen.calls == 3


def test_a_read_outlasts_several_serving_processes() -> None:
    """As where readers are killed at the same time: over TCP, each may take the process along."""
    with both(timeout_s=20.0, serve="process") as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        host = publisher_end(publisher)._host
        assert isinstance(host, ServingProcess)

        def kill() -> None:
            assert host.pid
            os.kill(host.pid, signal.SIGKILL)

        with Between(kill, at="bytes", times=3) as seen:
            assert bytes_of(consumer.import_update(manifest)["w"]) == bytes_of(weights(1)["w"])
        assert seen.calls == 3


def test_descriptors_of_memory_that_was_given_back_yield_no_version() -> None:
    """The library says DONE with whatever is there; the stamp does not."""
    with both(timeout_s=0.5) as (publisher, consumer):
        first = publisher.publish(weights(1), weight_version=1)
        consumer.import_update(first)
        end = publisher_end(publisher)
        source = source_of(consumer)
        (leased,) = source.client.known_slots.values()
        slot = end.snapshot(first.update_id)
        page = vm.tensor_at(slot.stamp_address, 8).clone()
        for bridge in (consumer, publisher):
            bridge.release(first.update_id)
        # The same slot by its old number and addresses, holding something else by now.
        second = publisher.publish(weights(2), weight_version=2)
        assert end.snapshot(second.update_id) is slot
        assert torch.equal(page, vm.tensor_at(slot.stamp_address, 8))
        local = source.arrivals.reserve(first.table.arena_nbytes)
        request = PartRequest(manifest=first)
        stale = source.reading(request, leased, local, (first.update_id, leased.slot))
        until(lambda: stale.step() and stale.is_done, what="the read to end")
        assert stale.is_torn
        assert stale.stamp is not None
        assert stale.stamp.update_id == second.update_id


def test_a_lease_that_is_not_renewed_ends() -> None:
    with both(timeout_s=0.3) as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        client = leasing(consumer, manifest)
        client.wait_for_lease(manifest.update_id)
        assert [entry.readers for entry in publisher.catalog()] == [
            (f"worker 'rollout' rank 0 (pid {client._join.pid})",)
        ]
        until(lambda: publisher.catalog()[0].readers == (), what="the lease to end", deadline_s=10)


def test_another_write_of_a_slot_is_not_leased() -> None:
    with both() as (publisher, consumer):
        manifest = publisher.publish(weights(1), weight_version=1)
        client = leasing(consumer, manifest, later=1)
        with pytest.raises(SegmentError, match="not what was published"):
            client.wait_for_lease(manifest.update_id)


def test_the_slot_of_a_read_that_did_not_end_is_used_again_only_when_nothing_can_land() -> None:
    """The publisher is stopped in the middle, over TCP, and goes on after the reader gave up."""
    with Child(Trainer, ucx={"UCX_TLS": "tcp"}, serve="inline") as trainer:
        consumer = cast("NIXLTensorBridge", make_weight_bridge("nixl", timeout_s=1.0))
        try:
            first = trainer.call("publish", version=1)
            assert bytes_of(consumer.import_update(first)["w"]) == bytes_of(weights(1)["w"])
            end = consumer_end(consumer)
            second = trainer.call("publish", version=2)
            pid = trainer.pid
            try:
                with (
                    Between(lambda: stop(pid), at="bytes", times=1) as seen,
                    pytest.raises(TransferTimeout, match="can be reached"),
                ):
                    consumer.import_update(second)
                ((_, jobs),) = end._resources.parked
                late = jobs[0].slot
                assert late is not None
                other = jobs[0].source.arrivals.reserve(SIZE)
                jobs[0].source.arrivals.abandon(other)
                assert other is not late, "what may land yet lands in a slot that is in use"
            finally:
                os.kill(pid, signal.SIGCONT)
            assert seen.calls == 1
            third = trainer.call("publish", version=3)
            tensors = consumer.import_update(third)
            # What was under way when the reader gave up lands now, in a slot that nobody uses.

            def settled() -> bool:
                trainer.call("help", rounds=200)
                end._resources.sweep()
                return not end._resources.parked

            until(settled, what="the late reads to end")
            assert bytes_of(tensors["w"]) == bytes_of(weights(3)["w"])
            assert jobs[0].slot is None, "the slot is given back"
        finally:
            consumer.close()


def test_agents_of_reads_that_never_end_are_closed_but_for_the_last_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control port answers and the data port does not, for many updates."""
    errors: list[BaseException] = []
    agents: list[weakref.ref[object]] = []

    def late(_: Reading) -> bool:
        raise TransferTimeout("nothing arrived")

    with both(serve="inline") as (publisher, consumer):
        consumer.import_update(publisher.publish(SMALL, weight_version=1))
        far = consumer_end(consumer)
        source = source_of(consumer)
        with monkeypatch.context() as hanging:
            hanging.setattr(Reading, "in_flight", property(lambda _: True))
            hanging.setattr(Reading, "drain", lambda _: False)
            hanging.setattr(Reading, "step", late)
            for version in range(2, 8):
                manifest = publisher.publish(SMALL, weight_version=version)
                with pytest.raises(TransferTimeout) as failed:
                    consumer.import_update(manifest)
                publisher.release(manifest.update_id)
                errors.append(failed.value)  # with its frames, as a log may keep it
                agents.append(weakref.ref(far._resources.parked[-1][0]._agent.agent))
            kept = [slot.update_id for slot in source.arrivals._ring._slots]
            assert kept.count(ARRIVING) == len(far._resources.parked) == 2
            gc.collect()
            alive = [agent() is not None for agent in agents]
            assert alive == [False] * 4 + [True] * 2, "the library's, which might write"
            far._resources.parked[0][0].close()
            far._resources.sweep()
            assert len(far._resources.parked) == 1
        last = publisher.publish(SMALL, weight_version=8)
        assert torch.equal(consumer.import_update(last)["w"], SMALL["w"])
        assert not far._resources.parked


def test_a_stamp_that_comes_when_its_reader_gave_up_is_not_taken_for_a_later_one() -> None:
    with Child(Trainer, ucx={"UCX_TLS": "tcp"}, serve="inline") as trainer:
        consumer = cast("NIXLTensorBridge", make_weight_bridge("nixl", timeout_s=1.0))
        try:
            consumer.import_update(trainer.call("publish", version=1, small=True))
            end = consumer_end(consumer)
            second = trainer.call("publish", version=2, small=True)
            try:
                with (
                    Between(lambda: stop(trainer.pid), at="new", times=1),
                    pytest.raises(TransferTimeout, match="can be reached"),
                ):
                    consumer.import_update(second)
            finally:
                os.kill(trainer.pid, signal.SIGCONT)
            ((_, (job,)),) = end._resources.parked
            assert job.reading is not None
            assert job.reading._stage == "before"
            third = trainer.call("publish", version=3, small=True)
            assert int(consumer.import_update(third)["w"][0]) == 3

            def settled() -> bool:
                trainer.call("help", rounds=200)
                end._resources.sweep()
                return not end._resources.parked

            until(settled, what="the late read to end")
            pages = (job.reading._page, job.source._page)
            stamps = [parse_stamp(page.numpy().tobytes()) for page in pages]
            found = [None if one is None else one.update_id for one in stamps]
            texts = (second, third)
            assert found == [WeightUpdateManifest.from_json(text).update_id for text in texts]
        finally:
            consumer.close()


@pytest.mark.parametrize("serve", SERVE)
def test_once_warm_nothing_is_registered_connected_or_prepared_again(serve: str) -> None:
    with both(serve=serve) as (publisher, consumer):
        counts = []
        for version in range(1, 13):
            manifest = publisher.publish(weights(version), weight_version=version)
            tensors = consumer.import_update(manifest)
            consumer.acknowledge(manifest.update_id)
            counts.append((publisher.counters, consumer.counters))
            del tensors
            for bridge in (consumer, publisher):
                bridge.release(manifest.update_id)
        assert all(one == counts[4] for one in counts[4:]), counts


def readers(publisher: NIXLPublisher, manifest: WeightUpdateManifest) -> list[str]:
    publisher._server.catch_up()
    return publisher._store.readers_of(manifest.update_id)


def test_the_end_of_a_lease_travels_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message wakes the publisher, which may want the reader's core: two, not three."""
    with both() as (publisher, consumer):
        consumer.import_update(publisher.publish(SMALL, weight_version=1))
        second = publisher.publish(SMALL, weight_version=2)
        end = publisher_end(publisher)
        source = source_of(consumer)
        sent: list[bytes] = []
        channel = source.client._channel
        send = channel.send_raw

        def noting(data: bytes) -> None:
            sent.append(data)
            send(data)

        monkeypatch.setattr(channel, "send_raw", noting)
        consumer.import_update(second)
        kinds = [re.findall(rb'"kind":"(\w+)"', data) for data in sent]
        assert kinds == [[b"lease"], [b"unlease", b"report"]]
        assert readers(end, second) == []


def test_a_lease_ends_if_no_report_follows() -> None:
    with both() as (publisher, consumer):
        manifest = publisher.publish(SMALL, weight_version=1)
        end, far = publisher_end(publisher), consumer_end(consumer)
        with far.in_one_go():
            attachment = far.attach(manifest)
            assert len(readers(end, manifest)) == 1
        assert readers(end, manifest) == []
        attachment.tensors.forget()
