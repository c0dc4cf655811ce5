"""The process that serves reads: what kills it leaves the trainer alone, and another one follows.

UCX ends the process that answers a read over TCP where the reader dies in the middle.
"""

import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import TransportUnavailable, WeightBridgeUnavailableError
from rl_bridge.testing.processes import DEADLINE_S, Child, until
from rl_bridge.transports.nixl import serving_process
from rl_bridge.transports.nixl.serving_process import ServingProcess
from tests.helpers import stop
from tests.machines.network.namespaces import machines, why_not
from tests.machines.nixl_roles import Reader, Trainer, both, publisher_end, runs

TCP = {"UCX_TLS": "tcp"}
ROUNDS, AT_ONCE, STRIKES = 3, 4, 5
PATIENCE_S = 20.0
HASTE_S = 9.0
"""Of readers that wait for a process that hangs: a third of it passes each time."""
STAGES = ("new", "bytes")
"""Of a read."""


@pytest.fixture
def trainer() -> Iterator[Child]:
    with Child(Trainer, ucx=TCP) as child:
        yield child.ready()


@pytest.fixture
def reader() -> Iterator[Child]:
    with Child(Reader, ucx=TCP, timeout_s=PATIENCE_S) as child:
        yield child


@pytest.fixture
def hasty() -> Iterator[Child]:
    with Child(Reader, ucx=TCP, timeout_s=HASTE_S) as child:
        yield child


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_trainer_outlives_readers_that_are_killed_as_they_read_from_afar() -> None:
    with (
        machines() as (left, right),
        Child(Trainer, ucx=TCP, namespace=left.namespace, address=left.address) as trainer,
    ):
        for turn in range(ROUNDS):
            manifest = trainer.call("publish", version=1 + turn)
            with ExitStack() as stack:
                readers = [
                    stack.enter_context(
                        Child(Reader, ucx=TCP, timeout_s=PATIENCE_S, namespace=right.namespace)
                    )
                    for _ in range(AT_ONCE)
                ]
                for one in readers:
                    one.tell("read", manifest=manifest, kills=one.pid)
                assert [one.exitcode() for one in readers] == [-signal.SIGKILL] * AT_ONCE
            until(lambda: trainer.call("readers") == [], what="the leases to end")
            trainer.call("release_all")
        manifest = trainer.call("publish", version=8)
        with Child(Reader, ucx=TCP, timeout_s=PATIENCE_S, namespace=right.namespace) as last:
            assert last.call("read", manifest=manifest) == 8
        assert trainer.call("registered") <= 2


def test_a_read_goes_on_if_the_serving_process_is_killed(trainer: Child, reader: Child) -> None:
    manifest = trainer.call("publish", version=1)
    pid = trainer.call("server_pid")
    assert reader.call("read", manifest=manifest, kills=pid) == 1
    assert not runs(pid)
    assert trainer.call("server_pid") != pid
    assert trainer.call("states", manifest=manifest) == ["acknowledged"]


def test_a_reader_between_two_reads_does_not_notice_another_process(
    trainer: Child, reader: Child
) -> None:
    """What it acknowledges meanwhile arrives: its connection to the trainer is the same."""
    first = trainer.call("publish", version=1)
    assert reader.call("read", manifest=first) == 1
    second = trainer.call("publish", version=2)
    pid = trainer.call("server_pid")
    os.kill(pid, signal.SIGKILL)
    until(lambda: trainer.call("server_pid") != pid, what="the trainer to notice")
    assert trainer.call("states", manifest=first) == ["acknowledged"]
    # The first of them lies in memory that the process before knew.
    for version, manifest in ((2, second), (3, trainer.call("publish", version=3))):
        assert reader.call("read", manifest=manifest) == version
        assert trainer.call("states", manifest=manifest) == ["acknowledged"]


def test_memory_for_a_new_layout_is_registered_with_another_process(
    trainer: Child, reader: Child
) -> None:
    trainer.call("publish", version=1)
    os.kill(trainer.call("server_pid"), signal.SIGKILL)
    small = trainer.call("publish", version=2, small=True)
    assert trainer.call("registered") == 2
    assert reader.call("fetch", manifest=small) == 2


