"""A disk that is full: nothing is done that could not be written down, and later it goes on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from rl_bridge import ModuleInstallAdapter, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.remote import TwoPhaseExecutor
from rl_bridge.remote.sidecar import Sidecar
from rl_bridge.remote.state import Ledger, StateDirectory, Step
from tests.helpers import weights
from tests.remote.process import SidecarProcess


@contextmanager
def full(sidecar: SidecarProcess) -> Iterator[None]:
    """No file of this side-car can be written to."""
    before = resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, before)


def test_where_nothing_can_be_written_down_nothing_is_done(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    manifest = trainer.publish(weights(1), weight_version=1)
    with sidecar.client() as engine:
        engine.import_weights(manifest)
        engine.prepare_weights(manifest)
        with full(sidecar):
            for ask in (engine.status, lambda: engine.commit_weights(manifest)):
                with pytest.raises(WeightBridgeError, match=r"state\.db cannot be used: .*Free"):
                    ask()
        assert engine.status().state == "empty"
        engine.commit_weights(manifest)
        sidecar.kill()
        sidecar.start()
        assert engine.active_weight_version == 1


@pytest.mark.parametrize("step", ["prepared", "committing"])
def test_a_step_that_cannot_be_written_down_is_not_taken(
    step: Step, tmp_path: Path, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nonce of its request could be."""
    note = Ledger.note

    def fail(ledger: Ledger, manifest: WeightUpdateManifest, noted: Step) -> None:
        if noted == step:
            raise WeightBridgeError("the disk is full")
        note(ledger, manifest, noted)

    with (
        StateDirectory(tmp_path / "state") as state,
        make_weight_bridge("shared-memory", source_worker="engine") as bridge,
        TwoPhaseExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(weights(0))
        ) as executor,
    ):
        sidecar = Sidecar(executor, Ledger(state))
        manifests = [trainer.publish(weights(n), weight_version=n) for n in (1, 2)]
        for number, manifest in enumerate(manifests):
            sidecar.bring(manifest.to_json().encode())
            if number == 1:
                monkeypatch.setattr(Ledger, "note", fail)
            with pytest.raises(WeightBridgeError, match="full") if number else nullcontext():
                sidecar.prepare(manifest.update_id)
                sidecar.commit(manifest.update_id)
        status = sidecar.status()
        assert status.active_weight_version == executor.active_weight_version == 1
        if step == "prepared":
            assert sidecar.update(manifests[1].update_id).stage == "refused"
            assert status.pending is None
        else:
            monkeypatch.undo()
            assert sidecar.commit(manifests[1].update_id).weight_version == 2
