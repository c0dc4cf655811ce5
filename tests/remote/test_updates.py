"""Updates over HTTP into an engine in another process: the bytes by shared memory."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from rl_bridge import TensorBridge, WeightUpdateManifest
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    IllegalTransition,
    IncompatibleUpdate,
    StaleUpdate,
    UnknownUpdate,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.testing.tensors import bytes_of
from tests.cli_program import call
from tests.helpers import weights
from tests.remote.conftest import states
from tests.remote.engines import BEGUN, DEATH
from tests.remote.process import SidecarProcess


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(weights(version), weight_version=version)


def test_an_engine_in_another_process_holds_what_was_published(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    assert sidecar.start("writing", afresh=True).state == "empty"
    with sidecar.client() as engine:
        with pytest.raises(WeightBridgeUnavailableError, match="no verified version"):
            engine.check_servable()
        for version in (1, 2):
            manifest = publish(trainer, version)
            ack = engine.update_weights(manifest.to_json() if version == 2 else manifest)
            assert (ack.weight_version, ack.root) == (version, manifest.root)
            assert (ack.proof.method, ack.proof.root) == ("digest", manifest.root)
            assert {"verify", "prepare", "install", "prove", "total"} <= set(ack.timings_ms)
            assert engine.last_ack == ack
            assert ack
            for ask in (dict, len, lambda one: one["weight"], lambda one: "weight" in one):
                with pytest.raises(
                    WeightBridgeUnavailableError, match="was installed by another process"
                ):
                    ask(ack)
            held = torch.load(sidecar.directory / "held.pt", weights_only=True)
            expected = {name: bytes_of(tensor) for name, tensor in weights(version).items()}
            assert {name: bytes_of(tensor) for name, tensor in held.items()} == expected
            assert states(trainer, manifest) == ["acknowledged"]
        engine.check_servable()
        status = engine.status()
        assert (status.state, engine.active_weight_version) == ("serving", 2)
        assert (status.active_update_id, status.active_root) == (manifest.update_id, manifest.root)
    page = httpx.get(f"{sidecar.url}/metrics", trust_env=False).text
    assert "rl_bridge_weight_version 2.0" in page
    assert 'rl_bridge_sidecar_steps_total{outcome="ok",step="commit"} 2.0' in page


def test_steps_that_are_sent_twice_are_done_once(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    with shared.client() as engine:
        for stage in ("imported", "imported"):
            assert engine.import_weights(manifest).stage == stage
        assert engine.prepare_weights(manifest) == engine.prepare_weights(manifest)
        assert engine.import_weights(manifest).stage == "prepared"
        assert engine.status().pending == engine.update(manifest)
        assert engine.commit_weights(manifest) == engine.commit_weights(manifest)
        with pytest.raises(StaleUpdate, match="active already"):
            engine.update_weights(manifest)
        with pytest.raises(IllegalTransition, match="is committed"):
            engine.abort_weights(manifest, "too late")


def test_a_step_at_the_wrong_moment_is_refused_and_changes_nothing(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    with shared.client() as engine:
        first = publish(trainer, 1)
        engine.update_weights(first)
        second = publish(trainer, 2)
        for step in (engine.prepare_weights, engine.commit_weights, engine.update):
            with pytest.raises(UnknownUpdate, match=r"Send its manifest to POST /updates"):
                step(second)
        engine.import_weights(second)
        with pytest.raises(IllegalTransition, match="expected it to be prepared"):
            engine.commit_weights(second)
        engine.prepare_weights(second)
        assert engine.abort_weights(second, "changed my mind").reason == "changed my mind"
        assert engine.abort_weights(second, "again").reason == "changed my mind"
        with pytest.raises(IllegalTransition, match="aborted: changed my mind"):
            engine.commit_weights(second)
        status = engine.status()
        assert (status.active_weight_version, status.pending) == (1, None)
        third, fourth = publish(trainer, 3), publish(trainer, 4)
        engine.update_weights(fourth)
        with pytest.raises(StaleUpdate):
            engine.update_weights(third)
        assert engine.active_weight_version == 4


def test_a_later_update_takes_the_place_of_one_that_waits(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    first, second = publish(trainer, 1), publish(trainer, 2)
    with shared.client() as engine:
        engine.import_weights(first)
        engine.prepare_weights(first)
        engine.update_weights(second)
        assert engine.update(first).stage == "aborted"
        assert "version 2 came" in engine.update(first).reason
        assert engine.active_weight_version == 2


def test_an_update_whose_trainer_went_away_is_given_up(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start(hold_s=0.3)
    manifest = publish(trainer, 1)
    with sidecar.client() as engine:
        engine.import_weights(manifest)
        engine.prepare_weights(manifest)
        until(lambda: engine.update(manifest).stage == "aborted", what="it is aborted")
        assert "no next step came" in engine.update(manifest).reason
        with pytest.raises(IllegalTransition):
            engine.commit_weights(manifest)
    assert states(trainer, manifest) == ["rejected"]


def test_a_manifest_for_another_model_is_refused_before_the_engine_is_touched(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("other_model")
    manifest = publish(trainer, 1)
    with sidecar.client() as engine:
        with pytest.raises(IncompatibleUpdate) as caught:
            engine.update_weights(manifest)
        assert "before the engine was touched" in " ".join(caught.value.__notes__)
        assert engine.update(manifest).stage == "refused"
        assert engine.status().state == "empty"


def test_an_install_that_fails_is_undone_and_the_engines_own_words_come_over(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    with shared.client() as engine:
        engine.update_weights(publish(trainer, 1))
        (shared.directory / DEATH).write_text("install")
        second = publish(trainer, 2)
        with pytest.raises(WeightUpdateRejectedError, match="OSError: no more memory in install"):
            engine.update_weights(second)
        assert engine.update(second).stage == "undone"
        assert (engine.active_weight_version, engine.status().state) == (1, "serving")
        engine.update_weights(publish(trainer, 3))


def probed(sidecar: SidecarProcess) -> tuple[int, int]:
    """What a cluster's probes get to see, which have no key: liveness and readiness."""
    alive, ready = (
        httpx.get(f"{sidecar.url}{path}", trust_env=False) for path in ("/healthz", "/readyz")
    )
    assert alive.json() == {"ok": True}
    if ready.is_success:
        assert ready.json() == {"ok": True}
    else:
        assert "expected it to be serving" in ready.json()["detail"]
    return alive.status_code, ready.status_code


