"""What the ranks of any engine do at the end of an update, whatever of it fails."""

import errno
import logging
import os

import pytest

from rl_bridge import TensorBridge, WeightBridgeError
from rl_bridge.engines.sglang import rank
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from tests.integrations.sglang_drivers import Engine, engine, importing, trainer, update
from tests.integrations.test_sglang_exchange import equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def fail(*_: object) -> None:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.parametrize("reason", [None, "another rank refused it"])
def test_a_trainer_gets_its_slot_back_where_the_installer_cannot_let_go(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    assert engine.prepare(manifest)["ok"]
    with monkeypatch.context() as patch:
        patch.setattr(SGLangModelInstaller, "abandon", fail)
        assert engine.ask("abandon", update_id=manifest.update_id, reason=reason)["ok"]
    (told,) = trainer.holders(manifest)
    assert (told.tensors_held, told.reason) == (False, reason)
    update(importing(engine), trainer.publish(version(2), weight_version=2))
    assert equal(held(engine.model), loaded(2))


def test_a_trainer_is_told_of_a_commit_that_was_cut_off_before_it_was(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    with monkeypatch.context() as patch:
        patch.setattr(rank, "acknowledge", fail)
        with pytest.raises(Exception, match="BlockingIOError"):
            update(importing(engine), manifest)
    importing(engine).take_over()
    (told,) = trainer.holders(manifest)
    assert told.proof is not None
    assert not told.tensors_held
    assert engine.ask("describe")["update_id"] == manifest.update_id
    assert equal(held(engine.model), loaded(1))


def test_a_trainer_that_cannot_be_told_is_a_warning_where_the_commit_was_asked_for(
    engine: Engine,
    trainer: TensorBridge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise WeightBridgeError("the way back is gone")

    manifest = trainer.publish(version(1), weight_version=1)
    monkeypatch.setattr(TensorBridge, "acknowledge", lose)
    caplog.set_level(logging.WARNING, "rl_bridge.engines.sglang.handles")
    update(importing(engine), manifest)
    (said,) = [r.getMessage() for r in caplog.records if r.name.endswith("sglang.handles")]
    assert "the way back is gone" in said
    assert equal(held(engine.model), loaded(1))
