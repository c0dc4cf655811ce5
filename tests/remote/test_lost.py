"""An engine that ends, or is started anew, while its side-car goes on."""

import errno
import os
import socket
from pathlib import Path

import httpx
import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest
from rl_bridge.errors import (
    EngineLost,
    StaleUpdate,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.remote import RemoteEngine
from tests.helpers import weights
from tests.remote.engines import DEATH
from tests.remote.process import SidecarProcess, make_key


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(weights(version), weight_version=version)


def test_an_engine_that_is_gone_is_not_servable_until_it_gets_an_update(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("elsewhere")
    says = sidecar.directory / DEATH
    first, second = publish(trainer, 1), publish(trainer, 2)
    with sidecar.client() as engine:
        engine.update_weights(first)
        engine.check_servable()
        with pytest.raises(StaleUpdate, match="active already"):
            engine.update_weights(first)
        says.write_text("gone")
        with pytest.raises(EngineLost, match="Start a fresh one"):
            engine.update_weights(second)
        status = engine.status()
        assert (status.state, status.servable, status.active_weight_version) == (
            "lost",
            False,
            None,
        )
        assert httpx.get(f"{sidecar.url}/readyz", trust_env=False).status_code == 503
        with pytest.raises(EngineLost, match="send it a version"):
            engine.check_servable()
        says.write_text("fresh")
        # What the one before had may come again.
        assert engine.update_weights(first).root == first.root
        engine.check_servable()
        assert engine.active_weight_version == 1


def test_an_engine_that_was_started_anew_is_noticed_before_it_is_trusted(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start("elsewhere")
    says = sidecar.directory / DEATH
    with sidecar.client() as engine:
        engine.update_weights(publish(trainer, 1))
        says.write_text("fresh")
        second = publish(trainer, 2)
        engine.import_weights(second)
        engine.prepare_weights(second)
        says.write_text("install")
        # It goes back to what it was started with, which is no version.
        with pytest.raises(WeightUpdateRejectedError, match="no more memory"):
            engine.commit_weights(second)
        status = engine.status()
        assert (status.state, status.active_weight_version) == ("lost", None)
        assert "it was started anew" in status.lost
        engine.update_weights(publish(trainer, 3))
        assert engine.status().state == "serving"


def test_a_client_without_descriptors_is_told_so_and_no_engine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_args: object, **_kwargs: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", exhausted)
    with (
        RemoteEngine("http://127.0.0.1:9", make_key(tmp_path)) as engine,
        pytest.raises(WeightBridgeUnavailableError, match=r"could not be sent: .*Close files"),
    ):
        engine.status()