@pytest.mark.parametrize("knows", [True, False], ids=["a reader from before", "a new reader"])
def test_a_process_that_hung_while_nobody_read_is_replaced_within_the_import(
    trainer: Child, hasty: Child, knows: bool
) -> None:
    first, second = (trainer.call("publish", version=version) for version in (1, 2))
    if knows:
        assert hasty.call("read", manifest=first) == 1
    pid = trainer.call("server_pid")
    stop(pid)
    assert hasty.call("read", manifest=second) == 2
    assert not runs(pid)
    assert trainer.call("states", manifest=second) == ["acknowledged"]


@pytest.mark.parametrize("at", STAGES)
def test_a_process_that_hangs_in_the_middle_of_a_read_is_replaced_within_the_import(
    trainer: Child, hasty: Child, at: str
) -> None:
    manifest = trainer.call("publish", version=1)
    pid = trainer.call("server_pid")
    assert hasty.call("read", manifest=manifest, stops=pid, at=at) == 1
    assert not runs(pid)
    assert hasty.call("read", manifest=trainer.call("publish", version=2)) == 2


def test_a_publish_does_not_wait_for_a_process_that_hangs() -> None:
    """The trainer's own deadline is longer than this test may take: the reader's decides."""
    with (
        Child(Trainer, ucx=TCP, timeout_s=100 * DEADLINE_S) as trainer,
        Child(Reader, ucx=TCP, timeout_s=HASTE_S) as reader,
    ):
        first = trainer.call("publish", version=1)
        pid = trainer.call("server_pid")
        stop(pid)
        second = trainer.call("publish", version=2)  # in another slot, which has to be mapped
        assert runs(pid)
        third = trainer.call("publish", version=3)
        for version, manifest in ((1, first), (2, second), (3, third)):
            assert reader.call("read", manifest=manifest) == version
        assert not runs(pid)
        assert trainer.call("registered") == 3


def test_a_process_that_hangs_as_a_slot_is_mapped_is_replaced_without_readers() -> None:
    with Child(Trainer, ucx=TCP, timeout_s=HASTE_S) as trainer:
        trainer.call("publish", version=1)
        pid = trainer.call("server_pid")
        stop(pid)
        trainer.call("publish", version=2)
        until(lambda: not runs(pid), what="the process to be killed")


def test_whenever_a_process_hangs_or_dies_an_import_is_whole_or_a_typed_error(
    trainer: Child, hasty: Child
) -> None:
    chance = random.Random(0)
    for version in range(1, 1 + STRIKES):
        moment = chance.choice(["before publish", "before import", "at start", *STAGES])
        is_stopped = moment != "at start" and chance.random() < 0.5
        strike = partial(_strike, signal.SIGSTOP if is_stopped else signal.SIGKILL)
        victim = trainer.call("server_pid")
        if victim and moment == "before publish":
            strike(victim)
        manifest = trainer.call("publish", version=version)
        if victim and moment in {"before import", "at start"}:
            strike(victim)
        during = {"at": moment, "stops" if is_stopped else "kills": victim}
        hasty.tell("read", manifest=manifest, **(during if moment in STAGES else {}))
        if moment == "at start":  # the process that takes its place, too
            until(partial(_is_another, trainer, victim), what="another process to start")
            strike(trainer.call("server_pid"))
        found = hasty.answer()
        while found != version:
            assert isinstance(found, str)  # no mixture
            found = hasty.call("read", manifest=manifest)
        hasty.call("let_go", manifest=manifest)
        trainer.call("release_all")


def _strike(number: int, pid: int) -> None:
    with suppress(ProcessLookupError):  # it was replaced just now
        if number == signal.SIGSTOP:
            stop(pid)
        else:
            os.kill(pid, number)


def _is_another(trainer: Child, before: int) -> bool:
    return trainer.call("server_pid") not in {0, before}


def test_a_process_that_answers_is_left_alone() -> None:
    """Then it is the network that hangs: another process would not help."""
    serving = ServingProcess(backend="UCX", params={})
    try:
        pid = serving.pid
        serving.doubt(DEADLINE_S)
        assert serving.seconds_left is not None

        def has_answered() -> bool:
            serving.hear()
            return serving.seconds_left is None

        until(has_answered, what="its answer")
        assert serving.pid == pid
    finally:
        serving.close()


