"""An interrupt right behind the point of no return, and what everybody is shown from then on."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import IllegalTransition, TornEngine
from rl_bridge.lifecycle import Event, Role, State, Transition
from rl_bridge.memory.control import UpdateReport
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import tracing, weights


@pytest.fixture
def transport() -> str:
    return "shared-memory"


def cut_off(action: Callable[[], object], *, before: str) -> None:
    """Interrupt an action before the first line of a function of that name."""

    def tracer(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_code.co_name == before:
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    with pytest.raises(KeyboardInterrupt), tracing(tracer):
        action()


def test_what_was_acknowledged_is_shown_as_active_in_every_respect(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    cut_off(lambda: executor.update_weights(manifest), before="activate")
    executor.check_servable()
    bridge = bridge_of(executor)
    assert executor.active_weight_version == bridge.active_weight_version == 2
    assert executor.active_weight_update_id == bridge.active_update_id == manifest.update_id
    assert content(executor.shared_weights) == content(adapter.engine) == content(weights(2))
    ack = executor.last_ack
    assert ack is not None
    assert (ack.weight_version, ack.root) == (2, manifest.root)
    assert (ack.proof.method, ack.proof.root) == ("digest", manifest.root)
    assert {"attach", "prepare", "install", "total"} <= ack.timings_ms.keys()
    executor.release_weights()
    after: list[object] = [executor.active_weight_update_id, dict(executor.shared_weights)]
    assert after == [None, {}]
    assert bridge.update_state(manifest) is State.RELEASED


def test_an_engine_that_an_acknowledged_version_healed_is_not_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    torn = publish(publisher, 1)
    with pytest.raises(TornEngine):
        executor.update_weights(torn)
    adapter.fails = {}
    cut_off(lambda: executor.update_weights(publish(publisher, 2)), before="activate")
    assert not executor.is_torn
    executor.check_servable()
    assert executor.active_weight_version == 2
    executor.recover()
    assert bridge_of(executor).update_state(torn) is State.REJECTED
    assert content(adapter.engine) == content(weights(2))
    assert "undo" not in adapter.calls[adapter.calls.index("commit") :]


class Watching(Recording):
    """Notes, in each step, how the torn update stands."""

    look: Callable[[], tuple[State, bool]] | None = None

    def _step(self, name: str) -> None:
        super()._step(name)
        if self.look is not None:
            self.seen[name] = self.look()

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        super().__init__(engine)
        self.seen: dict[str, tuple[State, bool]] = {}

    def resume(self) -> None:
        self._step("resume")


@pytest.fixture
def adapter(engine: dict[str, torch.Tensor]) -> Watching:
    return Watching(engine)


def test_what_tore_the_engine_is_given_up_before_the_adapter_forgets_how_to_undo_it(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    # Else an interrupt in between leaves an engine that counts as torn, and an undo of nothing.
    adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    torn = publish(publisher, 1)
    with pytest.raises(TornEngine):
        executor.update_weights(torn)
    adapter.fails = {}
    bridge = bridge_of(executor)
    adapter.look = lambda: (bridge.update_state(torn), executor.is_torn)
    executor.update_weights(publish(publisher, 2))
    assert adapter.seen["install"] == (State.TORN, True)
    assert adapter.seen["commit"] == (State.REJECTED, False)


def test_an_engine_is_resumed_once_it_is_proven_and_before_anybody_is_told(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    manifest = publish(publisher, 1)
    bridge = bridge_of(executor)
    adapter.look = lambda: (bridge.update_state(manifest), executor.is_torn)
    executor.update_weights(manifest)
    assert adapter.calls == ["prepare", "install", "prove", "resume", "commit"]
    assert adapter.seen["resume"][0] is State.INSTALLED
    assert "resume" in (executor.last_ack or pytest.fail("none")).timings_ms


def test_an_engine_that_cannot_resume_goes_back(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Watching
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.fails = {"resume": OSError("stuck")}
    with pytest.raises(OSError, match="stuck"):
        executor.update_weights(publish(publisher, 2))
    assert executor.active_weight_version == 1
    assert content(adapter.engine) == content(weights(1))


# ---- the update is let go of, or refused, in the middle of its acknowledgement ------------------


def observed(
    publisher: TensorBridge, react: Callable[[TensorBridge, Transition], None]
) -> tuple[RolloutExecutor, TensorBridge, Recording]:
    """An executor at version 1 whose bridge's observer reacts to what comes next."""
    armed: list[TensorBridge] = []

    def observer(step: Transition) -> None:
        if armed and step.role is Role.CONSUMER:
            react(armed[0], step)

    bridge = make_weight_bridge("shared-memory", source_worker="rollout", observer=observer)
    adapter = Recording(weights(0))
    executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
    executor.update_weights(publish(publisher, 1))
    armed.append(bridge)
    return executor, bridge, adapter


def test_an_acknowledged_update_that_is_released_at_once_stands_whatever_interrupts(
    publisher: TensorBridge,
) -> None:
    def react(bridge: TensorBridge, step: Transition) -> None:
        if step.event is Event.ACKNOWLEDGE:
            bridge.release_imported(step.update_id)
            raise KeyboardInterrupt

    executor, bridge, adapter = observed(publisher, react)
    with bridge:
        manifest = publish(publisher, 2)
        with pytest.raises(KeyboardInterrupt) as caught:
            executor.update_weights(manifest)
        assert getattr(caught.value, "__notes__", []) == []
        assert executor.active_weight_version == bridge.active_weight_version == 2
        assert content(adapter.engine) == content(weights(2))
        (report,) = publisher.holders(manifest)
        assert (report.state, (report.proof or {})["method"]) == ("released", "digest")


def test_an_update_that_was_refused_and_released_before_its_acknowledgement_is_undone(
    publisher: TensorBridge,
) -> None:
    class Refusing(Recording):
        def resume(self) -> None:
            if self.calls.count("install") > 1:
                (imported,) = [key for key in bridge._consumer_end()._updates if key != first]
                bridge.reject(imported, "not this one")
                bridge.release_imported(imported)

    with make_weight_bridge("shared-memory", source_worker="rollout") as bridge:
        adapter = Refusing(weights(0))
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        manifest = publish(publisher, 1)
        first = manifest.update_id
        executor.update_weights(manifest)
        with pytest.raises(IllegalTransition):
            executor.update_weights(publish(publisher, 2))
        assert executor.active_weight_version == bridge.active_weight_version == 1
        assert content(adapter.engine) == content(weights(1))


# ---- the last news is what stays in the record --------------------------------------------------


@pytest.mark.parametrize("change", ["tensor dies", "state"])
def test_news_that_are_told_in_the_middle_of_older_ones_are_told_again(
    change: str, publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    held = [consumer.import_update(manifest)["layer.weight"]]
    end: Any = consumer._consumer_end()._end
    tell = end.report
    told: list[UpdateReport] = []

    def report(of: Any, news: UpdateReport) -> None:
        told.append(news)
        if len(told) == 1:  # another thread is faster: what it tells is written first
            if change == "tensor dies":
                held.clear()
            else:
                consumer.release(manifest)
        tell(of, news)

    end.report = report
    if change == "tensor dies":
        consumer.release(manifest)
        assert told[0].tensors_held
    else:
        consumer.acknowledge(manifest)
        assert told[0].state == "acknowledged"
    (seen,) = publisher.holders(manifest)
    assert (seen.state, seen.tensors_held) == ("released", change == "state")
