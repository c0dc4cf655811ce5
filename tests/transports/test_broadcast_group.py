"""``broadcast``: the group: who may join, what members and strangers can cost, how it ends."""

import errno
import json
import os
import resource
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.errors import (
    MalformedManifest,
    SegmentError,
    StaleUpdate,
    TransferTimeout,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.leaks import Holdings, growth
from rl_bridge.testing.peer import sample_weights
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.broadcast import sender
from rl_bridge.transports.broadcast.group import Group, GroupStore, send_slices
from rl_bridge.transports.broadcast.messages import (
    PROTOCOL,
    Arrived,
    BroadcastInitInfo,
    Go,
    Offer,
    Ready,
    Released,
)
from rl_bridge.transports.broadcast.receiver import Receiver, _PendingValues
from rl_bridge.transports.broadcast.sender import ControlServer
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.wire.arenas import Arrivals, CPUArenas
from rl_bridge.transports.wire.channel import GREETING_NBYTES, Greeting, Message, fresh_nonce
from tests.helpers import forked, forking, held_before_its_poll
from tests.transports.broadcast_rig import is_at_port

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


# ---- the init info ------------------------------------------------------------------------------


def test_the_init_info_goes_there_and_back_as_json(make: Make) -> None:
    info = make("trainer", group_name="weights", world_size=5).init_info(rank_offset=2)
    assert BroadcastInitInfo.from_json(info.to_json()) == info
    told = json.loads(info.to_json())
    assert told["address"] == "127.0.0.1"
    assert told["port"] == info.port
    assert (told["world_size"], told["rank_offset"]) == (5, 2)
    assert (told["group_name"], told["backend"]) == ("weights", "gloo")
    assert len(told["token"]) == 64


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "localhost"},
        {"address": "0.0.0.0"},
        {"port": 0},
        {"port": "80"},
        {"token": "secret"},
        {"backend": "mpi"},
        {"group_name": ""},
        {"world_size": -1},
        {"rank_offset": 0},
        {"surplus": 1},
    ],
    ids=str,
)
def test_an_init_info_that_is_none_is_refused(make: Make, changed: dict[str, Any]) -> None:
    told = json.loads(make("trainer").init_info().to_json()) | changed
    with pytest.raises(MalformedManifest, match=next(iter(changed))):
        make("rollout", init_info=json.dumps(told))


@pytest.mark.parametrize("text", ["", "[" * 5000, "[]", "x" * 10_000, "null "], ids=len)
def test_text_that_is_no_init_info_is_refused(make: Make, text: str) -> None:
    with pytest.raises(MalformedManifest, match="to_json"):
        make("rollout", init_info=text)


def test_receivers_that_joined_before_have_a_version_before_they_import_it(make: Make) -> None:
    trainer = make("trainer")
    engines = [make(name, init_info=trainer.init_info().to_json()) for name in ("one", "two")]
    for engine in engines:
        engine.join()
    manifest = publish(trainer, 1)
    for engine in engines:
        arrivals = engine.consumer.end._clients[trainer.publisher_id][1]  # type: ignore[attr-defined]
        until(partial(arrivals.find, manifest.update_id), what="it arrives by itself")
        assert contents_of(engine.import_update(manifest)) == contents_of(sample_weights(1))


def test_a_group_of_a_known_size_waits_for_all_before_its_first_version(make: Make) -> None:
    trainer = make("trainer", world_size=3)
    info = trainer.init_info(rank_offset=1)
    one = make("one", init_info=info, source_rank=0)
    one.join()
    manifest = publish(trainer, 1)
    two = make("two", init_info=info, source_rank=1)
    two.join()
    for engine in (one, two):
        assert contents_of(engine.import_update(manifest)) == contents_of(sample_weights(1))


@pytest.mark.parametrize(("offset", "why"), [(1, "is taken by worker 'one'"), (3, "not in the gr")])
def test_a_rank_that_is_taken_or_not_in_the_group_is_refused(
    make: Make, offset: int, why: str
) -> None:
    trainer = make("trainer", world_size=3)
    make("one", init_info=trainer.init_info()).join()
    with pytest.raises(WeightBridgeUnavailableError, match=why):
        make("two", init_info=trainer.init_info(rank_offset=offset)).join()