def test_a_process_that_cannot_be_replaced_is_reported_to_readers_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with both(trainer={"serve": "process"}) as (near, far):
        manifest = near.publish({"w": torch.ones(8)}, weight_version=1)
        host = publisher_end(near)._host
        assert isinstance(host, ServingProcess)
        os.kill(host.pid, signal.SIGKILL)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            with pytest.raises(WeightBridgeUnavailableError, match="it ended with 1"):
                far.import_update(manifest)
        assert far.import_update(manifest)["w"].sum() == 8


def test_memory_that_is_refused_late_costs_its_own_version_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_process, "_REFUSAL_S", 0.0)
    with both(trainer={"serve": "process"}) as (near, far):
        tensors = {"w": torch.ones(1 << 22)}
        first = near.publish(tensors, weight_version=1)
        host = publisher_end(near)._host
        assert isinstance(host, ServingProcess)
        until(lambda: host.is_serving, what="the first version is mapped")
        pid, unlimited = host.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        no_more = (taken + (8 << 20), resource.RLIM_INFINITY)  # less than another slot takes
        resource.prlimit(pid, resource.RLIMIT_AS, no_more)
        stop(pid)  # else its refusal may come at once
        second = near.publish(tensors, weight_version=2)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(
            WeightBridgeUnavailableError, match="cannot be read now: its memory cannot"
        ):
            far.import_update(second)
        assert far.import_update(first)["w"].sum() == 1 << 22
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
        near.release(second.update_id)
        third = near.publish(tensors, weight_version=3)
        assert far.import_update(third)["w"].sum() == 1 << 22
        assert host.pid == pid


def test_messages_to_a_serving_process_that_hangs_do_not_wait() -> None:
    serving = ServingProcess(backend="UCX", params={})

    def speak() -> None:
        for number in range(5000):
            serving.help(is_needed=not number % 2)

    speaking = threading.Thread(target=speak, daemon=True)
    try:
        stop(serving.pid)
        speaking.start()
        speaking.join(DEADLINE_S)
        assert not speaking.is_alive()
        assert serving.is_lost  # and is started anew for the next reader
        serving.ensure()
        assert not serving.is_lost
    finally:
        serving.close()


@pytest.mark.parametrize("is_killed", [True, False], ids=["trainer killed", "bridge closed"])
def test_the_serving_process_is_small_and_ends_with_its_trainer(
    trainer: Child, is_killed: bool
) -> None:
    trainer.call("publish", version=1)
    pid = trainer.call("server_pid")
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    assert "nixl" in maps
    assert "torch" not in maps
    if is_killed:
        trainer.kill()
    else:
        trainer.call("close")
    until(lambda: not runs(pid), what="the serving process to end")


def test_a_serving_process_that_cannot_start_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    bridge = cast("NIXLTensorBridge", make_weight_bridge("nixl", suspicious="off"))
    try:
        with pytest.raises(TransportUnavailable, match=r"it ended with 1.*serve='inline'"):
            bridge.publish({}, weight_version=1)
    finally:
        bridge.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"serve": "thread"}, "expected 'process', 'inline' or None"),
        ({"serve": "process", "device": 0}, "another process cannot serve memory of a GPU"),
        ({"serve": "process", "in_place": True}, "nor the trainer's own tensors"),
    ],
)
def test_serve_is_checked_when_the_bridge_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_weight_bridge("nixl", **options)


def test_the_serving_process_sleeps_while_there_is_nothing_to_do() -> None:
    serving = ServingProcess(backend="UCX", params={})
    try:
        status = Path(f"/proc/{serving.pid}/status")

        def sleeps() -> int:
            lines = status.read_text("ascii").splitlines()
            return int(*(line.split()[1] for line in lines if line.startswith("voluntary_ctxt")))

        serving.help(is_needed=True)
        before = sleeps()
        until(lambda: sleeps() >= before + 50, what="it went to sleep, again and again")
    finally:
        serving.close()
