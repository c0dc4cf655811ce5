"""G12 Explained: each acknowledgement carries phase timings, bytes and peak memory.

`bridge.timings(update_id)` has the phases of one side, `executor.last_ack` those of the engine,
`bridge.holders(update_id)` what consumers reported.
"""

from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.testing import BridgeOver, Stage, sample_weights
from tests.guarantees.kit import Carrier, Replica

PUBLISHING = {"gather", "stage_digest", "seal", "publish"}
IMPORTING = {"attach", "verify"}
INSTALLING = {"prepare", "install", "prove", "resume", "total"}


def test_publishing_and_importing_are_timed_phase_by_phase(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    published = trainer.timings(manifest)
    assert set(published) >= PUBLISHING
    rollout.import_update(manifest)
    assert set(rollout.timings(manifest)) >= IMPORTING
    parts = sum(ms for phase, ms in published.items() if phase != "publish")
    assert 0 < parts <= published["publish"]
    assert min(*published.values(), *rollout.timings(manifest).values()) >= 0


def test_an_acknowledgement_says_what_was_installed_and_how_long_each_phase_took(
    replica: Replica,
) -> None:
    acknowledgement = replica.update(1)
    manifest = replica.trainer.latest_manifest
    assert manifest is not None
    assert acknowledgement.update_id == manifest.update_id
    assert acknowledgement.weight_version == manifest.weight_version
    assert acknowledgement.root == manifest.root
    assert acknowledgement.total_nbytes == manifest.total_nbytes
    assert set(acknowledgement.timings_ms) >= INSTALLING | IMPORTING
    parts = sum(ms for phase, ms in acknowledgement.timings_ms.items() if phase != "total")
    assert 0 < parts <= acknowledgement.timings_ms["total"]


def test_peak_memory_is_that_of_the_process(replica: Replica) -> None:
    first = replica.update(1).peak_rss_nbytes
    assert first > 1 << 20
    ballast = torch.ones(64 << 20, dtype=torch.uint8)
    assert replica.update(2).peak_rss_nbytes >= first
    del ballast


def test_the_publisher_hears_the_consumers_phases(replica: Replica) -> None:
    acknowledgement = replica.update(1)
    (report,) = replica.reports(acknowledgement.update_id)
    assert set(report.timings_ms) >= (INSTALLING | IMPORTING) - {"total"}
    assert report.presence == "alive"
    assert report.weight_version == acknowledgement.weight_version


def test_each_consumer_is_told_apart_with_what_it_did(
    trainer: BridgeOver, make_bridge: Any, transport: Carrier
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    readers = {name: make_bridge(name) for name in ("one", "two", "three")}
    held = [reader.import_update(manifest) for reader in readers.values()]
    readers["one"].acknowledge(manifest, proof={"method": "mine"}, timings_ms={"swap": 1.5})
    readers["two"].reject(manifest, "does not fit")
    found = {report.worker: report for report in trainer.holders(manifest)}
    states = {name: report.state for name, report in found.items()}
    assert states == {"one": "acknowledged", "two": "rejected", "three": "verified"}
    assert found["one"].proof == {"method": "mine"}
    assert found["one"].timings_ms["swap"] == 1.5
    assert found["two"].reason == "does not fit"
    assert {report.presence for report in found.values()} == {"alive"}
    del held


def test_a_failure_explains_what_was_done_about_it(replica: Replica) -> None:
    before = replica.update(1)
    replica.fail_next(Stage.HALF_WAY)
    with pytest.raises(replica.fault) as caught:
        replica.update(2)
    told = " ".join([str(caught.value), *caught.value.__notes__])
    assert f"version {before.weight_version}" in told
    assert replica.executor.last_ack == before
    refused = replica.trainer.latest_manifest
    assert refused is not None
    (report,) = replica.reports(refused.update_id)
    assert report.reason is not None
    assert report.reason.split(": ")[-1] in told


def test_an_unknown_update_has_no_timings() -> None:
    with make_weight_bridge("shared-memory") as bridge, RolloutExecutor() as executor:
        assert bridge.timings("f" * 32) == {}
        assert executor.last_ack is None
