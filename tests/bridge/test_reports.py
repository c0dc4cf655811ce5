"""Who holds what: the publisher's view of its consumers, in this process and in others."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from rl_bridge import (
    SharedMemoryTensorBridge,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.bridge import ConsumerReport
from rl_bridge.errors import (
    StaleUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import Role, State, Transition
from rl_bridge.memory.control import RECORD_NBYTES, Record, UpdateReport
from rl_bridge.memory.segment import open_segment
from rl_bridge.processes import close_fd
from tests.bridge.engines import fours, publish


def only(publisher: TensorBridge, manifest: WeightUpdateManifest) -> ConsumerReport:
    (report,) = publisher.holders(manifest.update_id)
    return report


# ---- both transports alike ----------------------------------------------------------------------


def test_an_acknowledgement_without_a_proof_says_what_it_rests_on(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as consumer:
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
        assert only(publisher, manifest).proof == {"method": "import"}


def test_reporting_to_a_publisher_that_is_gone_is_no_error(transport: str) -> None:
    publisher = make_weight_bridge(transport)
    manifest = publish(publisher, 1)
    with make_weight_bridge(transport) as consumer:
        tensors = consumer.import_update(manifest)
        publisher.close()
        del publisher
        consumer.acknowledge(manifest.update_id)
        consumer.release(manifest.update_id)
        assert tensors["steps"].item() == 1
        late = manifest.model_copy(update={"update_id": "e" * 32})
        consumer.reject(late, "nobody hears it")
        assert consumer.update_status(late.update_id) == "rejected"


# ---- other processes ----------------------------------------------------------------------------


def test_what_a_hostile_consumer_writes_is_unreadable_and_hurts_nobody() -> None:

    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as publisher,
        make_weight_bridge("shared-memory", source_worker="victim") as victim,
        make_weight_bridge("shared-memory", source_worker="bystander") as bystander,
    ):
        manifest = publish(publisher, 1)
        victim.import_update(manifest)
        bystander.import_update(manifest)
        from rl_bridge.manifest.canonical import thaw
        from rl_bridge.memory.segment import SegmentRef

        fd = open_segment(SegmentRef(**thaw(manifest.handle)["control"]), writable=True)
        os.pwrite(fd, b"\xff" * 100, RECORD_NBYTES)
        seen = {(r.worker, r.presence) for r in publisher.consumers()}
        assert seen == {("?", "unreadable"), ("bystander", "alive")}
        victim.acknowledge(manifest.update_id)
        assert {r.worker for r in publisher.consumers()} == {"victim", "bystander"}
        close_fd(fd)


def test_tensors_that_die_while_the_reports_are_read_are_no_trouble(
    publisher: TensorBridge, consumer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(publisher, 1)
    held = [consumer.import_update(manifest)["layer.bias"]]
    consumer.acknowledge(manifest.update_id)
    consumer.release(manifest.update_id)
    copy = Record.model_copy

    def collecting(self: Record, **options: Any) -> Record:
        held.clear()  # as a collection does that runs in the middle
        return copy(self, **options)

    monkeypatch.setattr(Record, "model_copy", collecting)
    publisher.consumers()
    held.clear()  # (where nothing had to be copied)
    report = only(publisher, manifest)
    assert (report.state, report.tensors_held) == ("released", False)


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_late_manifests_do_not_push_out_what_is_known_of_the_active_update(transport: str) -> None:
    with make_weight_bridge(transport) as trainer, make_weight_bridge(transport) as rollout:
        late = []
        for version in range(1, 8):
            late.append(trainer.publish({"w": torch.full((4,), version)}, weight_version=version))
            trainer.release(late[-1].update_id)
        active = trainer.publish({"w": torch.zeros(4)}, weight_version=9)
        rollout.import_update(active)
        rollout.acknowledge(active.update_id)
        for manifest in late:
            with pytest.raises(StaleUpdate):
                rollout.import_update(manifest)
        assert [report.state for report in trainer.holders(active.update_id)] == ["acknowledged"]
        assert [report.state for report in trainer.holders(late[-1].update_id)] == ["rejected"]


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_a_replayed_manifest_does_not_replace_the_report_of_an_acknowledgement(
    transport: str,
) -> None:
    with make_weight_bridge(transport) as trainer, make_weight_bridge(transport) as rollout:
        manifests = []
        for version in (1, 2):
            manifests.append(trainer.publish({"w": torch.ones(4)}, weight_version=version))
            rollout.import_update(manifests[-1])
            rollout.acknowledge(manifests[-1].update_id)
            rollout.release(manifests[-1].update_id)
        for number in range(40):  # more than a consumer remembers: the first update is forgotten
            rollout.reject(f"{number:032x}", "not wanted")
        with pytest.raises(StaleUpdate):
            rollout.import_update(manifests[0])
        assert [report.state for report in trainer.holders(manifests[0].update_id)] == ["released"]


# ---- tensors that are still held -----------------------------------------------------------------


def releasing_at(target: State) -> SharedMemoryTensorBridge:
    """A bridge whose observer releases an update in the middle of its step to `target`."""

    def release(step: Transition) -> None:
        if step.role is Role.CONSUMER and step.target is target:
            bridge.release(step.update_id)

    bridge = SharedMemoryTensorBridge(source_worker="rollout", observer=release)
    return bridge


@pytest.mark.parametrize("by_observer", [False, True])
def test_a_rejected_update_that_is_released_is_held_until_its_last_tensor_dies(
    by_observer: bool, trainer: SharedMemoryTensorBridge
) -> None:
    with releasing_at(State.REJECTED if by_observer else State.TORN) as bridge:
        manifest = trainer.publish(fours(1), weight_version=1)
        tensor = bridge.import_update(manifest)["weight"]
        bridge.reject(manifest, "not this one")
        bridge.release(manifest)
        report = only(trainer, manifest)
        assert (report.state, report.tensors_held) == ("released", True)
        assert tensor.tolist() == [1.0] * 4
        del tensor
        report = only(trainer, manifest)
        assert (report.state, report.tensors_held) == ("released", False)


def test_tensors_of_an_earlier_import_of_an_update_count_until_the_last_one_dies(
    trainer: SharedMemoryTensorBridge, rollout: SharedMemoryTensorBridge
) -> None:
    manifest = trainer.publish(fours(1), weight_version=1)
    earlier = rollout.import_update(manifest)["weight"]
    rollout.release(manifest)
    rollout.import_update(manifest)
    rollout.release(manifest)
    assert only(trainer, manifest).tensors_held
    assert earlier.tolist() == [1.0] * 4
    del earlier
    assert not only(trainer, manifest).tensors_held


# ---- a refusal of what was not opened ------------------------------------------------------------


def test_a_publisher_hears_that_its_update_came_too_late(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    late, latest = publish(publisher, 1), publish(publisher, 2)
    consumer.import_update(latest)
    consumer.acknowledge(latest.update_id)
    with pytest.raises(StaleUpdate):
        consumer.import_update(late)
    (report,) = publisher.holders(late.update_id)
    assert (report.state, report.weight_version) == ("rejected", 1)
    assert "stale" in str(report.reason)


def test_a_publisher_hears_of_an_update_that_was_rejected_before_it_came(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    consumer.reject(manifest.update_id, "not that one")
    assert publisher.holders(manifest.update_id) == []
    with pytest.raises(WeightUpdateRejectedError, match="not that one"):
        consumer.import_update(manifest)
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.weight_version) == ("rejected", 1)


def test_a_tensor_that_dies_while_a_report_is_written_is_reported_behind_it(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    held = [consumer.import_update(manifest)["layer.weight"]]
    end: Any = consumer.consumer.end
    plain = end.report
    reports: list[UpdateReport] = []

    def report(of: Any, report: UpdateReport) -> None:
        reports.append(report)
        held.clear()
        plain(of, report)

    end.report = report
    consumer.release(manifest)
    assert [report.tensors_held for report in reports] == [True, False]
    (seen,) = publisher.holders(manifest)
    assert (seen.state, seen.tensors_held) == ("released", False)


def test_nothing_is_reported_while_the_interpreter_ends() -> None:
    program = """
        import torch
        from rl_bridge.testing.peer import BridgeOver
        from rl_bridge.transports.local import LocalClone

        class Telling(LocalClone):
            def consumer_end(self, worker, rank):
                end = super().consumer_end(worker, rank)
                end.report = lambda manifest, report: print(report.state, flush=True)
                return end

        bridge = BridgeOver(Telling())
        bridge.transport = "local-clone"
        bridge._transport.name = "local-clone"
        manifest = bridge.publish({"w": torch.ones(3)}, weight_version=1)
        kept = bridge.import_update(manifest)["w"]
        bridge.release(manifest.update_id)
        print("end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["verified", "released", "end"]
