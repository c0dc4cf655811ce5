"""What a driver of an SGLang engine left half-way: the next one's engine is at one version."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, TornEngine, WeightUpdateManifest, WeightUpdateRejectedError
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.model_installer import SGLangModelInstaller
from rl_bridge.errors import IncompatibleUpdate
from tests.integrations.sglang_drivers import (
    Engine,
    Handle,
    LostError,
    engine,
    importing,
    interrupt,
    trainer,
    update,
)
from tests.integrations.test_sglang_exchange import equal, held, loaded, version

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


class KilledError(Exception):
    """The driver was killed."""


def kill(adapter: SGLangInstallAdapter, at: int) -> None:
    """At the call that is the `at`-th from now on."""

    def die() -> None:
        raise KilledError

    interrupt(adapter, at, die)


def finish(adapter: SGLangInstallAdapter, manifest: WeightUpdateManifest) -> None:
    adapter.install(manifest, {})
    adapter.resume()
    adapter.commit()


def killed(engine: Engine, manifest: WeightUpdateManifest, at: int) -> None:
    """A driver that is killed at the `at`-th call behind its `prepare`, which is not made."""
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    kill(adapter, at)
    with pytest.raises(KilledError):
        finish(adapter, manifest)


def unfit(trainer: TensorBridge, number: int) -> WeightUpdateManifest:
    weights: dict[str, torch.Tensor] = version(number)
    return trainer.publish(weights | {"more": weights["cut"]}, weight_version=number)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_driver_that_was_killed_anywhere_leaves_neither_pause_nor_label(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    """Also where the next driver's own update is refused, and none comes behind it."""
    first = trainer.publish(version(1), weight_version=1)
    update(importing(engine), first)
    killed(engine, trainer.publish(version(2), weight_version=2), at)
    successor = importing(engine)
    with pytest.raises(IncompatibleUpdate):
        successor.prepare(unfit(trainer, 3), {})
    successor.abandon()
    assert equal(held(engine.model), loaded(1))
    assert (engine.label, engine.is_paused) == (f"1@{first.root}", False)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_new_driver_takes_over_what_one_that_was_killed_left(
    engine: Engine, trainer: TensorBridge, at: int
) -> None:
    first = trainer.publish(version(1), weight_version=1)
    update(importing(engine), first)
    killed(engine, trainer.publish(version(2), weight_version=2), at)
    importing(engine).take_over()
    assert equal(held(engine.model), loaded(1))
    assert (engine.label, engine.is_paused) == (f"1@{first.root}", False)
    told = engine.ask("describe")
    assert (told["pending"], told["pausing"]) == (None, None)


def test_a_take_over_that_is_killed_behind_its_undo_has_the_label_back(
    engine: Engine, trainer: TensorBridge
) -> None:
    """Of what is undone nobody knows the label any more."""
    manifest = trainer.publish(version(1), weight_version=1)
    killed(engine, manifest, 11)
    adapter = importing(engine)
    handle = adapter._handle
    assert isinstance(handle, Handle)
    handle.lose("undo", is_made=True)
    with pytest.raises(LostError):
        adapter.take_over()
    importing(engine).take_over()
    assert (engine.label, engine.is_paused) == ("user's", False)


