"""A disk that is full: nothing is done that could not be written down, and later it goes on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_bridge import TensorBridge
from rl_bridge.errors import WeightBridgeError
from tests.helpers import weights
from tests.remote.process import SidecarProcess


@contextmanager
def full(sidecar: SidecarProcess, nbytes: int) -> Iterator[None]:
    """No file of this side-car can grow beyond so many bytes."""
    before = resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, before)


def test_where_the_steps_cannot_be_written_down_an_update_is_refused(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    with sidecar.client() as engine:
        engine.update_weights(trainer.publish(weights(1), weight_version=1))
        manifest = trainer.publish(weights(2), weight_version=2)
        engine.import_weights(manifest)
        # The nonces' file is shorter: they can be written.
        with full(sidecar, (sidecar.state_dir / "updates.log").stat().st_size):
            with pytest.raises(WeightBridgeError, match=r"updates\.log cannot be used"):
                engine.prepare_weights(manifest)
            found = engine.update(manifest)
            assert (found.stage, engine.status().pending) == ("refused", None)
            assert "Free space" in found.reason
        third = trainer.publish(weights(3), weight_version=3)
        engine.import_weights(third)
        engine.prepare_weights(third)
        with (
            full(sidecar, (sidecar.state_dir / "updates.log").stat().st_size),
            pytest.raises(WeightBridgeError, match=r"updates\.log cannot be used"),
        ):
            engine.commit_weights(third)
        assert engine.active_weight_version == 1
        engine.commit_weights(third)
        assert engine.active_weight_version == 3


def test_where_nonces_cannot_be_written_down_nothing_is_done(
    sidecar: SidecarProcess, trainer: TensorBridge
) -> None:
    sidecar.start()
    manifest = trainer.publish(weights(1), weight_version=1)
    with sidecar.client() as engine:
        engine.import_weights(manifest)
        engine.prepare_weights(manifest)
        with full(sidecar, 0):
            for ask in (engine.status, lambda: engine.commit_weights(manifest)):
                with pytest.raises(WeightBridgeError, match=r"nonces\.log cannot be used"):
                    ask()
        assert engine.status().state == "empty"
        engine.commit_weights(manifest)
        sidecar.kill()
        sidecar.start()
        assert engine.active_weight_version == 1
