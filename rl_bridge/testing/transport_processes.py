"""The suite's fourth part: other processes, and processes that die.

Every child is spawned, built from class and arguments, and gets manifests as JSON text. Whatever a
child does, the parent waits with a deadline, and kills what survives before it asserts.
"""

import signal
from contextlib import suppress
from typing import Any

import pytest

from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.parts import Scope
from rl_bridge.testing.faults import Fault, KillAt, Step, die
from rl_bridge.testing.peer import BridgeOver, hashes, id_of, sample_weights
from rl_bridge.testing.processes import Child, ChildDied, ChildError, until, watchdog
from rl_bridge.testing.tensors import contents_of
from rl_bridge.testing.transport_case import MakeBridge, MakePeer, TransportCase, only_report

# The transition at which a consumer dies -> the calls that lead there.
_DEATHS: dict[str, tuple[str, ...]] = {
    "import": ("import",),
    "verify": ("import",),
    "acknowledge": ("import", "acknowledge"),
    "reject": ("import", "reject"),
    "release": ("import", "acknowledge", "release"),
}


def _killed(child: Child) -> None:
    """The child died by SIGKILL, and by nothing else."""
    assert child.exitcode() == -signal.SIGKILL


class ProcessesComeAndGo(TransportCase):
    """Crossing processes, and the death of either side."""

    def test_the_manifest_crosses_a_process_exactly_if_declared(
        self,
        publisher: BridgeOver,
        make_peer: MakePeer,
        transport_kwargs: dict[str, Any],
    ) -> None:
        """From JSON alone; a transport that crosses none says so with a typed error."""
        declared = self.transport_class.create(**transport_kwargs).crosses_processes
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        child = make_peer()
        if declared:
            found = child.call("import_update", manifest=manifest.to_json())
            child.kill()
            assert found == hashes(source)
        else:
            with pytest.raises(ChildError) as caught:
                child.call("import_update", manifest=manifest.to_json())
            child.kill()
            assert WeightBridgeError.__name__ in caught.value.lineage

    @pytest.mark.usefixtures("crossing")
    def test_two_children_of_one_parent_are_publisher_and_consumer(
        self, make_peer: MakePeer, *, may_write: bool
    ) -> None:
        """Neither is the other's ancestor; the source is overwritten, the consumer writes."""
        trainer, rollout = make_peer(worker="trainer"), make_peer(worker="rollout")
        for version in (1, 2, 3):
            text = trainer.call("publish", seed=version, weight_version=version)
            update_id = id_of(text)
            trainer.call("overwrite_source")
            assert rollout.call("import_update", manifest=text) == hashes(sample_weights(version))
            if may_write:
                rollout.call("write", update_id=update_id)
            rollout.call("acknowledge", update_id=update_id)
            told = only_report(trainer.call("reports", update_id=update_id))
            assert (told["worker"], told["state"]) == ("rollout", "acknowledged")
            assert told["pid"] == rollout.pid
            rollout.call("drop", update_id=update_id)
            for child in (rollout, trainer):
                child.call("release", update_id=update_id)
        assert [rollout.stop(), trainer.stop()] == [0, 0]

    @pytest.mark.usefixtures("crossing")
    def test_a_write_ends_its_writer_exactly_if_it_is_not_allowed(
        self,
        publisher: BridgeOver,
        make_bridge: MakeBridge,
        make_peer: MakePeer,
        *,
        may_write: bool,
    ) -> None:
        """No consumer can reach the published bytes; one that tries may die of it."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        mine = make_bridge().import_update(manifest)
        child = make_peer()
        child.call("import_update", manifest=manifest.to_json())
        if may_write:
            child.call("write", update_id=manifest.update_id)
            changed = child.call("held", update_id=manifest.update_id)
            assert changed["scale"] != hashes(source)["scale"]
        else:
            with pytest.raises(ChildDied):
                child.call("write", update_id=manifest.update_id)
        late = make_bridge().import_update(manifest)
        child.kill()
        assert contents_of(mine) == contents_of(late) == contents_of(source)

    @pytest.mark.usefixtures("crossing")
    def test_many_tensors_need_few_descriptors(
        self, publisher: BridgeOver, make_peer: MakePeer
    ) -> None:
        """5,000 tensors in a process that may open 256 files, on either side."""
        source = sample_weights(1, num_more=5000)
        manifest = publisher.publish(source, weight_version=1)
        child = make_peer(max_files=256)
        assert child.call("import_update", manifest=manifest.to_json()) == hashes(source)
        text = child.call("publish", seed=2, weight_version=1, num_more=5000)
        expected = hashes(sample_weights(2, num_more=5000))
        assert child.call("import_update", manifest=text) == expected
        assert child.stop() == 0

    # ---- deaths ---------------------------------------------------------------------------------

    @pytest.mark.usefixtures("crossing")
    @pytest.mark.parametrize("event", _DEATHS)
    def test_a_consumer_killed_at_any_transition_disturbs_nobody(
        self,
        publisher: BridgeOver,
        make_bridge: MakeBridge,
        make_peer: MakePeer,
        event: str,
    ) -> None:
        """Its neighbour keeps its bytes, the publisher sees it gone, its memory is used again."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        neighbour = make_bridge(source_worker="neighbour")
        held = neighbour.import_update(manifest)
        taken = []
        victim = make_peer(worker="victim", observer=KillAt(event))
        calls = {
            "import": ("import_update", {"manifest": manifest.to_json()}),
            "acknowledge": ("acknowledge", {"update_id": manifest.update_id}),
            "reject": ("reject", {"update_id": manifest.update_id, "reason": "no"}),
            "release": ("release", {"update_id": manifest.update_id}),
        }
        with suppress(ChildDied):
            for call in _DEATHS[event]:
                name, options = calls[call]
                victim.call(name, **options)
        _killed(victim)
        until(
            lambda: all(
                report.presence == "gone"
                for report in publisher.consumers()
                if report.worker == "victim"
            ),
            what="the kernel drops the victim's locks",
        )
        assert contents_of(held) == contents_of(source)
        neighbour.acknowledge(manifest.update_id)
        del held
        neighbour.release(manifest.update_id)
        publisher.release(manifest.update_id)
        for version in range(2, 12):
            newer = publisher.publish(sample_weights(version), weight_version=version)
            taken.append(publisher.published_nbytes)
            assert contents_of(neighbour.import_update(newer)) == contents_of(
                sample_weights(version)
            )
            neighbour.release(newer.update_id)
            publisher.release(newer.update_id)
        assert max(taken) <= max(taken[:2]), "the victim's memory is never used again"

    @pytest.mark.usefixtures("crossing")
    @pytest.mark.parametrize("step", [Step.BEFORE_CARRY, Step.AFTER_CARRY, Step.AFTER_RELEASE])
    def test_a_killed_publisher_leaves_consumers_their_bytes(
        self, make_bridge: MakeBridge, make_peer: MakePeer, step: Step
    ) -> None:
        """In the middle of publishing or releasing; and its successor is followed at once."""
        count = 2 if step is not Step.AFTER_RELEASE else 1
        victim = make_peer(worker="trainer", faults=(Fault(step, die, count),))
        text = victim.call("publish", seed=1, weight_version=1)
        consumer = make_bridge(source_worker="rollout")
        held = consumer.import_update(text)
        consumer.acknowledge(id_of(text))
        with suppress(ChildDied):
            victim.call("release", update_id=id_of(text))
            victim.call("publish", seed=2, weight_version=2)
        _killed(victim)
        expected = contents_of(sample_weights(1))
        assert contents_of(held) == expected
        late = make_bridge(source_worker="late")
        with suppress(WeightBridgeError):  # gone with its publisher: a typed error
            assert contents_of(late.import_update(text)) == expected
        successor = make_bridge(source_worker="trainer")
        newer = successor.publish(sample_weights(3), weight_version=1)
        assert contents_of(consumer.import_update(newer)) == contents_of(sample_weights(3))
        consumer.acknowledge(newer.update_id)
        consumer.release(id_of(text))
        assert contents_of(held) == expected
        assert consumer.active_weight_version == 1

    @pytest.mark.usefixtures("crossing")
    def test_a_dead_publishers_update_is_refused_or_true(
        self, consumer: BridgeOver, make_peer: MakePeer
    ) -> None:
        """Its manifest arrives after its death, for the first time."""
        victim = make_peer(worker="trainer")
        text = victim.call("publish", seed=1, weight_version=1)
        victim.kill()
        with watchdog(30), suppress(WeightBridgeError):
            assert contents_of(consumer.import_update(text)) == contents_of(sample_weights(1))

    @pytest.mark.usefixtures("crossing")
    def test_an_update_that_others_read_is_refused_or_true_once_its_publisher_died(
        self, consumer: BridgeOver, make_peer: MakePeer
    ) -> None:
        """Its consumer asks for a tensor only then."""
        victim = make_peer(worker="trainer")
        manifest = WeightUpdateManifest.from_json(victim.call("publish", seed=1, weight_version=1))
        tensors = consumer.consumer.import_update(manifest, scope=Scope.LEASE)
        victim.kill()
        with watchdog(30), suppress(WeightBridgeError):
            assert contents_of(tensors) == contents_of(sample_weights(1))
