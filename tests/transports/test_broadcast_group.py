"""``broadcast``: who gets into a group, under which name, and what is left when it ends."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    TransferTimeout,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.leaks import Holdings, growth
from rl_bridge.testing.peer import sample_weights
from rl_bridge.testing.processes import until
from rl_bridge.testing.strategies import contents_of
from rl_bridge.transports.broadcast import server
from rl_bridge.transports.broadcast.init_info import BroadcastInitInfo
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.wire.channel import GREETING_NBYTES, Greeting
from tests.helpers import forked, forking
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


def test_a_port_that_is_taken_is_told_at_once(make: Make) -> None:
    port = make("first").init_info().port
    with pytest.raises(TransportUnavailable, match=f"port {port}: .*Choose"):
        publish(make("second", port=port), 1)


def test_an_address_of_another_machine_is_told_at_once(make: Make) -> None:
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


def test_a_group_makes_way_for_another_of_its_name_only_if_that_is_wanted(make: Make) -> None:
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


def test_a_wrong_token_is_refused_before_anything_is_parsed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("trainer")
    manifest = publish(trainer, 1)
    parsed: list[bytes] = []
    monkeypatch.setattr(server, "from_receiver", parsed.append)
    group = {**dict(manifest.handle["group"]), "token": "0" * 64}
    handle = {"generation": manifest.handle["generation"], "group": group}
    with pytest.raises(SegmentError, match="token is not its own"):
        make("stranger").import_update(manifest.model_copy(update={"handle": handle}))
    assert parsed == []
    assert trainer.consumers() == []


def test_what_is_said_without_the_token_is_never_parsed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = make("trainer").init_info()
    parsed: list[bytes] = []
    monkeypatch.setattr(server, "from_receiver", parsed.append)
    with socket.create_connection((info.address, info.port), timeout=20) as stranger:
        stranger.sendall(b'{"kind":"join"}' * 100)
        hello = b""
        while data := stranger.recv(4096):  # its end, or a reset
            hello += data
        assert hello[GREETING_NBYTES["hello"] :] in {b"", Greeting.refusal}
    assert parsed == []


def test_somebody_who_listens_in_the_publishers_place_is_not_believed(make: Make) -> None:
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


def test_strangers_who_say_nothing_do_not_keep_anybody_out(make: Make) -> None:
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
    client = bad.consumer.end._clients[trainer.publisher_id][0]  # type: ignore[attr-defined]
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
    client = engine.consumer.end._clients[trainer.publisher_id][0]  # type: ignore[attr-defined]
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
