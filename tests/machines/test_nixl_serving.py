"""The process that serves reads: what kills it leaves the trainer alone, and another one follows.

UCX ends the process that answers a read over TCP where the reader dies in the middle.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import TransportUnavailable
from rl_bridge.testing.processes import DEADLINE_S, Child, until
from rl_bridge.transports.nixl.serving_process import ServingProcess
from tests.helpers import stop
from tests.machines.network.namespaces import machines, why_not
from tests.machines.nixl_roles import Reader, Trainer, runs

TCP = {"UCX_TLS": "tcp"}
ROUNDS, AT_ONCE = 5, 4
PATIENCE_S = 20.0


@pytest.fixture
def trainer() -> Iterator[Child]:
    with Child(Trainer, ucx=TCP) as child:
        yield child.ready()


@pytest.fixture
def reader() -> Iterator[Child]:
    with Child(Reader, ucx=TCP, timeout_s=PATIENCE_S) as child:
        yield child


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_trainer_outlives_twenty_readers_that_are_killed_as_they_read_from_afar() -> None:
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


def test_a_process_that_hangs_ends_the_read_in_time_and_the_next_read_has_another(
    trainer: Child,
) -> None:
    with Child(Reader, ucx=TCP, timeout_s=1.0) as reader:
        manifest = trainer.call("publish", version=1)
        pid = trainer.call("server_pid")
        found = reader.call("read", manifest=manifest, stops=pid)
        assert found == "TransferTimeout"
    with Child(Reader, ucx=TCP, timeout_s=PATIENCE_S) as other:
        assert other.call("read", manifest=manifest) == 1
    assert not runs(pid)


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
        assert serving.ensure()
    finally:
        if serving.pid:
            os.kill(serving.pid, signal.SIGCONT)
        serving.close()


def test_the_serving_process_ends_with_its_trainer(trainer: Child) -> None:
    trainer.call("publish", version=1)
    pid = trainer.call("server_pid")
    trainer.kill()
    until(lambda: not runs(pid), what="the serving process to end")


def test_the_serving_process_is_small_it_has_no_torch(trainer: Child) -> None:
    trainer.call("publish", version=1)
    maps = Path(f"/proc/{trainer.call('server_pid')}/maps").read_text(encoding="utf-8")
    assert "nixl" in maps
    assert "torch" not in maps


def test_the_serving_process_ends_when_the_bridge_is_closed(trainer: Child) -> None:
    trainer.call("publish", version=1)
    pid = trainer.call("server_pid")
    trainer.call("close")
    assert not runs(pid)


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
