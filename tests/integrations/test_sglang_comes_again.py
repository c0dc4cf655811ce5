"""SGLang's ranks: what was given up before the engine was touched may come again."""

import errno
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.installers.sglang.model_installer import SGLangModelInstaller
from rl_bridge.integrations.sglang import calls, rank, votes
from tests.integrations.test_sglang_exchange import Model, equal, held, loaded, version


class Engine:
    """One rank, asked as SGLang's scheduler asks it; it has what a load of SGLang's own needs."""

    model_config = SimpleNamespace(model_path="")

    def __init__(self) -> None:
        self.model = Model()
        self.label = "user's"
        self.is_paused = False
        self.pauses: list[str | None] = []  # modes; None: it went on
        self.flushes = True
        self.refuses = ""  # a route of SGLang's own
        self.is_written_to_paused = True

    def get_model(self) -> Model:
        return self.model

    def ask(self, verb: str, **given: Any) -> dict[str, Any]:
        text = json.dumps({"verb": verb, "call": 1, **given})
        told: dict[str, Any] = json.loads(self.answer(text))
        return told

    def answer(self, text: str) -> str:
        if json.loads(text)["verb"] in {"install", "undo"}:
            self.is_written_to_paused &= self.is_paused
        return calls.answer(self.model, lambda: self.flushes, text)

    def prepare(self, manifest: Any) -> dict[str, Any]:
        return self.ask("prepare", manifest=manifest.to_json(), **{"import": True})

    def update(self, manifest: Any) -> None:
        asked = {"update_id": manifest.update_id}
        told = [self.prepare(manifest)]
        told += [self.ask(verb, **asked) for verb in ("install", "prove", "commit")]
        assert all(one["ok"] for one in told), told


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(rank, "require_supported", lambda _: None)
    monkeypatch.setattr(rank, "version", lambda: "0.5.23")
    monkeypatch.setattr(votes, "world_size", lambda: 1)
    monkeypatch.setattr(votes, "this_rank", lambda: 0)
    monkeypatch.setattr(votes, "all_reply", lambda reply, _: [reply])
    return Engine()


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("local", source_worker="trainer") as bridge:
        yield bridge


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
