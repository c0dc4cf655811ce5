"""The suite's second part: several readers hold versions, and none can disturb another."""

from contextlib import suppress

import pytest
import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import (
    BridgeClosed,
    IllegalTransition,
    SegmentError,
    SlotsExhausted,
    StaleUpdate,
    WeightBridgeError,
)
from rl_bridge.lifecycle import State
from rl_bridge.testing.faults import Fault, InjectedFault, Step
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.testing.processes import watchdog
from rl_bridge.testing.tensors import bytes_of, contents_of, random_tensor
from rl_bridge.testing.transport_case import MakeBridge, TransportCase, faults_of, only_report


class NobodyDisturbsAnybody(TransportCase):
    """Several consumers, several versions, tensors that outlive everything."""

    def test_many_consumers_share_one_update_also_late_ones(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Each sees the same bytes, before and after others are done, and beside a newer one."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        early = [make_bridge(source_worker=f"early-{index}") for index in range(3)]
        for bridge in early:
            assert contents_of(bridge.import_update(manifest)) == contents_of(source)
        early[0].acknowledge(manifest.update_id)
        early[0].release(manifest.update_id)
        early[1].reject(manifest.update_id, "not today")
        publisher.publish(sample_weights(2), weight_version=2)
        late = make_bridge(source_worker="late")
        assert contents_of(late.import_update(manifest.to_json())) == contents_of(source)
        assert contents_of(early[2].import_update(manifest)) == contents_of(source)

    def test_a_consumers_write_changes_nobody_elses_bytes(
        self, publisher: BridgeOver, make_bridge: MakeBridge, *, may_write: bool
    ) -> None:
        """Neither the neighbour's, nor a late one's, nor what is verified anew."""
        if not may_write:
            pytest.skip(f"{self.transport_class.name} declares that a consumer may not write")
        source = sample_weights(1)
        expected = contents_of(source)
        manifest = publisher.publish(source, weight_version=1)
        writer, neighbour, late = (make_bridge(source_worker=name) for name in "abc")
        mine, theirs = writer.import_update(manifest), neighbour.import_update(manifest)
        for tensor in mine.values():
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).bitwise_not_()
        assert contents_of(theirs) == expected
        assert contents_of(late.import_update(manifest)) == expected
        assert contents_of(writer.import_update(manifest)) == expected
        assert contents_of(source) == expected

    def test_what_a_consumer_wrote_is_gone_with_the_next_version(
        self, publisher: BridgeOver, consumer: BridgeOver, *, may_write: bool
    ) -> None:
        """A page that was written to must not show through when its memory is used again."""
        for version in range(1, 8):
            source = sample_weights(version)
            manifest = publisher.publish(source, weight_version=version)
            tensors = consumer.import_update(manifest)
            assert contents_of(tensors) == contents_of(source)
            if may_write:
                for tensor in tensors.values():
                    tensor.zero_()
                del tensor
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

    def test_a_newer_version_does_not_disturb_an_import_in_flight(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Even if its update is released meanwhile: attached is attached."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        released = []

        def meanwhile() -> None:
            publisher.release(manifest.update_id)
            released.append(manifest.update_id)
            for version in (2, 3):
                newer = publisher.publish(sample_weights(version), weight_version=version)
                publisher.release(newer.update_id)
                released.append(newer.update_id)

        faults_of(consumer).faults.append(Fault(Step.AFTER_ATTACH, meanwhile))
        assert contents_of(consumer.import_update(manifest)) == contents_of(source)
        assert len(released) == 3, "the import was never in flight"

    def test_a_loop_that_keeps_one_version_takes_nothing_from_its_consumer(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """More versions than slots; the consumer holds each until it has the next one."""
        held: list[tuple[str, dict[str, torch.Tensor]]] = []
        for version in range(10):
            manifest = publisher.publish(sample_weights(version), keep=1)
            tensors = dict(consumer.import_update(manifest))
            consumer.acknowledge(manifest.update_id)
            for number, (before, its) in enumerate(held, start=version - len(held)):
                assert contents_of(its) == contents_of(sample_weights(number))
                its.clear()
                consumer.release(before)
            held = [(manifest.update_id, tensors)]
            del tensors

    def test_two_versions_are_live_at_once(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The old one serves until the new one is in."""
        sources = {version: sample_weights(version) for version in (1, 2)}
        live = {
            version: consumer.import_update(publisher.publish(source, weight_version=version))
            for version, source in sources.items()
        }
        for version, source in sources.items():
            assert contents_of(live[version]) == contents_of(source)

    def test_tensors_held_after_release_keep_their_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Memory is written again only once nobody reads it, whatever is published meanwhile."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        held = consumer.import_update(manifest)
        consumer.release(manifest.update_id)
        publisher.release(manifest.update_id)
        for version in range(2, 9):
            newer = publisher.publish(sample_weights(version), weight_version=version)
            consumer.import_update(newer)
            consumer.release(newer.update_id)
            publisher.release(newer.update_id)
        assert contents_of(held) == contents_of(source)

    def test_one_tensor_that_is_held_keeps_its_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A view of a slice of one tensor is enough; it pins its own version and no other."""
        taken, kept = [], []
        for version in range(1, 20):
            manifest = publisher.publish(sample_weights(version), weight_version=version)
            tensors = consumer.import_update(manifest)
            if version == 5:
                kept.append(tensors["layer.0.weight"][3:5].t())
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)
            taken.append(publisher.published_nbytes)
        assert len(set(taken[8:])) == 1
        assert bytes_of(kept[0]) == bytes_of(sample_weights(5)["layer.0.weight"][3:5].t())

    def test_tensors_held_after_both_ends_closed_keep_their_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Also those that are first looked at then."""
        source = sample_weights(1)
        held = consumer.import_update(publisher.publish(source, weight_version=1))
        publisher.close()
        consumer.close()
        assert contents_of(held) == contents_of(source)

    def test_a_holder_that_never_lets_go_cannot_make_the_publisher_wait(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Publishing goes on, or ends at once in an error that names the holder."""
        hoarder = make_bridge(source_worker="hoarder")
        held = {}
        sources = {version: sample_weights(version) for version in range(1, 13)}
        complaint = "hoarder"
        with watchdog(60):
            for version, source in sources.items():
                try:
                    manifest = publisher.publish(source, weight_version=version)
                except SlotsExhausted as error:
                    complaint = str(error)
                    break
                held[version] = hoarder.import_update(manifest)
                publisher.release(manifest.update_id)
        assert "hoarder" in complaint
        for version, tensors in held.items():
            assert contents_of(tensors) == contents_of(sources[version])
        held.clear()
        del tensors
        hoarder.close()
        publisher.publish(sample_weights(99), weight_version=99)

    def test_memory_is_used_again_once_nobody_holds_it(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Twenty serial versions take no more than the first three."""
        taken = []
        for version in range(1, 21):
            source = {"w": random_tensor("uint8", (1 << 20,), seed=version)}
            manifest = publisher.publish(source, weight_version=version)
            consumer.import_update(manifest)
            taken.append(publisher.published_nbytes)
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)
        assert max(taken) <= max(taken[:3])

    # ---- ends -----------------------------------------------------------------------------------

    def test_release_is_idempotent_and_final(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """On both sides; the state stays, and nothing is imported or acknowledged any more."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        for bridge in (consumer, publisher):
            for _ in range(3):
                bridge.release(manifest.update_id)
            assert bridge.update_state(manifest.update_id) is State.RELEASED
        with pytest.raises(IllegalTransition):
            consumer.acknowledge(manifest.update_id)
        publisher.publish(sample_weights(2), weight_version=2)
        publisher.publish(sample_weights(3), weight_version=3)
        with pytest.raises((StaleUpdate, SegmentError)):
            consumer.import_update(manifest)

    def test_close_is_idempotent_and_final(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A closed end refuses with its own error, and still reports what it knew."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        for bridge in (consumer, publisher):
            for _ in range(3):
                bridge.close()
            bridge.release(manifest.update_id)
        with pytest.raises(BridgeClosed):
            publisher.publish(sample_weights(2), weight_version=2)
        with pytest.raises(BridgeClosed):
            consumer.import_update(manifest)
        with pytest.raises(BridgeClosed):
            consumer.acknowledge(manifest.update_id)
        assert consumer.update_status(manifest.update_id) == "released"
        assert publisher.published_nbytes == 0

    def test_closing_the_publisher_ends_its_updates_with_a_typed_error(
        self, publisher: BridgeOver, consumer: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """A consumer that has not imported yet gets the error; one that has keeps its tensors."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest)
        publisher.close()
        with pytest.raises(SegmentError):
            make_bridge().import_update(manifest)
        assert contents_of(tensors) == contents_of(source)
        consumer.acknowledge(manifest.update_id)
        consumer.release(manifest.update_id)

    # ---- the way back ---------------------------------------------------------------------------

    def test_publishing_and_importing_are_timed_phase_by_phase(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """On each side by itself; a phase is a part of the whole."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        published, imported = publisher.timings(manifest), consumer.timings(manifest)
        assert set(published) >= {"gather", "stage_digest", "seal", "publish"}
        assert set(imported) >= {"attach", "verify"}
        assert 0 < sum(published.values()) - published["publish"] <= published["publish"]
        assert min(*published.values(), *imported.values()) >= 0

    def test_the_publisher_learns_what_became_of_an_update(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Each consumer's state, its proof or reason, and whether its process is gone."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        good, bad, lazy, gone = (make_bridge(source_worker=name) for name in ("g", "b", "l", "x"))
        for bridge in (good, bad, lazy, gone):
            bridge.import_update(manifest)
        good.acknowledge(manifest.update_id, proof={"method": "digest", "root": manifest.root})
        bad.reject(manifest.update_id, "the engine said no: " + "é" * 2000)
        gone.close()
        told = {report.worker: report for report in publisher.holders(manifest.update_id)}
        assert {name: report.state for name, report in told.items()} == {
            "g": "acknowledged",
            "b": "rejected",
            "l": "verified",
            "x": "released",
        }
        assert dict(told["g"].proof or {}) == {"method": "digest", "root": manifest.root}
        assert (told["b"].reason or "").startswith("the engine said no: é")
        assert {told[name].presence for name in "gbl"} == {"alive"}
        assert told["x"].presence == "gone"
        assert set(told["g"].timings_ms) >= {"attach", "verify"}

    def test_the_publisher_learns_that_tensors_are_still_held(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The report distinguishes released and still held from released and gone."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        held = consumer.import_update(manifest)["scale"]
        consumer.release(manifest.update_id)
        assert only_report(publisher.holders(manifest.update_id)).tensors_held
        del held
        assert not only_report(publisher.holders(manifest.update_id)).tensors_held

    def test_lost_reports_cost_nothing_but_knowledge(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The transaction does not depend on the way back."""
        faults_of(consumer).drops_reports = True
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        assert contents_of(consumer.import_update(manifest)) == contents_of(source)
        consumer.acknowledge(manifest.update_id)
        assert consumer.active_weight_version == 1
        assert publisher.holders(manifest.update_id) == []

    def test_a_way_back_that_fails_does_not_fail_the_update(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A lost report changes nothing: the step that it reports was taken."""
        faults_of(consumer).faults += [Fault(Step.BEFORE_REPORT, count=n) for n in range(1, 20)]
        source = sample_weights(1)
        executor = RolloutExecutor(weight_bridge=consumer)
        manifest = publisher.publish(source, weight_version=1)
        assert contents_of(executor.update_weights(manifest)) == contents_of(source)
        assert executor.active_weight_version == consumer.active_weight_version == 1
        bad = publisher.publish(sample_weights(2), weight_version=2)
        consumer.reject(bad, "no")
        executor.release_weights()
        assert consumer.update_status(manifest.update_id) == "released"

    @pytest.mark.parametrize("step", list(Step))
    def test_a_failure_in_the_transport_leaves_both_ends_usable(
        self, publisher: BridgeOver, consumer: BridgeOver, make_bridge: MakeBridge, step: Step
    ) -> None:
        """It comes out as it is, where it matters, and the next version arrives all the same."""
        untroubled = make_bridge()
        untroubled.publish({"w": random_tensor("uint8", (1 << 16,), seed=0)}, weight_version=1)
        struck = []

        def strike() -> None:
            struck.append(step)
            msg = "injected fault"
            raise InjectedFault(msg)

        for bridge in (publisher, consumer):
            faults_of(bridge).faults.append(Fault(step, strike))
        for version in range(1, 9):
            source = {"w": random_tensor("uint8", (1 << 16,), seed=version)}
            manifest = None
            try:
                manifest = publisher.publish(source, weight_version=version)
                assert contents_of(consumer.import_update(manifest)) == contents_of(source)
                consumer.acknowledge(manifest.update_id)
            except InjectedFault:
                assert version == 1
            else:
                assert consumer.active_weight_version == version
            for bridge in (consumer, publisher):
                if manifest is not None:
                    with suppress(InjectedFault):
                        bridge.release(manifest.update_id)
                    bridge.release(manifest.update_id)
        assert struck == [step], "the step was never reached, or more than once"
        assert consumer.active_weight_version == 8
        assert publisher.published_nbytes <= 2 * untroubled.published_nbytes

    def test_whatever_the_transport_raises_is_typed_or_its_own(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A rejected import names its reason."""
        faults_of(consumer).faults.append(Fault(Step.AFTER_ATTACH))
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        with pytest.raises(InjectedFault):
            consumer.import_update(manifest)
        assert consumer.update_status(manifest.update_id) == "rejected"
        assert "injected fault" in (consumer.rejection_reason(manifest.update_id) or "")
        with pytest.raises(WeightBridgeError):
            consumer.import_update(manifest)