def test_a_take_over_in_the_middle_of_ones_own_update_changes_nothing(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.take_over()
    adapter.resume()
    adapter.commit()
    assert equal(held(engine.model), loaded(1))


@pytest.mark.parametrize("is_own", [True, False])
def test_requests_that_ran_with_what_is_undone_are_computed_anew_and_not_frozen(
    engine: Engine, trainer: TensorBridge, *, is_own: bool
) -> None:
    """Frozen ones would keep its prefixes, and would never be done, which recover() waits for."""
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = SGLangInstallAdapter(Handle(engine), pause="in_place", cache="keep")
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    assert engine.pauses == ["in_place", None]
    if is_own:
        adapter.undo()
    else:
        SGLangInstallAdapter(Handle(engine), pause="in_place").take_over()
    assert engine.pauses[-2:] == ["retract", None]


def test_what_cannot_be_undone_with_its_prefixes_is_kept_and_not_served(
    engine: Engine, trainer: TensorBridge
) -> None:
    before = held(engine.model)
    manifest = trainer.publish(version(1), weight_version=1)
    killed(engine, manifest, 11)
    successor = importing(engine)
    engine.flushes = False
    later = trainer.publish(version(2), weight_version=2)
    for _ in range(2):
        with pytest.raises(TornEngine, match="keeps cached prefixes of the version that is undone"):
            successor.prepare(later, {})
        successor.abandon()
        assert equal(held(engine.model), loaded(1))
        assert (engine.label, engine.is_paused) == (f"1@{manifest.root}", True)
    engine.flushes = True
    successor.take_over()
    assert equal(held(engine.model), before)
    assert (engine.label, engine.is_paused) == ("user's", False)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_commit_that_failed_is_ended_by_the_next_update_and_never_undone(
    engine: Engine,
    trainer: TensorBridge,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_own: bool,
) -> None:
    """It is acknowledged, so it is what an update that is refused must leave."""
    caplog.set_level(logging.CRITICAL)
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(SGLangModelInstaller, "commit", fail)
        with pytest.raises(Exception, match="MemoryError"):
            adapter.commit()
    if not is_own:
        adapter = importing(engine)
    with pytest.raises(IncompatibleUpdate):
        adapter.prepare(unfit(trainer, 2), {})
    adapter.abandon()
    assert equal(held(engine.model), loaded(1))
    assert engine.label == f"1@{manifest.root}"
    assert engine.ask("describe")["update_id"] == manifest.update_id


def test_a_commit_whose_call_was_lost_is_ended_by_the_next_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    kill(adapter, 1)
    with pytest.raises(KilledError):
        adapter.commit()
    with pytest.raises(IncompatibleUpdate):
        adapter.prepare(unfit(trainer, 2), {})
    adapter.abandon()
    assert equal(held(engine.model), loaded(1))
    assert engine.label == f"1@{manifest.root}"


def test_a_label_that_is_no_text_is_an_update_that_is_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    before = held(engine.model)
    wrong: Any = lambda manifest: manifest.weight_version  # noqa: E731 - no text
    adapter = SGLangInstallAdapter(Handle(engine), label=wrong)
    manifest = trainer.publish(version(1), weight_version=1)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    with pytest.raises(TypeError, match="expected a str"):
        adapter.resume()
    adapter.undo()
    assert equal(held(engine.model), before)
    assert (engine.label, engine.is_paused) == ("user's", False)


@pytest.mark.parametrize("route", ["pause_generation", "update_weight_version"])
def test_a_pause_or_a_label_that_sglang_refuses_is_an_update_that_is_undone(
    engine: Engine, trainer: TensorBridge, route: str
) -> None:
    before = held(engine.model)
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    engine.refuses = route
    with pytest.raises(WeightUpdateRejectedError, match=f"SGLang refused {route}"):
        finish(adapter, manifest)
    adapter.undo()
    assert equal(held(engine.model), before)
    assert (engine.label, engine.is_paused) == ("user's", False)


def test_an_engine_that_sglang_does_not_let_go_on_is_told_until_it_does(
    engine: Engine, trainer: TensorBridge
) -> None:
    before = held(engine.model)
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    engine.refuses = "continue_generation"
    steps: list[Callable[[], None]] = [
        lambda: finish(adapter, manifest),
        adapter.undo,
        adapter.undo,
    ]
    for step in steps:
        with pytest.raises(WeightUpdateRejectedError, match="SGLang refused continue_generation"):
            step()
    engine.refuses = ""
    adapter.undo()
    assert equal(held(engine.model), before)
    assert (engine.label, engine.is_paused) == ("user's", False)


def test_a_commit_that_is_asked_for_again_behind_another_ones_refusal_succeeds(
    engine: Engine, trainer: TensorBridge
) -> None:
    """An executor asks until it is told that its version is what an undo goes back to."""
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    update(adapter, manifest)
    with pytest.raises(IncompatibleUpdate):
        adapter.prepare(unfit(trainer, 2), {})
    adapter.abandon()
    adapter.commit()
    assert equal(held(engine.model), loaded(1))


def test_a_rank_that_has_undone_its_part_lets_the_undo_be_asked_for_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    """Of several ranks another one failed to; but what is committed by now stays."""
    manifest = trainer.publish(version(1), weight_version=1)
    assert engine.prepare(manifest)["ok"]
    named = {"update_id": manifest.update_id}
    assert engine.ask("undo", **named)["ok"]
    assert engine.ask("pauses", pauses=True, undoes=True, **named)["ok"]
    assert not engine.ask("pauses", pauses=True, **named)["ok"]
    later = trainer.publish(version(2), weight_version=2)
    engine.update(later)
    given = {"pauses": True, "undoes": True, "update_id": later.update_id}
    assert "is committed" in engine.ask("pauses", **given)["message"]
