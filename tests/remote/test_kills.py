"""A side-car that is killed, at any step: its next start knows, and says so."""

import time

import httpx
import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest
from rl_bridge.errors import EngineLost, IllegalTransition, StaleUpdate
from rl_bridge.remote.signing import read_key
from tests.helpers import weights
from tests.remote.engines import DEATH
from tests.remote.process import SidecarProcess


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(weights(version), weight_version=version)


def test_killed_between_prepare_and_commit_the_previous_version_comes_back(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    first, second = publish(trainer, 1), publish(trainer, 2)
    header = read_key(sidecar.key_file).sign("GET", "/status", b"", time=int(time.time())).header()
    with sidecar.client() as engine:
        engine.update_weights(first)
        engine.import_weights(second)
        engine.prepare_weights(second)
        seen = {"authorization": header}
        assert httpx.get(f"{sidecar.url}/status", headers=seen, trust_env=False).is_success
        sidecar.kill()
        with pytest.raises(EngineLost):
            engine.commit_weights(second)
    status = sidecar.start()
    assert (status.state, status.active_weight_version, status.active_root) == (
        "serving",
        1,
        first.root,
    )
    assert status.recovery.outcome == "reinstalled"
    assert (status.recovery.interrupted, status.recovery.interrupted_at) == (
        second.update_id,
        "prepared",
    )
    # What was answered before the kill is not answered again.
    replayed = httpx.get(f"{sidecar.url}/status", headers=seen, trust_env=False)
    assert (replayed.status_code, replayed.json()["error"]) == (401, "SignatureRefused")
    with sidecar.client() as engine:
        assert engine.update(second).stage == "aborted"
        with pytest.raises(IllegalTransition, match="the side-car died when it was prepared"):
            engine.commit_weights(second)
        assert engine.update_weights(second).weight_version == 2


@pytest.mark.parametrize("step", ["install", "resume", "commit"])
def test_killed_in_a_commit_it_ends_at_that_version(
    step: str, sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("dying")
    first, second = publish(trainer, 1), publish(trainer, 2)
    with sidecar.client() as engine:
        engine.update_weights(first)
        (sidecar.directory / DEATH).write_text(step)
        with pytest.raises(EngineLost):
            engine.update_weights(second)
    sidecar.died()
    status = sidecar.start("dying")
    assert (status.active_weight_version, status.active_root) == (2, second.root)
    assert (status.recovery.outcome, status.recovery.interrupted_at) == (
        "reinstalled",
        "committing",
    )


def test_where_the_bytes_are_gone_the_engine_waits_for_an_update(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    first, second = publish(trainer, 1), publish(trainer, 2)
    with sidecar.client() as engine:
        engine.update_weights(second)
    sidecar.kill()
    trainer.release(second)
    for version in range(3, 12):  # until its memory is used again
        trainer.release(publish(trainer, version))
    status = sidecar.start()
    assert (status.state, status.servable, status.active_weight_version) == ("empty", False, None)
    assert (status.recovery.outcome, status.recovery.weight_version) == ("lost", 2)
    assert "could not be brought back" in status.recovery.detail
    with sidecar.client() as engine:
        with pytest.raises(StaleUpdate, match="is late"):
            engine.update_weights(first)
        engine.update_weights(publish(trainer, 12))
        assert engine.status().servable


def test_two_sidecars_do_not_share_a_state(sidecar: SidecarProcess) -> None:
    sidecar.start()
    other = SidecarProcess(sidecar.directory, sidecar.key_file)
    with pytest.raises(AssertionError, match="another live side-car uses the state directory"):
        other.start()
    with sidecar.client() as engine:
        assert engine.status().state == "empty"
