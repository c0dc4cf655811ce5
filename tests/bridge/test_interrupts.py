"""Ctrl-C: each public call ends first, then it is raised; a second one stops the call at once.

The signals are real. Most are sent from inside the call, by the observer of a lifecycle step, so
that each strikes at the same moment in each run; the last tests send them from another thread.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from rl_bridge import (
    ModuleInstallAdapter,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import TornEngine, UnknownUpdate
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.lifecycle import Event, Role, State, Transition
from rl_bridge.remote import TwoPhaseExecutor
from tests.bridge.engines import Recording, content, publish
from tests.helpers import weights


class Striking:
    """An observer that sends SIGINT to this process behind one step, some times."""

    def __init__(self) -> None:
        self.at: tuple[Role, Event] | None = None
        self.times = 1

    def __call__(self, step: Transition) -> None:
        if (step.role, step.event) == self.at:
            self.at = None
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


class Rig:
    """A trainer, and an engine at version 1; version 2 is published and version 3 is not yet."""

    def __init__(self, mode: str = "copy") -> None:
        self.observer = Striking()
        self.trainer: TensorBridge = make_weight_bridge(
            "shared-memory", suspicious="off", observer=self.observer
        )
        self.bridge: TensorBridge = make_weight_bridge(
            "shared-memory", source_worker="rollout", observer=self.observer
        )
        self.engine = weights(0)
        self.adapter: Any = (
            Recording(self.engine)
            if mode == "recording"
            else ModuleInstallAdapter(self.engine, mode=mode)  # type: ignore[arg-type]
        )
        self.executor = TwoPhaseExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter, suspicious="off"
        )
        self.first = publish(self.trainer, 1)
        self.executor.update_weights(self.first)
        self.second = publish(self.trainer, 2)

    def state(self, manifest: WeightUpdateManifest) -> State:
        return self.bridge.update_state(manifest)

    def check(self, version: int) -> None:
        """Everybody agrees about the version, and life goes on without a slot that is kept."""
        assert not self.executor.is_torn
        assert self.executor.active_weight_version == version
        assert content(self.engine) == content(weights(version))
        for later in range(4, 10):
            for manifest in (self.first, self.second):
                self.trainer.release(manifest)
            manifest = publish(self.trainer, later)
            self.executor.update_weights(manifest)
            self.trainer.release(manifest)
            assert content(self.engine) == content(weights(later))

    def close(self) -> None:
        for end in (self.executor, self.bridge, self.trainer):
            end.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def torn(rig: Rig) -> None:
    """Have version 2 tear an engine; what failed works from then on."""
    rig.close()
    rig.__init__("recording")  # type: ignore[misc]  # in place of the first one
    rig.adapter.fails = {"install": LookupError("no"), "undo": OSError("full")}
    with pytest.raises(TornEngine):
        rig.executor.update_weights(rig.second)
    rig.adapter.fails = {}


def prepared(rig: Rig) -> None:
    rig.executor.import_weights(rig.second)
    rig.executor.prepare_weights(rig.second)


CONSUMER, PUBLISHER = Role.CONSUMER, Role.PUBLISHER


class Case(NamedTuple):
    """A verb: its call, the step that is struck, what holds then, and what comes before it."""

    call: Callable[[Rig], object]
    struck: tuple[Role, Event]
    holds: Callable[[Rig], bool]
    before: Callable[[Rig], object] = lambda _: None
    version: int = 1
    """Of the engine, in the end."""


def told(rig: Rig, manifest: WeightUpdateManifest) -> list[str]:
    return [report.state for report in rig.trainer.holders(manifest)]


CASES = {
    "publish": Case(
        lambda rig: publish(rig.trainer, 3),
        (PUBLISHER, Event.PUBLISH),
        lambda rig: rig.trainer.latest_manifest.weight_version == 3,  # type: ignore[union-attr]
    ),
    "import_update": Case(
        lambda rig: rig.bridge.import_update(rig.second),
        (CONSUMER, Event.IMPORT),
        lambda rig: rig.state(rig.second) is State.VERIFIED,
    ),
    "acknowledge": Case(
        lambda rig: rig.bridge.acknowledge(rig.first),
        (CONSUMER, Event.ACKNOWLEDGE),
        lambda rig: told(rig, rig.first) == ["acknowledged"],
        before=lambda rig: (rig.executor.release_weights(), rig.bridge.import_update(rig.first)),
    ),
    "reject": Case(
        lambda rig: rig.bridge.reject(rig.second, "no"),
        (CONSUMER, Event.REJECT),
        lambda rig: told(rig, rig.second) == ["rejected"],
        before=lambda rig: rig.bridge.import_update(rig.second),
    ),
    "release": Case(
        lambda rig: rig.trainer.release(rig.first),
        (PUBLISHER, Event.RELEASE),
        lambda rig: rig.trainer.update_state(rig.first) is State.RELEASED,
    ),
    "release_imported": Case(
        lambda rig: rig.bridge.release_imported(rig.second),
        (CONSUMER, Event.RELEASE),
        lambda rig: not any(r.tensors_held for r in rig.trainer.holders(rig.second)),
        before=lambda rig: rig.bridge.import_update(rig.second),
    ),
    "update_weights": Case(
        lambda rig: rig.executor.update_weights(rig.second),
        (CONSUMER, Event.INSTALL),
        lambda rig: rig.state(rig.first) is State.RELEASED,
        version=2,
    ),
    "recover": Case(
        lambda rig: rig.executor.recover(),
        (CONSUMER, Event.UNDO),
        lambda rig: rig.state(rig.second) is State.REJECTED,
        before=torn,
    ),
    "release_weights": Case(
        lambda rig: rig.executor.release_weights(),
        (CONSUMER, Event.RELEASE),
        lambda rig: rig.executor.active_weight_update_id is None,
    ),
    "release_weight_update": Case(
        lambda rig: rig.executor.release_weight_update(rig.first),
        (CONSUMER, Event.RELEASE),
        lambda rig: rig.state(rig.first) is State.RELEASED,
    ),
    "import_weights": Case(
        lambda rig: rig.executor.import_weights(rig.second),
        (CONSUMER, Event.IMPORT),
        lambda rig: rig.executor.pending_weight_update_id == rig.second.update_id,
    ),
    "prepare_weights": Case(
        lambda rig: rig.executor.prepare_weights(rig.second),
        (CONSUMER, Event.STAGE),
        lambda rig: rig.state(rig.second) is State.STAGED,
        before=lambda rig: rig.executor.import_weights(rig.second),
    ),
    "commit_weights": Case(
        lambda rig: rig.executor.commit_weights(rig.second),
        (CONSUMER, Event.INSTALL),
        lambda rig: rig.state(rig.second) is State.ACKNOWLEDGED,
        before=prepared,
        version=2,
    ),
    "abort_weights": Case(
        lambda rig: rig.executor.abort_weights(rig.second, "no"),
        (CONSUMER, Event.REJECT),
        lambda rig: rig.state(rig.second) is State.REJECTED,
        before=prepared,
    ),
}


@pytest.mark.parametrize("verb", CASES)
def test_a_call_ends_before_its_interrupt_is_raised(verb: str, rig: Rig) -> None:
    case = CASES[verb]
    case.before(rig)
    rig.observer.at = case.struck
    with pytest.raises(KeyboardInterrupt):
        case.call(rig)
    assert case.holds(rig)
    rig.check(case.version)


@pytest.mark.parametrize("end", ["executor", "bridge", "trainer"])
def test_a_close_ends_before_its_interrupt_is_raised(end: str) -> None:
    rig = Rig()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is needed
    closing = getattr(rig, end)
    if end != "trainer":
        rig.observer.at = (Role.CONSUMER, Event.RELEASE)
    else:  # nothing of it is observed
        plain = rig.trainer.publisher.end.close

        def close() -> None:
            rig.trainer.publisher.end.close = plain  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGINT)
            plain()

        rig.trainer.publisher.end.close = close  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        closing.close()
    rig.close()
    assert set(os.listdir("/proc/self/fd")) < before  # noqa: PTH208


def test_the_first_interrupt_is_logged_and_says_what_to_do(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.observer.at = (Role.CONSUMER, Event.STAGE)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        rig.executor.update_weights(rig.second)
    assert "Ctrl-C: the call that is running ends first; a second one stops it" in caplog.text


# ---- a second one --------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Event.IMPORT, Event.VERIFY, Event.STAGE])
def test_a_second_interrupt_before_the_install_leaves_engine_and_update_as_they_were(
    event: Event, rig: Rig
) -> None:
    rig.observer.at, rig.observer.times = (Role.CONSUMER, event), 2
    with pytest.raises(KeyboardInterrupt) as caught:
        rig.executor.update_weights(rig.second)
    if event is Event.STAGE:
        assert "may be installed again; the engine holds version 1" in caught.value.__notes__[0]
    assert not any(report.tensors_held for report in rig.trainer.holders(rig.second))
    rig.executor.update_weights(rig.second)
    rig.check(2)


@pytest.mark.parametrize("way_out", ["recover", "install"])
@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_a_second_interrupt_during_the_install_leaves_a_torn_engine(
    mode: str, way_out: str
) -> None:
    rig = Rig(mode)
    rig.observer.at, rig.observer.times = (Role.CONSUMER, Event.INSTALL), 2
    with pytest.raises(KeyboardInterrupt) as caught:
        rig.executor.update_weights(rig.second)
    assert "stopped the install of version 2; the engine is torn" in caught.value.__notes__[0]
    assert rig.executor.is_torn
    assert rig.executor.active_weight_version is None
    with pytest.raises(TornEngine, match="KeyboardInterrupt stopped its install"):
        rig.executor.check_servable()
    assert rig.state(rig.second) is State.TORN
    assert told(rig, rig.second) == ["torn"]
    if way_out == "recover":
        rig.executor.recover()
        assert rig.state(rig.second) is State.REJECTED
    else:
        rig.executor.update_weights(rig.second)
    rig.check(1 if way_out == "recover" else 2)
    rig.close()


def test_a_second_interrupt_behind_the_acknowledgement_leaves_the_new_version(rig: Rig) -> None:
    rig.observer.at, rig.observer.times = (Role.CONSUMER, Event.ACKNOWLEDGE), 2
    with pytest.raises(KeyboardInterrupt):
        rig.executor.update_weights(rig.second)
    assert rig.bridge.active_weight_version == 2
    assert rig.executor.last_ack is not None
    assert rig.executor.last_ack.weight_version == 2
    rig.check(2)


def test_a_second_interrupt_during_a_publication_holds_nothing(rig: Rig) -> None:
    end = rig.trainer.publisher.end
    plain = end.seal_header

    def struck(update_id: str, digest: bytes) -> None:
        end.seal_header = plain  # type: ignore[method-assign]
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    end.seal_header = struck  # type: ignore[method-assign]
    held = end.nbytes
    with pytest.raises(KeyboardInterrupt):
        publish(rig.trainer, 3)
    assert rig.trainer.latest_manifest == rig.second
    publish(rig.trainer, 3)
    assert end.nbytes <= held + held // 2


# ---- what the block itself does ------------------------------------------------------------------


def test_blocks_inside_of_blocks_are_one() -> None:
    reached = []

    @deferred_interrupts()
    def outer() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
        reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_called_at_the_end_and_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_block_is_the_context_of_its_interrupt() -> None:
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise LookupError

    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupts():
        fail()
    assert isinstance(caught.value.__context__, LookupError)


def test_a_thread_that_is_not_the_main_one_defers_nothing() -> None:
    found: list[Any] = []

    def block() -> None:
        with deferred_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(30)
    assert found == [signal.default_int_handler]


def test_an_update_that_is_given_up_is_unknown_to_its_next_step(rig: Rig) -> None:
    rig.executor.import_weights(rig.second)
    rig.observer.at, rig.observer.times = (Role.CONSUMER, Event.STAGE), 2
    with pytest.raises(KeyboardInterrupt):
        rig.executor.prepare_weights(rig.second)
    with pytest.raises(UnknownUpdate):
        rig.executor.commit_weights(rig.second)
    rig.check(1)
