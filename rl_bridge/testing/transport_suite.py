"""`TransportSuite`: what every transport must keep, as tests that a transport's class inherits.

Beside its first half, `rl_bridge.testing.transport_case`: what is hostile, damaged, late or foreign
is refused by type, changes nothing, and holds nothing; and other processes come, go and die. Every
child is spawned, built from class and arguments, and gets manifests as JSON text. Whatever a child
does, the parent waits with a deadline, and kills what survives before it asserts.
"""

import copy
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.errors import (
    BridgeClosed,
    ChecksumMismatch,
    DigestMismatch,
    ForeignTransport,
    IllegalTransition,
    SegmentError,
    StaleUpdate,
    UnknownUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightManifestValidationError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.parts import Scope
from rl_bridge.testing.faults import Fault, KillAt, Step, die
from rl_bridge.testing.leaks import Holdings, assert_nothing_leaks
from rl_bridge.testing.peer import BridgeOver, hashes, id_of, sample_weights
from rl_bridge.testing.processes import DEADLINE_S, Child, ChildDied, ChildError, until, watchdog
from rl_bridge.testing.tensors import contents_of, random_tensor
from rl_bridge.testing.transport_case import (
    MakeBridge,
    MakePeer,
    TransportCase,
    faults_of,
    only_report,
)
from rl_bridge.transports.base import Transport

EXERCISED = {
    "crosses_processes": "test_the_manifest_crosses_a_process_exactly_if_declared",
    "zero_copy_import": "test_an_import_without_a_copy_takes_no_memory",
    "writable_import": "test_a_write_ends_its_writer_exactly_if_it_is_not_allowed",
    "binds_header": "test_a_changed_header_is_refused_and_the_update_still_arrives",
}
"""Each capability, and the test that does not believe it."""


def capabilities(transport: type[Transport] | Transport) -> frozenset[str]:
    """The capabilities that a transport declares: its boolean attributes."""
    return frozenset(
        name
        for name in dir(transport)
        if not name.startswith("_") and isinstance(getattr(transport, name, None), bool)
    )


_HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**70,
    1.5,
    True,
    None,
    "",
    "/etc/passwd",
    "../../../../etc/passwd",
    "a\0b",
    [],
    {},
    {"nested": {"nested": -1}},
)


