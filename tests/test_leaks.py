"""Nothing is left behind: by whole transactions, by failures, by ends that come and go.

The checks come first: each must see a leak that was planted for it, alone and inside a cycle.
"""

import itertools
import mmap
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.errors import ChecksumMismatch, SlotsExhausted, WeightBridgeError
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import Holdings, assert_nothing_leaks
from rl_bridge.testing.faults import Fault, FaultInjecting, InjectedFault, KillAt, Step
from rl_bridge.testing.installer_faults import EngineFault, Sabotage, Stage
from rl_bridge.testing.leaks import LEAKS, growth, planted, prove_checks
from rl_bridge.testing.peer import BridgeOver, Peer, engine_weights, sample_weights
from rl_bridge.testing.processes import Child, ChildDied
from rl_bridge.testing.strategies import random_tensor
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


@pytest.mark.parametrize("kind", LEAKS)
def test_a_planted_leak_is_seen(kind: str) -> None:
    assert planted(kind) != []


def test_no_leak_is_no_finding() -> None:
    before = Holdings.now()
    assert growth(before, Holdings.now()) == []
    prove_checks()
    assert growth(before, Holdings.now()) == []


def leaky(kind: str, kept: list[Any]) -> Callable[[], object]:
    def descriptor() -> None:
        kept.append(os.fdopen(os.open("/dev/null", os.O_RDONLY), "rb"))

    def mapping() -> None:
        fd = os.memfd_create("leaked", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        kept.append(mmap.mmap(fd, mmap.PAGESIZE))
        os.close(fd)

    def name() -> None:
        kept.append(tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="leaked-"))  # noqa: SIM115

    def memory() -> None:
        kept.append(bytearray(b"x" * (6 << 20)))

    return {"descriptor": descriptor, "mapping": mapping, "name": name, "memory": memory}[kind]


@pytest.mark.parametrize("kind", ["descriptor", "mapping", "name", "memory"])
def test_a_cycle_that_leaks_is_caught(kind: str) -> None:
    kept: list[Any] = []
    try:
        with pytest.raises(AssertionError, match="more than before"):
            assert_nothing_leaks(leaky(kind, kept), num_cycles=20)
    finally:
        for item in kept:
            if hasattr(item, "close"):
                item.close()


def test_a_leak_out_of_memory_that_the_allocator_has_lying_about_is_caught() -> None:
    """What tests before this one gave back is resident still, and is handed out anew."""
    lying_about = [bytearray(64 << 10) for _ in range(6000)]
    last = lying_about.pop()  # the heap's end: what lies before it stays with the allocator
    lying_about.clear()
    kept: list[Any] = []
    with pytest.raises(AssertionError, match="bytes of resident memory"):
        assert_nothing_leaks(leaky("memory", kept), num_cycles=20)
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


class Loop:
    """A trainer and a rollout with an engine, update after update."""

    def __init__(self, make: Make, mode: Literal["copy", "alias", "flip"]) -> None:
        self.faults = FaultInjecting(make())
        self.trainer = BridgeOver(self.faults, source_worker="trainer")
        self.consumer = BridgeOver(make(), source_worker="rollout")
        self.engine = engine_weights(0)
        self.sabotage = Sabotage(
            ModuleInstallAdapter(self.engine, mode=mode), self.engine, rebinds=mode != "copy"
        )
        self.executor = RolloutExecutor(
            weight_bridge=self.consumer, weight_install_adapter=self.sabotage.wrapped()
        )
        self.source = sample_weights(1)
        self.version = 0

    def publish(self) -> str:
        self.version += 1
        self.source["layer.0.bias"] += 1
        return self.trainer.publish(self.source, weight_version=self.version).to_json()

    def release(self) -> None:
        latest = self.trainer.latest_manifest
        assert latest is not None
        self.trainer.release(latest.update_id)

    def close(self) -> None:
        self.consumer.close()
        self.trainer.close()


MODES = ("copy", "alias", "flip")


