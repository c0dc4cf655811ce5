"""``broadcast``: what members, strangers and closed ends can cost a publisher and its engines."""

import errno
import os
import resource
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.errors import SegmentError, StaleUpdate, WeightBridgeUnavailableError
from rl_bridge.testing.peer import sample_weights
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.testing.strategies import contents_of
from rl_bridge.transports.broadcast import sender
from rl_bridge.transports.broadcast.messages import Released
from rl_bridge.transports.broadcast.server import ControlServer
from tests.helpers import held_before_its_poll

Make = Callable[..., BroadcastTensorBridge]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[BroadcastTensorBridge] = []

    def make_one(worker: str, **options: Any) -> BroadcastTensorBridge:
        options = {"timeout_s": 20.0, "suspicious": "off", **options}
        bridge = make_weight_bridge("broadcast", source_worker=worker, **options)
        assert isinstance(bridge, BroadcastTensorBridge)
        made.append(bridge)
        return bridge

    yield make_one
    for bridge in reversed(made):
        bridge.close()


def publish(bridge: BroadcastTensorBridge, version: int) -> Any:
    return bridge.publish(sample_weights(version), weight_version=version)


def server_of(trainer: BroadcastTensorBridge) -> ControlServer:
    found = trainer.publisher.end._server  # type: ignore[attr-defined]
    assert isinstance(found, ControlServer)
    return found


def client_of(engine: BroadcastTensorBridge, trainer: BroadcastTensorBridge) -> Any:
    return engine.consumer.end._clients[trainer.publisher_id][0]  # type: ignore[attr-defined]


def test_a_publisher_without_descriptors_answers_while_strangers_knock(make: Make) -> None:
    trainer = make("trainer")
    manifest = publish(trainer, 1)
    info = trainer.init_info()
    answers: list[object] = []

    def ask() -> None:
        answers.append(trainer.consumers())
        trainer.release(manifest.update_id)
        answers.append("released")

    stranger = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asking = threading.Thread(target=ask, daemon=True)
    try:
        # Nobody can be accepted: the connection waits at the door, and the door stays ready.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        stranger.connect((info.address, info.port))
        asking.start()
        asking.join(10)
        has_answered = not asking.is_alive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        stranger.close()
    asking.join(20)
    assert has_answered
    assert answers == [[], "released"]


