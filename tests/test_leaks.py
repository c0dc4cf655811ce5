"""Nothing is left behind: by whole transactions, by failures, by ends that come and go.

The checks come first: each must see a leak that was planted for it, alone and inside a cycle.
"""

import itertools
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import SlotsExhausted
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import Holdings, assert_nothing_leaks
from rl_bridge.testing.faults import Fault, FaultInjecting, InjectedFault, Step
from rl_bridge.testing.leaks import LEAKS, growth, prove_checks
from rl_bridge.testing.peer import BridgeOver, engine_weights, sample_weights
from rl_bridge.testing.tensors import random_tensor
from rl_bridge.transports.base import Transport
from rl_bridge.transports.local import LocalClone
from rl_bridge.transports.shared_memory import SharedMemory

Make = Callable[[], Transport]


@pytest.fixture(params=["local-clone", "memfd", "files"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    makers: dict[str, Make] = {
        "local-clone": LocalClone,
        "memfd": SharedMemory,
        "files": lambda: SharedMemory(directory=tmp_path),
    }
    return makers[request.param]


# ---- the checks ---------------------------------------------------------------------------------


def test_no_leak_is_no_finding() -> None:
    before = Holdings.now()
    assert growth(before, Holdings.now()) == []
    prove_checks()
    assert growth(before, Holdings.now()) == []


@pytest.mark.parametrize("kind", LEAKS)
def test_a_cycle_that_leaks_is_caught(kind: str) -> None:
    with ExitStack() as kept, pytest.raises(AssertionError, match="more than before"):
        assert_nothing_leaks(lambda: kept.enter_context(LEAKS[kind]()), num_cycles=3)


def test_a_leak_out_of_memory_that_the_allocator_has_lying_about_is_caught() -> None:
    """What tests before this one gave back is resident still, and is handed out anew."""
    lying_about = [bytearray(64 << 10) for _ in range(6000)]
    last = lying_about.pop()  # the heap's end: what lies before it stays with the allocator
    lying_about.clear()
    kept: list[bytearray] = []
    with pytest.raises(AssertionError, match="bytes of resident memory"):
        assert_nothing_leaks(lambda: kept.append(bytearray(b"x" * (6 << 20))), num_cycles=20)
    assert len(last) == 64 << 10


def test_names_that_others_make_and_remove_are_no_leak() -> None:
    """Engines that run beside the tests keep names in /dev/shm too."""
    with ExitStack() as others:
        at_most: list[Any] = []

        def cycle() -> None:
            at_most.append(others.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm")))
            if len(at_most) > 3:
                at_most.pop(0).close()

        assert_nothing_leaks(cycle, num_cycles=20)


def test_a_check_that_is_blind_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAKS, "nothing at all", suppress)
    with pytest.raises(AssertionError, match="nothing at all"):
        assert_nothing_leaks(lambda: None, num_cycles=1)


# ---- transactions -------------------------------------------------------------------------------


def test_hundreds_of_updates_grow_nothing(make: Make) -> None:
    """Books, pools and classes made at run time included: later hundreds cost nothing."""
    source, engine, versions = sample_weights(1), engine_weights(0), itertools.count(1)
    with (
        BridgeOver(make()) as trainer,
        BridgeOver(make()) as consumer,
        RolloutExecutor(
            weight_bridge=consumer, weight_install_adapter=ModuleInstallAdapter(engine)
        ) as executor,
    ):

        def cycle() -> None:
            source["layer.0.bias"] += 1
            manifest = trainer.publish(source, weight_version=next(versions))
            executor.update_weights(manifest.to_json())
            trainer.release(manifest.update_id)

        assert_nothing_leaks(cycle, num_warm_up=300, num_cycles=400, rss_slack=5 << 19)


@pytest.mark.parametrize("step", [Step.AFTER_CARRY, Step.AFTER_ATTACH])
def test_failures_inside_the_transport_leave_nothing_behind(make: Make, step: Step) -> None:
    given = FaultInjecting(make())
    given.faults = [Fault(step, count=count) for count in range(1, 400, 2)]
    versions = itertools.count(1)
    with BridgeOver(given) as bridge:

        def cycle() -> None:
            source = {"w": random_tensor("uint8", (1 << 18,), seed=1)}
            with suppress(InjectedFault):
                manifest = bridge.publish(source, weight_version=next(versions))
                try:
                    bridge.import_update(manifest)
                finally:
                    bridge.release(manifest.update_id)

        assert_nothing_leaks(cycle)


def test_a_publisher_without_room_leaves_nothing_behind() -> None:
    versions = itertools.count(1)
    with BridgeOver(SharedMemory(max_slots=2)) as trainer, BridgeOver(SharedMemory()) as consumer:
        held = []
        for _ in range(2):
            manifest = trainer.publish({"w": torch.ones(9)}, weight_version=next(versions))
            held.append(consumer.import_update(manifest))

        def cycle() -> None:
            with pytest.raises(SlotsExhausted):
                trainer.publish({"w": torch.ones(9)}, weight_version=next(versions))

        assert_nothing_leaks(cycle)
