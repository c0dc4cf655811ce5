"""SGLang's ranks: what was given up before the engine was touched may come again."""

import errno
import os
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from tests.integrations.sglang_drivers import Engine, engine, trainer
from tests.integrations.test_sglang_exchange import equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def reasons(trainer: TensorBridge, manifest: Any) -> list[str | None]:
    return [report.reason for report in trainer.holders(manifest)]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.EMFILE, os.strerror(errno.EMFILE))],
    ids=["memory", "descriptors"],
)
def test_a_shortage_costs_no_update_and_is_told_as_one(
    engine: Engine, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    manifest = trainer.publish(version(1), weight_version=1)
    with monkeypatch.context() as patch:
        patch.setattr(SGLangModelInstaller, "prepare", fail)
        told = engine.prepare(manifest)
    assert (told["ok"], told["type"]) == (False, "WeightBridgeUnavailableError")
    assert "Free some, and try again; what was undone, as a later version." in told["message"]
    engine.update(manifest)
    assert equal(held(engine.model), loaded(1))


@pytest.mark.parametrize("asks", [False, True], ids=["driver_died", "driver_gave_it_up"])
def test_what_was_staged_and_not_installed_is_let_in_again(
    engine: Engine, trainer: TensorBridge, *, asks: bool
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    assert engine.prepare(manifest)["ok"]
    if asks:
        assert engine.ask("abandon", update_id=manifest.update_id, reason=None)["ok"]
    engine.update(manifest)
    assert equal(held(engine.model), loaded(1))


def test_what_does_not_fit_is_told_to_the_trainer_and_never_let_in_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    weights: dict[str, torch.Tensor] = version(1)
    manifest = trainer.publish(weights | {"more": weights["cut"]}, weight_version=1)
    assert not engine.prepare(manifest)["ok"]
    (reason,) = reasons(trainer, manifest)
    assert "more" in str(reason)
    assert "was rejected" in engine.prepare(manifest)["message"]


def test_what_another_rank_refused_is_never_let_in_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    assert engine.prepare(manifest)["ok"]
    named = {"update_id": manifest.update_id, "reason": "another rank refused it"}
    assert engine.ask("abandon", **named)["ok"]
    assert reasons(trainer, manifest) == ["another rank refused it"]
    assert "was rejected" in engine.prepare(manifest)["message"]