def test_a_version_that_is_asked_for_again_before_its_sender_has_noted_its_end_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = make("trainer"), make("engine")
    asked_again = threading.Event()
    send_slices = sender.send_slices

    def send_and_wait(*arguments: Any, **options: Any) -> None:
        send_slices(*arguments, **options)
        assert asked_again.wait(DEADLINE_S)

    monkeypatch.setattr(sender, "send_slices", send_and_wait)
    manifest = publish(trainer, 1)
    engine.import_update(manifest)
    engine.release(manifest.update_id)
    trainer.release(manifest.update_id)
    server = server_of(trainer)
    (member,) = server.members

    class Noticed(OrderedDict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            asked_again.set()

    with server.changed:
        member.wants = Noticed(member.wants)
        asked_again.clear()
    with pytest.raises(StaleUpdate):
        engine.import_update(manifest)


def test_a_member_that_never_stops_talking_does_not_hold_the_publisher(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("trainer")
    server = server_of(trainer)
    rounds = []

    def always(timeout_ms: float | None) -> bool:
        rounds.append(timeout_ms)
        assert len(rounds) < 10_000, "it is listened to for ever"
        return True

    monkeypatch.setattr(server, "_step", always)
    server.catch_up()
    assert rounds


def test_what_a_member_did_not_take_at_once_is_sent_on_whoever_looks_meanwhile(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("trainer")
    manifest = publish(trainer, 1)
    engines = [make("one"), make("other")]
    for engine in engines:
        engine.import_update(manifest)
    server = server_of(trainer)
    one, other = server.members
    server.open_store(7, (one, other))
    with held_before_its_poll(server):
        with monkeypatch.context() as patch:
            patch.setattr(other.channel, "flush", lambda: None)  # it is full
            client_of(engines[0], trainer)._send_value(7, "key", b"value")
            arrived = select.poll()
            arrived.register(one.channel.socket, select.POLLIN)
            assert arrived.poll(DEADLINE_S * 1e3)
            server.catch_up()
        assert other.channel.has_outgoing
    until(lambda: not other.channel.has_outgoing, what="the rest to be sent", deadline_s=20)


def test_a_closed_publisher_writes_to_no_descriptor_that_took_its_number(make: Make) -> None:
    trainer = make("trainer")
    server = server_of(trainer)
    number = server._wake.fd
    trainer.close()
    taken = os.memfd_create("somebody else's")
    try:
        if taken != number:
            os.dup2(taken, number)
        server.send([], Released(update_id="0" * 32))  # as its sender does that ends a transfer
        server.close()
        assert os.fstat(number).st_size == 0
    finally:
        for fd in {taken, number}:
            os.close(fd)


def test_who_only_looked_cannot_follow_in_a_place_that_is_not_its_own(make: Make) -> None:
    trainer = make("trainer", world_size=2)
    one = make("one", init_info=trainer.init_info())
    one.join()
    manifest = publish(trainer, 1)
    late = make("late")
    late.consumer.end.look(manifest)
    assert [member.is_observer for member in server_of(trainer).members] == [False, True]
    with pytest.raises(WeightBridgeUnavailableError, match="is taken by worker 'one'"):
        late.import_update(publish(trainer, 2))
    assert contents_of(one.import_update(manifest)) == contents_of(sample_weights(1))
    assert [report.worker for report in trainer.consumers()] == ["one"]


def test_a_closed_group_that_nobody_came_to_costs_no_time_once_its_wait_is_over(
    make: Make,
) -> None:
    trainer = make("trainer", world_size=3, timeout_s=0.3)
    publish(trainer, 1)
    schedule = trainer.publisher.end._sender._schedule  # type: ignore[attr-defined]
    until(lambda: schedule.wait_s() is None, what="the sender sleeps until there is news")
    latest = publish(trainer, 2)
    engine = make("engine", init_info=trainer.init_info())
    assert contents_of(engine.import_update(latest)) == contents_of(sample_weights(2))


def test_a_manifest_that_leads_nowhere_does_not_cost_the_group_of_its_name(make: Make) -> None:
    trainer = make("trainer", group_name="weights")
    engine = make("rollout")
    engine.import_update(publish(trainer, 1))
    client = client_of(engine, trainer)
    gone = make("gone", group_name="weights")
    manifest = publish(gone, 1)
    gone.close()
    with pytest.raises(SegmentError):
        engine.import_update(manifest)
    assert not client.is_lost
    newer = publish(trainer, 2)
    assert contents_of(engine.import_update(newer)) == contents_of(sample_weights(2))
    assert client_of(engine, trainer) is client


def test_an_engine_that_is_collected_in_its_own_thread_is_closed_there(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = make("trainer"), make("rollout")
    engine.import_update(publish(trainer, 1))
    client = client_of(engine, trainer)
    ended: list[bool] = []
    done = threading.Event()

    def collected(_: object) -> None:
        try:
            ended.append(client.close())
        finally:
            done.set()

    monkeypatch.setattr(client, "_handle", collected)
    publish(trainer, 2)  # the offer is what its thread is in the middle of
    assert done.wait(20)
    assert ended == [True]


def test_a_publisher_that_hung_up_is_gone_before_anybody_read_that(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = make("trainer"), make("rollout")
    engine.import_update(publish(trainer, 1))
    client = client_of(engine, trainer)
    monkeypatch.setattr(client._channel, "fill", lambda: None)
    assert not client.is_lost
    trainer.close()
    assert client.is_lost


def test_the_kernel_asks_whether_the_other_machine_is_there_on_both_sides(make: Make) -> None:
    """One that lost its power says no goodbye, and would keep its place for hours."""
    trainer, engine = make("trainer", timeout_s=20.0), make("rollout", timeout_s=10.0)
    engine.import_update(publish(trainer, 1))
    (member,) = server_of(trainer).members
    asked = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    found = [
        [channel.socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) for option in asked]
        for channel in (member.channel, client_of(engine, trainer)._channel)
    ]
    # No time limit for what a peer does not read: it may be slow.
    assert found == [[20, 6, 6, 0], [10, 3, 6, 0]]


def test_an_engine_whose_cable_is_out_imports_the_same_version_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = make("trainer"), make("rollout")
    manifest = publish(trainer, 1)

    class Unplugged(socket.socket):
        def connect(self, _: object) -> None:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Unplugged)
        with pytest.raises(WeightBridgeUnavailableError, match="then import again"):
            engine.import_update(manifest)
    assert contents_of(engine.import_update(manifest)) == contents_of(sample_weights(1))