def test_probes_are_answered_without_a_key_and_do_not_wait_for_the_engine(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("waiting")
    assert probed(sidecar) == (200, 503)
    with sidecar.client() as engine, ThreadPoolExecutor() as threads:
        updated = threads.submit(engine.update_weights, publish(trainer, 1))
        until((sidecar.directory / BEGUN).exists, what="the commit has begun")
        assert probed(sidecar) == (200, 503)
        (sidecar.directory / DEATH).touch()
        updated.result(DEADLINE_S)
        assert probed(sidecar) == (200, 200)
        for path in (BEGUN, DEATH):
            (sidecar.directory / path).unlink()
        updated = threads.submit(engine.update_weights, publish(trainer, 2))
        until((sidecar.directory / BEGUN).exists, what="the commit has begun")
        assert probed(sidecar) == (200, 200)
        (sidecar.directory / DEATH).touch()
        updated.result(DEADLINE_S)


def test_an_engine_that_hangs_is_told_within_the_deadline(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("hanging", step_timeout_s=0.5)
    manifest = publish(trainer, 1)
    with sidecar.client() as engine:
        with pytest.raises(DeadlineExceeded, match="did not commit"):
            engine.update_weights(manifest)
        assert engine.status().busy == f"commit update {manifest.update_id}"
        with pytest.raises(WeightBridgeUnavailableError, match="busy with commit"):
            engine.abort_weights(manifest, "it hangs")
    with sidecar.client(timeout_s=0.2) as impatient:
        impatient.status()


def test_a_client_does_not_wait_beyond_its_deadline(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("hanging")
    with (
        sidecar.client(timeout_s=1.0) as engine,
        pytest.raises(DeadlineExceeded, match=r"Ask its status\(\)"),
    ):
        engine.update_weights(publish(trainer, 1))


def test_a_sidecar_that_is_gone_is_an_engine_lost(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    with sidecar.client() as engine:
        engine.status()
        sidecar.kill()
        with pytest.raises(EngineLost, match="with the same state directory"):
            engine.update_weights(publish(trainer, 1))


def test_a_shell_is_told_where_the_engine_stands(
    shared: SidecarProcess, trainer: TensorBridge
) -> None:
    with shared.client() as engine:
        version = (engine.active_weight_version or 0) + 1
        manifest = publish(trainer, version)
        engine.update_weights(manifest)
    said = call("status", shared.url, "--key-file", shared.key_file)
    assert (said.code, said.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in said.out.splitlines()[1:])
    expected = {"state": "serving", "version": str(version), "proof": "digest"}
    assert {name: rows[name] for name in expected} == expected
    told = call("status", shared.url, "--key-file", shared.key_file, "--json").json
    assert told["active_root"] == manifest.root