def hostile_handles(handle: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every handle that differs from an honest one in one place."""
    for path in _leaves(handle):
        for value in _HOSTILE:
            changed = copy.deepcopy(handle)
            _parent(changed, path)[path[-1]] = value
            yield changed
        without = copy.deepcopy(handle)
        del _parent(without, path)[path[-1]]
        yield without
    yield {**handle, "surplus": 1}


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, item in value.items():
        yield (*path, key)
        if isinstance(item, dict):
            yield from _leaves(item, (*path, key))


def _parent(value: Any, path: tuple[str, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def _with_table(manifest: WeightUpdateManifest, **tensors: Any) -> WeightUpdateManifest:
    """The manifest with other tensors, consistent in itself: only the memory contradicts it."""
    table = TensorTable.pack(tensors)
    num = len(table.names) * DIGEST_NBYTES
    digests = (manifest.digests * (num // len(manifest.digests) + 1))[:num]
    return manifest.model_copy(update={"table": table, "digests": digests})


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


class TransportSuite(TransportCase):
    """Inherit, name the transport, and all promises are tested.

    ::

        class TestFilesystem(TransportSuite):
            transport_class = Filesystem

            @pytest.fixture
            def transport_kwargs(self, tmp_path):
                return {"directory": tmp_path}
    """

    num_cycles = 50
    """How often an update comes and goes in the leak test."""

    def test_it_works_on_this_machine(self, transport_kwargs: dict[str, Any]) -> None:
        """A suite that ran on a blocked transport would prove nothing."""
        found = self.transport_class.probe()
        assert found.status == "pass", found.cause
        assert found.name == self.transport_class.name
        with pytest.raises(TypeError, match="no_such_option"):
            self.transport_class.create(**transport_kwargs, no_such_option=1)

    def test_every_declared_capability_is_exercised(self, transport_kwargs: dict[str, Any]) -> None:
        """A capability that no test knows is a claim that nobody checks."""
        declared = capabilities(self.transport_class.create(**transport_kwargs))
        assert declared == EXERCISED.keys()
        for name in EXERCISED.values():
            assert callable(getattr(self, name))

    def test_an_import_without_a_copy_takes_no_memory(
        self, publisher: BridgeOver, consumer: BridgeOver, transport_kwargs: dict[str, Any]
    ) -> None:
        """Memory of this process's own stays where it was, also while the tensors are read."""
        if not self.transport_class.create(**transport_kwargs).zero_copy_import:
            pytest.skip(f"{self.transport_class.name} declares that an import copies")
        nbytes = 64 << 20
        source = {"w": random_tensor("uint8", (nbytes,), seed=1)}
        for version, nbytes_then in ((1, 1 << 16), (2, nbytes)):
            # Code that is loaded the first time, above all a device's, is no copy.
            manifest = publisher.publish({"w": source["w"][:nbytes_then]}, weight_version=version)
            before = _private_nbytes()
            tensors = consumer.import_update(manifest)
            assert int(tensors["w"][::4096].max()) > 0
        assert _private_nbytes() - before < nbytes // 4

    def test_fifty_cycles_leave_nothing_behind(
        self, make_bridge: MakeBridge, transport_kwargs: dict[str, Any]
    ) -> None:
        """Descriptors, mappings, names and memory are where they were: serial updates."""
        publisher, consumer = make_bridge(), make_bridge()
        version = 0
        source = {"w": random_tensor("uint8", (1 << 20,), seed=1)}

        def cycle() -> None:
            nonlocal version
            version += 1
            source["w"] += 1
            manifest = publisher.publish(source, weight_version=version)
            tensors = consumer.import_update(manifest.to_json())
            hashes(tensors)
            if version % 3:
                consumer.acknowledge(manifest.update_id)
            else:
                consumer.reject(manifest.update_id, "every third")
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

        assert_nothing_leaks(cycle, *self._watched(transport_kwargs), num_cycles=self.num_cycles)

    def test_fifty_bridges_leave_nothing_behind(self, transport_kwargs: dict[str, Any]) -> None:
        """Ends that open and close, with updates that nobody released and one that was refused."""

        def cycle() -> None:
            transport = self.transport_class.create(**transport_kwargs)
            with BridgeOver(transport) as publisher, BridgeOver(transport) as consumer:
                source = {"w": random_tensor("uint8", (1 << 16,), seed=1)}
                held = consumer.import_update(publisher.publish(source, weight_version=1))
                consumer.import_update(publisher.publish(source, weight_version=2))
            del held

        assert_nothing_leaks(cycle, *self._watched(transport_kwargs), num_cycles=self.num_cycles)

    @staticmethod
    def _watched(transport_kwargs: dict[str, Any]) -> list[Path]:
        """Directories among the transport's options: what it leaves there counts as well."""
        return [value for value in transport_kwargs.values() if isinstance(value, Path)]

    # ---- the wrong is refused --------------------------------------------------------------------

    def test_a_flipped_byte_anywhere_is_a_checksum_mismatch(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """First and last byte of every tensor, in the memory behind the manifest."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        table = manifest.table
        for name, offset, nbytes in zip(table.names, table.offsets, table.nbytes, strict=True):
            for place in (offset, offset + nbytes - 1) if nbytes else ():
                faults_of(publisher).corrupt(manifest, place)
                consumer = make_bridge()
                with pytest.raises(ChecksumMismatch, match="tensor checksum mismatch") as caught:
                    consumer.import_update(manifest)
                assert repr(name) in str(caught.value)
                assert consumer.update_status(manifest.update_id) == "rejected"
                consumer.close()
                faults_of(publisher).corrupt(manifest, place)
        assert contents_of(make_bridge().import_update(manifest)) == contents_of(source)

    def test_a_corrupt_update_is_refused_for_good_and_the_next_one_arrives(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The same update is not tried again; the publisher hears of it; its memory is free."""
        faults_of(publisher).corrupt_next = True
        bad = publisher.publish({"w": torch.ones(1000)}, weight_version=1)
        with pytest.raises(ChecksumMismatch):
            consumer.import_update(bad)
        with pytest.raises(WeightUpdateRejectedError, match="rejected"):
            consumer.import_update(bad)
        faults_of(publisher).corrupt(bad, 0)  # whole again, and still refused
        with pytest.raises(WeightUpdateRejectedError, match="rejected"):
            consumer.import_update(bad)
        with pytest.raises(IllegalTransition):
            consumer.acknowledge(bad.update_id)
        told = only_report(publisher.holders(bad.update_id))
        assert told.state == "rejected"
        assert "checksum mismatch" in str(told.reason)
        source = {"w": torch.ones(1000)}
        good = publisher.publish(source, weight_version=2)
        assert contents_of(consumer.import_update(good)) == contents_of(source)
        consumer.acknowledge(good.update_id)
        assert consumer.active_weight_version == 2

    def test_a_digest_that_was_changed_with_its_root_is_a_checksum_mismatch(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """A manifest that is consistent in itself still has to agree with the bytes."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        first, second = manifest.digests[:DIGEST_NBYTES], manifest.digests[DIGEST_NBYTES:]
        for digests in (bytes(byte ^ 1 for byte in manifest.digests), second + first):
            with pytest.raises(ChecksumMismatch):
                make_bridge().import_update(manifest.model_copy(update={"digests": digests}))

    def test_a_changed_header_is_refused_and_the_update_still_arrives(
        self, publisher: BridgeOver, make_bridge: MakeBridge, transport_kwargs: dict[str, Any]
    ) -> None:
        """The header is sealed with the bytes; the manifest as it was published is accepted."""
        if not self.transport_class.create(**transport_kwargs).binds_header:
            pytest.skip(f"{self.transport_class.name} declares that it binds no header")
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=3, metadata={"step": 1})
        changes: list[dict[str, Any]] = [
            {"weight_version": 4},
            {"metadata": {"step": 2}},
            {"source_worker": "another"},
            {"source_rank": manifest.source_rank + 1},
            {"created_at": manifest.created_at + 1.0},
        ]
        consumer = make_bridge()
        for changed in changes:
            with pytest.raises(DigestMismatch, match="weight_version") as caught:
                consumer.import_update(manifest.model_copy(update=changed))
            assert manifest.header_digest.hex() in str(caught.value)
        assert contents_of(consumer.import_update(manifest)) == contents_of(source)
        consumer.acknowledge(manifest.update_id)
        assert consumer.active_weight_version == 3

    def test_a_changed_manifest_text_is_refused(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Cut off anywhere, or one character changed: never an import of something else."""
        source = {"w": random_tensor("float32", (3, 5), seed=1)}
        text = publisher.publish(source, weight_version=1).to_json()
        for cut in range(0, len(text), 7):
            with pytest.raises(WeightManifestValidationError):
                consumer.import_update(text[:cut])
        with pytest.raises(DigestMismatch):
            consumer.import_update(text.replace('"float32"', '"int32"'))
        root = text.index('"root":"') + len('"root":"')
        wrong = "1" if text[root] == "0" else "0"
        with pytest.raises(DigestMismatch):
            consumer.import_update(text[:root] + wrong + text[root + 1 :])

    def test_hostile_handles_are_refused_by_type(
        self, publisher: BridgeOver, consumer: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """One field wrong in every way: an error of the bridge's, at once, or the true bytes."""
        source = {"w": random_tensor("float32", (3, 5), seed=1)}
        expected = contents_of(source)
        honest = publisher.publish(source, weight_version=1)
        handle = json.loads(json.dumps(thaw(honest.handle)))
        consumer.import_update(honest)
        before = Holdings.now()
        for number, changed in enumerate(hostile_handles(handle)):
            # An id of its own, or it would be refused as known; the stamp does not know it then.
            for update_id in (honest.update_id, f"{number:032x}"):
                other = make_bridge()
                fields = {"handle": changed, "update_id": update_id}
                with watchdog(30), suppress(WeightBridgeError):
                    tensors = other.import_update(honest.model_copy(update=fields))
                    assert contents_of(tensors) == expected, changed
                    del tensors
                other.close()
        after = Holdings.now()
        assert len(after.descriptors) <= len(before.descriptors)
        assert not after.files - before.files
        assert contents_of(consumer.import_update(honest)) == expected

    def test_a_layout_that_does_not_fit_the_memory_is_refused(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Larger, far larger, smaller, elsewhere: each is consistent in itself."""
        manifest = publisher.publish({"w": torch.ones(300)}, weight_version=1)
        layouts: list[dict[str, Any]] = [
            {"w": ("float32", (301,))},
            {"w": ("float32", (1 << 20,))},
            {"w": ("float32", (1 << 40,))},
            {"w": ("float32", (1,))},
            {"v": ("float32", (300,)), "w": ("float32", (300,))},
        ]
        for tensors in layouts:
            with pytest.raises(WeightBridgeError):
                make_bridge().import_update(_with_table(manifest, **tensors))
        make_bridge().import_update(manifest)

    def test_a_manifest_of_another_transport_is_foreign(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Refused before the handle is read."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        with pytest.raises(ForeignTransport):
            consumer.import_update(manifest.model_copy(update={"transport": "carrier-pigeon"}))

    def test_an_unknown_publisher_is_refused(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A publisher that closed before anybody looked."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        publisher.close()
        with pytest.raises(SegmentError):
            consumer.import_update(manifest)

    # ---- order ----------------------------------------------------------------------------------

    def test_a_late_manifest_is_stale(self, publisher: BridgeOver, consumer: BridgeOver) -> None:
        """Once a later version is acknowledged, an earlier one never gets in."""
        first, second = (
            publisher.publish(sample_weights(version), weight_version=version) for version in (1, 2)
        )
        consumer.import_update(second)
        consumer.acknowledge(second.update_id)
        for text in (first.to_json(), first.to_json(layout=False)):
            with pytest.raises(StaleUpdate):
                consumer.import_update(text)
        assert consumer.active_weight_version == 2

    def test_a_replayed_version_number_is_stale(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Another update under the acknowledged number is none of this publisher's."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
        with pytest.raises(StaleUpdate):
            consumer.import_update(manifest.model_copy(update={"update_id": "f" * 32}))

    def test_an_older_version_cannot_be_acknowledged_after_a_newer_one(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Both were imported in good order; versions still only grow."""
        first, second = (
            publisher.publish(sample_weights(version), weight_version=version) for version in (1, 2)
        )
        for manifest in (first, second):
            consumer.import_update(manifest)
        consumer.acknowledge(second.update_id)
        with pytest.raises(StaleUpdate):
            consumer.acknowledge(first.update_id)
        assert consumer.active_weight_version == 2
        assert consumer.active_update_id == second.update_id

    def test_a_released_update_is_stale(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """At once, and it is never mistaken for one of those that are written over it."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        publisher.release(manifest.update_id)
        for version in range(2, 8):
            with pytest.raises((StaleUpdate, SegmentError)):
                make_bridge().import_update(manifest)
            newer = publisher.publish(sample_weights(version), weight_version=version)
            publisher.release(newer.update_id)

    def test_versions_only_grow(self, publisher: BridgeOver) -> None:
        """Neither the same number nor a smaller one is published twice."""
        publisher.publish({"w": torch.ones(1)}, weight_version=5)
        for version in (5, 4, 0):
            with pytest.raises(VersionNotMonotonic, match="must increase monotonically"):
                publisher.publish({"w": torch.ones(1)}, weight_version=version)
        publisher.publish({"w": torch.ones(1)}, weight_version=6)

    def test_threads_that_publish_at_once_hand_out_each_number_once(
        self, publisher: BridgeOver
    ) -> None:
        """A number is one thread's, or nobody's; the last one is everybody's latest."""
        handed_out: list[int] = []

        def publish() -> None:
            for version in range(1, 25):
                with suppress(VersionNotMonotonic):
                    manifest = publisher.publish({"w": torch.ones(9)}, weight_version=version)
                    handed_out.append(manifest.weight_version)
                    publisher.release(manifest.update_id)

        threads = [threading.Thread(target=publish) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(handed_out) == len(set(handed_out)) > 0
        assert publisher.latest_manifest is not None
        assert publisher.latest_manifest.weight_version == max(handed_out) == 24

    def test_nothing_is_acknowledged_that_was_not_imported(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Neither an unknown update nor one whose import failed."""
        faults_of(publisher).corrupt_next = True
        manifest = publisher.publish({"w": torch.ones(9)}, weight_version=1)
        with pytest.raises(UnknownUpdate, match="before import_update succeeds"):
            consumer.acknowledge(manifest.update_id)
        with pytest.raises(ChecksumMismatch):
            consumer.import_update(manifest)
        with pytest.raises(IllegalTransition):
            consumer.acknowledge(manifest.update_id)
        assert consumer.active_weight_version is None

    def test_what_cannot_be_reported_is_refused_before_anything_changes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A proof that is no JSON leaves the update as it was."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        for proof in ({"loss": float("nan")}, {"engine": object()}):
            with pytest.raises(WeightBridgeError):
                consumer.acknowledge(manifest.update_id, proof=proof)
        assert consumer.active_weight_version is None
        consumer.acknowledge(manifest.update_id, proof={"ok": True, "parts": [1, {"two": None}]})
        told = only_report(publisher.holders(manifest.update_id))
        assert told.proof == {"ok": True, "parts": [1, {"two": None}]}

    def test_an_executor_cannot_be_fooled_by_a_closed_bridge(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Rejecting through a closed end is an error, not a silent success."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        consumer.close()
        with pytest.raises(BridgeClosed):
            consumer.reject(manifest.update_id, "too late")

    # ---- processes come and go -------------------------------------------------------------------

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


def _private_nbytes() -> int:
    """Resident memory of this process's own, shared pages not counted."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("this kernel does not tell RssAnon")