@pytest.mark.parametrize("mode", MODES)
def test_transactions_leave_nothing_behind(
    make: Make, mode: Literal["copy", "alias", "flip"]
) -> None:
    if mode == "flip" and not make().zero_copy_import:
        pytest.skip("a flip needs an import without a copy")
    loop = Loop(make, mode)
    failures = itertools.cycle([None, *Stage, "undo", "corrupt"])

    def cycle() -> None:
        failure = next(failures)
        loop.faults.corrupt_next = failure == "corrupt"
        manifest = loop.publish()
        loop.sabotage.plan(Stage.HALF_WAY if failure in {"undo", "corrupt"} else failure)
        loop.sabotage.fails_undo = failure == "undo"
        with suppress(EngineFault, WeightBridgeError):
            loop.executor.update_weights(manifest)
        loop.sabotage.plan(None)
        loop.sabotage.fails_undo = False
        loop.executor.recover()
        loop.release()

    cycle()
    assert_nothing_leaks(cycle, num_cycles=70)
    assert loop.executor.active_weight_version is not None
    loop.close()


def test_hundreds_of_updates_grow_nothing(make: Make) -> None:
    """Books, pools and classes made at run time included: later hundreds cost nothing."""
    loop = Loop(make, "copy")

    def cycle() -> None:
        loop.executor.update_weights(loop.publish())
        loop.release()

    assert_nothing_leaks(cycle, num_warm_up=300, num_cycles=400, rss_slack=5 << 19)
    loop.close()


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


def test_refused_imports_leave_nothing_behind(make: Make) -> None:
    given = FaultInjecting(make())
    versions = itertools.count(1)
    with BridgeOver(given) as trainer, BridgeOver(make()) as consumer:

        def cycle() -> None:
            given.corrupt_next = True
            source = {"w": random_tensor("uint8", (1 << 18,), seed=1)}
            manifest = trainer.publish(source, weight_version=next(versions))
            with pytest.raises(ChecksumMismatch):
                consumer.import_update(manifest)
            trainer.release(manifest.update_id)

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


def test_consumers_that_come_and_go_leave_nothing_with_the_publisher(make: Make) -> None:
    with BridgeOver(make()) as trainer:
        manifest = trainer.publish(sample_weights(1), weight_version=1)

        def cycle() -> None:
            with BridgeOver(make()) as consumer:
                consumer.import_update(manifest)
                consumer.acknowledge(manifest.update_id)

        assert_nothing_leaks(cycle, num_cycles=100)
        assert len(trainer.consumers()) <= 64


def test_publishers_that_come_and_go_leave_nothing_with_the_consumer(make: Make) -> None:
    with BridgeOver(make()) as consumer:

        def cycle() -> None:
            with BridgeOver(make()) as trainer:
                manifest = trainer.publish(sample_weights(1), weight_version=1)
                consumer.import_update(manifest)
                consumer.acknowledge(manifest.update_id)
            consumer.release(manifest.update_id)

        assert_nothing_leaks(cycle, num_cycles=100)


# ---- other processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memfd", "files"])
def test_killed_consumers_and_publishers_leave_nothing_here(kind: str, tmp_path: Path) -> None:
    directory = None if kind == "memfd" else tmp_path / "segments"
    transport = {"transport_class": SharedMemory, "transport_kwargs": {"directory": directory}}
    with Child(Peer, **transport) as first:
        first.ready()  # who starts children stays, with pipes, from the first one on
    before = Holdings.now(*([directory] if directory else []))
    with BridgeOver(SharedMemory(directory=directory)) as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        with Child(Peer, **transport, observer=KillAt("verify")) as consumer:
            with pytest.raises(ChildDied):
                consumer.call("import_update", manifest=manifest.to_json())
            assert consumer.exitcode() == -signal.SIGKILL
        with Child(Peer, **transport, observer=KillAt("publish", role="publisher")) as publisher:
            with pytest.raises(ChildDied):
                publisher.call("publish", seed=1, weight_version=1)
            assert publisher.exitcode() == -signal.SIGKILL
    # The next start sweeps what a killed publisher left in a directory.
    with BridgeOver(SharedMemory(directory=directory)) as bridge:
        bridge.publish(sample_weights(1), weight_version=1)
    after = Holdings.now(*([directory] if directory else []))
    assert growth(before, after) == []