def test_more_receivers_than_there_is_room_for_are_refused(make: Make) -> None:
    trainer = make("trainer", max_consumers=1)
    manifest = publish(trainer, 1)
    one, two = make("one"), make("two")
    one.import_update(manifest)
    with pytest.raises(WeightBridgeUnavailableError, match="room for 1 consumers"):
        two.import_update(manifest)
    one.close()
    assert contents_of(two.import_update(manifest)) == contents_of(sample_weights(1))


# ---- names, ports, addresses --------------------------------------------------------------------


def test_a_port_that_is_taken_is_reported_at_once(make: Make) -> None:
    port = make("first").init_info().port
    with pytest.raises(TransportUnavailable, match=f"port {port}: .*Choose"):
        publish(make("second", port=port), 1)


def test_an_address_of_another_machine_is_reported_at_once(make: Make) -> None:
    with pytest.raises(TransportUnavailable, match=r"nothing can listen at 192\.0\.2\.1"):
        publish(make("trainer", address="192.0.2.1"), 1)


def test_a_name_and_a_port_can_be_used_again(make: Make) -> None:
    engine = make("rollout")
    port = 0
    for version in (1, 2, 3):
        trainer = make("trainer", group_name="weights", port=port)
        port = trainer.init_info().port
        manifest = publish(trainer, version)
        assert contents_of(engine.import_update(manifest)) == contents_of(sample_weights(version))
        engine.release(manifest.update_id)
        trainer.close()


def test_a_group_is_left_for_another_of_its_name_only_with_override(make: Make) -> None:
    first, second = (make(name, group_name="weights") for name in ("first", "second"))
    stubborn, willing = make("stubborn", override=False), make("willing")
    for engine in (stubborn, willing):
        engine.import_update(publish(first, 1 + len(first.consumers())))
    manifest = publish(second, 1)
    with pytest.raises(WeightBridgeUnavailableError, match="override=True"):
        stubborn.import_update(manifest)
    assert contents_of(willing.import_update(manifest)) == contents_of(sample_weights(1))
    told = {report.worker: report.presence for report in first.consumers()}
    assert told == {"stubborn": "alive", "willing": "gone"}
    first.close()
    assert contents_of(stubborn.import_update(manifest)) == contents_of(sample_weights(1))


