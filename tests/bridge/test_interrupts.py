"""An interrupt at any step: the bytes, the executor and the bridge agree about the version."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    make_weight_bridge,
)
from rl_bridge.bridge.consumer import Consumer
from rl_bridge.lifecycle import Event, Role, Transition
from rl_bridge.memory.passes import BytePlan
from tests.bridge.engines import Recording, content, publish
from tests.helpers import weights


class Interrupting:
    """An observer that raises KeyboardInterrupt right behind one step, once."""

    def __init__(self) -> None:
        self.at: Event | None = None

    def __call__(self, step: Transition) -> None:
        if step.role is Role.CONSUMER and step.event is self.at:
            self.at = None
            raise KeyboardInterrupt


@pytest.fixture
def transport() -> str:
    """Where an interrupt that goes wrong would leave memory pinned."""
    return "shared-memory"


def interrupted_once(then: Callable[..., Any]) -> Callable[..., Any]:
    left = [KeyboardInterrupt()]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args, **kwargs)

    return interrupted


EVENTS = [
    Event.IMPORT,
    Event.VERIFY,
    Event.STAGE,
    Event.INSTALL,
    Event.ACKNOWLEDGE,
    Event.RELEASE,
]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_behind_any_step_of_an_update_everybody_agrees_about_the_version(
    mode: str, event: Event, publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    observer = Interrupting()
    with make_weight_bridge("shared-memory", observer=observer) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge,
            weight_install_adapter=ModuleInstallAdapter(engine, mode=mode),  # type: ignore[arg-type]
        )
        first = publish(publisher, 1)
        executor.update_weights(first)
        observer.at = event
        second = publish(publisher, 2)
        with pytest.raises(KeyboardInterrupt):
            executor.update_weights(second)
        # Acknowledged is the point of no return: before it undone, from it on installed.
        expected = 2 if event in {Event.ACKNOWLEDGE, Event.RELEASE} else 1
        assert executor.active_weight_version == expected
        assert bridge.active_weight_version == expected
        assert content(engine) == content(weights(expected))
        assert not executor.is_torn
        active = first if expected == 1 else second
        assert executor.active_weight_update_id == bridge.active_update_id == active.update_id
        assert bridge.update_status(active.update_id) == "acknowledged"
        # Life goes on, and nothing stays pinned.
        for version in range(3, 12):
            publisher.release(first.update_id)
            publisher.release(second.update_id)
            manifest = publish(publisher, version)
            executor.update_weights(manifest)
            publisher.release(manifest.update_id)
            assert content(engine) == content(weights(version))


def test_an_interrupted_rejection_lets_go_of_its_tensors(publisher: TensorBridge) -> None:
    observer = Interrupting()
    with make_weight_bridge("shared-memory", observer=observer) as bridge:
        manifest = publish(publisher, 1)
        bridge.import_update(manifest)
        observer.at = Event.REJECT
        with pytest.raises(KeyboardInterrupt):
            bridge.reject(manifest.update_id, "no")
        assert bridge.update_status(manifest.update_id) == "rejected"
        (report,) = publisher.holders(manifest.update_id)
        assert (report.state, report.tensors_held) == ("rejected", False)


@pytest.mark.parametrize("step", ["prepare", "install", "prove"])
def test_an_interrupt_inside_the_adapter_comes_out_after_the_undo(
    step: str, publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    adapter = Recording(engine)
    with make_weight_bridge("shared-memory") as bridge:
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        executor.update_weights(publish(publisher, 1))
        adapter.fails = {step: KeyboardInterrupt()}
        manifest = publish(publisher, 2)
        with pytest.raises(KeyboardInterrupt) as caught:
            executor.update_weights(manifest)
        assert "the engine holds version 1" in caught.value.__notes__[0]
        assert content(engine) == content(weights(1))
        if step == "prepare":  # the engine was not touched
            assert bridge.update_status(manifest.update_id) == "released"
            return
        assert bridge.update_status(manifest.update_id) == "rejected"
        assert "KeyboardInterrupt" in str(bridge.rejection_reason(manifest.update_id))


@pytest.mark.parametrize("event", [None, Event.IMPORT, Event.VERIFY])
def test_an_interrupted_import_does_not_cost_the_update(
    event: Event | None, publisher: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Interrupting()
    with make_weight_bridge("shared-memory", observer=observer) as bridge:
        manifest = publish(publisher, 1)
        observer.at = event
        if event is None:
            monkeypatch.setattr(BytePlan, "digest", interrupted_once(BytePlan.digest))
        with pytest.raises(KeyboardInterrupt):
            bridge.import_update(manifest)
        assert content(bridge.import_update(manifest)) == content(weights(1))
        bridge.acknowledge(manifest.update_id)


def test_an_import_that_is_interrupted_twice_in_a_row_begins_anew(
    publisher: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_weight_bridge("shared-memory") as bridge:
        manifest = publish(publisher, 1)
        monkeypatch.setattr(BytePlan, "digest", interrupted_once(BytePlan.digest))
        monkeypatch.setattr(Consumer, "_refuse_import", interrupted_once(Consumer._refuse_import))
        with pytest.raises(KeyboardInterrupt):
            bridge.import_update(manifest)
        RolloutExecutor(weight_bridge=bridge).update_weights(manifest)
        assert bridge.active_weight_version == 1
        bridge.release(manifest.update_id)
        (report,) = publisher.holders(manifest.update_id)
        assert not report.tensors_held


def test_an_update_that_is_cut_off_before_the_engine_was_touched_may_come_again(
    publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    adapter = Recording(engine)
    with make_weight_bridge("shared-memory") as bridge:
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        adapter.fails = {"prepare": KeyboardInterrupt()}
        manifest = publish(publisher, 1)
        with pytest.raises(KeyboardInterrupt) as caught:
            executor.update_weights(manifest)
        assert "may be installed again" in caught.value.__notes__[0]
        (report,) = publisher.holders(manifest.update_id)
        assert (report.state, report.tensors_held) == ("released", False)
        adapter.fails = {}
        executor.update_weights(manifest)
        assert content(engine) == content(weights(1))
        (report,) = publisher.holders(manifest.update_id)
        assert report.state == "acknowledged"


def test_a_refusal_is_told_of_an_update_that_was_cut_off_before(
    publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    adapter = Recording(engine)
    with make_weight_bridge("shared-memory") as bridge:
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        manifest = publish(publisher, 1)
        adapter.fails = {"prepare": KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            executor.update_weights(manifest)
        adapter.fails = {"prepare": LookupError("no")}
        with pytest.raises(LookupError):
            executor.update_weights(manifest)
        (report,) = publisher.holders(manifest.update_id)
        assert (report.state, report.reason) == ("rejected", "LookupError: no")


def test_an_interrupt_whose_undo_fails_stays_an_interrupt_and_the_engine_is_torn(
    publisher: TensorBridge, engine: dict[str, torch.Tensor]
) -> None:
    adapter = Recording(engine)
    with make_weight_bridge("shared-memory") as bridge:
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        executor.update_weights(publish(publisher, 1))
        adapter.fails = {"install": KeyboardInterrupt(), "undo": OSError("full")}
        with pytest.raises(KeyboardInterrupt) as caught:
            executor.update_weights(publish(publisher, 2))
        assert (
            "the undo failed too (OSError: full); the engine is torn" in caught.value.__notes__[0]
        )
        assert executor.is_torn
        adapter.fails = {}
        executor.recover()
        assert content(engine) == content(weights(1))