def test_both_sides_have_to_name_the_same_backend(make: Make) -> None:
    manifest = publish(make("trainer"), 1)
    handle = json.loads(json.dumps({"generation": manifest.handle["generation"]}))
    handle["group"] = {**dict(manifest.handle["group"]), "backend": "nccl"}
    with pytest.raises(TransportUnavailable, match="same backend="):
        make("rollout").import_update(manifest.model_copy(update={"handle": handle}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_nccl_without_a_gpu_is_blocked_with_its_cause(make: Make) -> None:
    bridge = make("trainer", backend="nccl")
    for call in (lambda: publish(bridge, 1), bridge.join):
        with pytest.raises(TransportUnavailable, match=r"NCCL|device") as caught:
            call()
        assert caught.value.transport == "broadcast"
        assert "gloo" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"backend": "mpi"}, ValueError),
        ({"address": "trainer-0"}, ValueError),
        ({"port": 70_000}, ValueError),
        ({"port": "80"}, TypeError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": float("nan")}, ValueError),
        ({"timeout_s": "soon"}, TypeError),
        ({"world_size": 0}, ValueError),
        ({"world_size": 1}, ValueError),
        ({"group_name": 3}, TypeError),
        ({"init_info": 3}, MalformedManifest),
    ],
    ids=str,
)
def test_an_option_out_of_its_range_is_refused_when_the_bridge_is_made(
    options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        Broadcast(**options)


# ---- strangers ----------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What publishers parse from now on."""
    texts: list[bytes] = []

    def parse(text: bytes) -> object:
        texts.append(text)
        return PROTOCOL.parse_receiver(text)

    seen = replace(PROTOCOL)
    object.__setattr__(seen, "parse_receiver", parse)
    monkeypatch.setattr(sender, "PROTOCOL", seen)
    return texts


def test_a_wrong_token_is_refused_before_anything_is_parsed(
    make: Make, parsed: list[bytes]
) -> None:
    trainer = make("trainer")
    manifest = publish(trainer, 1)
    group = {**dict(manifest.handle["group"]), "token": "0" * 64}
    handle = {"generation": manifest.handle["generation"], "group": group}
    with pytest.raises(SegmentError, match="token is not its own"):
        make("stranger").import_update(manifest.model_copy(update={"handle": handle}))
    assert parsed == []
    assert trainer.consumers() == []
    make("rollout").import_update(manifest)
    assert len(parsed) > 0


def test_bytes_from_a_stranger_are_never_parsed(make: Make, parsed: list[bytes]) -> None:
    info = make("trainer").init_info()
    with socket.create_connection((info.address, info.port), timeout=20) as stranger:
        stranger.sendall(b'{"kind":"join"}' * 100)
        hello = b""
        while data := stranger.recv(4096):  # its end, or a reset
            hello += data
        assert hello[GREETING_NBYTES["hello"] :] in {b"", Greeting.refusal}
    assert parsed == []


def test_an_impostor_in_the_publishers_place_is_refused(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        info = make("trainer").init_info().model_copy(update={"port": listener.getsockname()[1]})

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b"rlbcast1" + bytes(32))
                connection.recv(4096)
                connection.sendall(b"x" * 32 + b"\0\0\0\4null")
                connection.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(SegmentError, match="does not know the token"):
            make("rollout", init_info=info).join()
        thread.join(20)


@pytest.mark.parametrize(
    "text",
    [
        b"null",
        b"{}",
        b'{"kind":"report","report":{}}',
        b"[" * 60_000,
        b'{"kind":"go"}',
        b"\xff\xfe",
    ],
    ids=["null", "empty", "wrong field", "deep", "not a receiver's", "no text"],
)
def test_a_member_that_sends_what_is_no_message_loses_its_connection_only(
    make: Make, text: bytes
) -> None:
    trainer, good, bad = make("trainer"), make("good"), make("bad")
    manifest = publish(trainer, 1)
    for engine in (good, bad):
        engine.import_update(manifest)
    client = client_of(bad, trainer)
    client._channel.send_bytes(text)
    until(lambda: client.is_lost, what="its connection ends")
    newer = publish(trainer, 2)
    assert contents_of(good.import_update(newer)) == contents_of(sample_weights(2))
    told = {report.worker: report.presence for report in trainer.consumers()}
    assert told == {"good": "alive", "bad": "gone"}
    assert contents_of(bad.import_update(newer)) == contents_of(sample_weights(2))


def test_a_message_that_is_too_long_is_not_read(make: Make) -> None:
    trainer, engine = make("trainer"), make("rollout")
    engine.import_update(publish(trainer, 1))
    client = client_of(engine, trainer)
    client._channel.send_raw((1 << 31).to_bytes(4, "big"))
    until(lambda: client.is_lost, what="its connection ends")


# ---- ends ---------------------------------------------------------------------------------------


def test_closing_leaves_no_thread_socket_or_store(make: Make) -> None:
    def cycle() -> None:
        trainer = make("trainer")
        engines = [make(name, init_info=trainer.init_info()) for name in ("one", "two")]
        for engine in engines:
            engine.join()
        manifest = publish(trainer, 1)
        for engine in engines:
            engine.import_update(manifest)
        for bridge in (*engines, trainer):
            bridge.close()

    cycle()
    threads, before = set(threading.enumerate()), Holdings.now()
    native = len(list(Path("/proc/self/task").iterdir()))
    cycle()
    assert set(threading.enumerate()) <= threads
    # Threads of Gloo's own end a little behind their group.
    until(lambda: len(list(Path("/proc/self/task").iterdir())) <= native, what="threads end")
    assert growth(before, Holdings.now()) == []


def test_dropped_bridges_end_their_threads(make: Make) -> None:
    before = set(threading.enumerate())
    trainer = make_weight_bridge("broadcast", source_worker="trainer")
    engine = make_weight_bridge("broadcast", source_worker="rollout")
    engine.import_update(publish(trainer, 1))  # type: ignore[arg-type]
    del engine, trainer
    until(lambda: set(threading.enumerate()) <= before, what="the threads end")


@forking
def test_a_forked_child_keeps_no_connection_alive(make: Make) -> None:
    trainer, engine = make("trainer"), make("rollout")
    engine.import_update(publish(trainer, 1))
    info = trainer.init_info()

    def child() -> bool:
        ports = {info.port}
        fds = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        held = [fd for fd in fds if is_at_port(fd, ports)]
        return held == []

    assert forked(child)
    newer = publish(trainer, 2)
    assert contents_of(engine.import_update(newer)) == contents_of(sample_weights(2))


def test_an_import_of_a_silent_publisher_ends_at_its_deadline(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trainer = make("trainer")
        manifest = publish(trainer, 1)
        group = {**dict(manifest.handle["group"]), "port": listener.getsockname()[1]}
        handle = {"generation": manifest.handle["generation"], "group": group}
        engine = make("rollout", timeout_s=0.2)
        with pytest.raises(TransferTimeout, match=r"0\.2 s"):
            engine.import_update(manifest.model_copy(update={"handle": handle}))
    # This side's wait was over, which says nothing of the update: it may come again.
    assert contents_of(make("late").import_update(manifest)) == contents_of(sample_weights(1))


# ---- members, strangers and closed ends ----------------------------------------------------------


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
        # Nobody can be accepted: the connection waits in the backlog, and the listener stays ready.
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


def test_a_request_for_a_version_whose_transfer_is_just_ending_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = make("trainer"), make("engine")
    asked_again = threading.Event()

    def send_and_wait(*arguments: Any, **options: Any) -> None:
        send_slices(*arguments, **options)
        assert asked_again.wait(DEADLINE_S)

    monkeypatch.setattr(sender, "send_slices", send_and_wait)
    manifest = publish(trainer, 1)
    engine.import_update(manifest)
    engine.release(manifest.update_id)
    trainer.release(manifest.update_id)
    control = server_of(trainer)
    (member,) = control.members

    class Noticed(OrderedDict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            asked_again.set()

    with control.changed:
        member.wants = Noticed(member.wants)
        asked_again.clear()
    with pytest.raises(StaleUpdate):
        engine.import_update(manifest)


def test_a_member_that_never_stops_talking_does_not_hold_the_publisher(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("trainer")
    control = server_of(trainer)
    rounds = []

    def always(timeout_ms: float | None) -> bool:
        rounds.append(timeout_ms)
        assert len(rounds) < 10_000, "it is listened to for ever"
        return True

    monkeypatch.setattr(control, "_step", always)
    control.catch_up()
    assert rounds


def test_a_message_that_a_full_socket_did_not_take_is_sent_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("trainer")
    manifest = publish(trainer, 1)
    engines = [make("one"), make("other")]
    for engine in engines:
        engine.import_update(manifest)
    control = server_of(trainer)
    one, other = control.members
    control.open_store(7, (one, other))
    with held_before_its_poll(control):
        with monkeypatch.context() as patch:
            patch.setattr(other.channel, "flush", lambda: None)  # it is full
            client_of(engines[0], trainer)._send_value(7, "key", b"value")
            arrived = select.poll()
            arrived.register(one.channel.socket, select.POLLIN)
            assert arrived.poll(DEADLINE_S * 1e3)
            control.catch_up()
        assert other.channel.has_outgoing
    until(lambda: not other.channel.has_outgoing, what="the rest to be sent", deadline_s=20)


def test_a_closed_publisher_writes_to_no_descriptor_that_took_its_number(make: Make) -> None:
    trainer = make("trainer")
    control = server_of(trainer)
    number = control._wake.fd
    trainer.close()
    taken = os.memfd_create("somebody else's")
    try:
        if taken != number:
            os.dup2(taken, number)
        control.send([], Released(update_id="0" * 32))  # as its sender does that ends a transfer
        control.close()
        assert os.fstat(number).st_size == 0
    finally:
        for fd in {taken, number}:
            os.close(fd)


def test_an_observer_cannot_follow_in_a_place_that_is_taken(make: Make) -> None:
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


def test_a_group_that_stays_incomplete_delays_only_its_first_version(
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


def test_a_connection_that_the_publisher_ended_counts_as_lost_at_once(
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


def test_an_engine_without_network_imports_the_same_version_later(
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


# ---- hundreds of engines ------------------------------------------------------------------------

MANY = 600
NBYTES = 8192


def test_the_values_of_many_members_wait_for_one_that_begins_late() -> None:
    """The publisher's own comes first of all, and would be the first to be dropped."""
    said: list[Message] = []
    stores: list[GroupStore] = []
    arrivals = Arrivals(CPUArenas(), "many")
    receiver = Receiver(
        "gloo",
        arrivals,
        send=said.append,
        send_value=lambda _, key, value: stores[0].learn(key, value),
        address="127.0.0.1",
        takes_offers=True,
        timeout_s=20.0,
    )
    stores.append(GroupStore(lambda key, value: receiver.learn(1, key, value), timeout_s=20.0))
    try:
        sending = threading.Thread(target=send, args=(stores[0],))
        sending.start()
        until(lambda: bool(receiver._pending_values._values), what="the publisher's value")
        for number in range(2, MANY):
            receiver.learn(1, f"0/{number}", bytes(200))
        receiver.put(
            Offer(
                transfer=1,
                update_id="a" * 32,
                generation=1,
                arena_nbytes=NBYTES,
                layout_digest="b" * 32,
                header="c" * 32,
            )
        )
        receiver.put(Go(transfer=1, group=1, rank=1, size=2, slice_nbytes=4096))
        sending.join(60)
        until(lambda: len(said) == 2, what="the arrival")
        assert said == [Ready(transfer=1), Arrived(transfer=1)]
    finally:
        receiver.close(timeout_s=20.0)
        arrivals.close()


def send(store: GroupStore) -> None:
    """Be the publisher of one version."""
    group = Group("gloo", store, rank=0, size=2, address="127.0.0.1", timeout_s=20.0)
    send_slices(group, torch.ones(NBYTES, dtype=torch.uint8), 4096)
    group.close()


def test_only_the_newest_group_s_values_are_kept() -> None:
    early = _PendingValues()
    early.add(1, "old", b"1")
    early.add(2, "new", b"2")
    early.add(1, "late", b"3")
    assert early.take(1) == {}
    early.add(2, "new", b"2")
    early.add(2, "new", b"4")
    assert early.take(2) == {"new": b"4"}
    assert early.take(2) == {}


def test_values_without_end_are_not_kept() -> None:
    early, value = _PendingValues(), bytes(1 << 20)
    for number in range(100):
        early.add(1, str(number), value)
    assert len(early.take(1)) == 63


def test_silent_strangers_keep_nobody_out(make: Make) -> None:
    trainer = make("trainer")
    info = trainer.init_info()
    silent = [socket.create_connection((info.address, info.port), timeout=20) for _ in range(80)]
    try:
        manifest = publish(trainer, 1)
        imported = make("rollout").import_update(manifest)
        assert contents_of(imported) == contents_of(sample_weights(1))
    finally:
        for connection in silent:
            connection.close()


def test_engines_that_all_come_at_once_get_in() -> None:
    with (
        make_weight_bridge("broadcast", max_consumers=100, timeout_s=60.0) as trainer,
        ExitStack() as stack,
    ):
        assert isinstance(trainer, BroadcastTensorBridge)
        trainer.publish({"w": torch.ones(2)}, weight_version=1)
        info = trainer.init_info()
        waiting = []
        for _ in range(100):
            connection = stack.enter_context(
                socket.create_connection((info.address, info.port), timeout=20)
            )
            waiting.append((connection, read(connection, "hello")))
        first, hello = waiting[0]
        nonce = Greeting.nonce_of(PROTOCOL.magic, hello)
        assert nonce is not None
        greeting = Greeting(PROTOCOL.magic, bytes.fromhex(info.token), info.identity, nonce)
        answer = greeting.answer(fresh_nonce())
        first.sendall(answer)
        assert greeting.is_proven_by(read(first, "proof"), answer)


def read(connection: socket.socket, part: str) -> bytes:
    """One part of a greeting."""
    found = b""
    while len(found) < GREETING_NBYTES[part]:
        more = connection.recv(GREETING_NBYTES[part] - len(found))
        assert more, f"hung up instead of the {part}"
        found += more
    return found
