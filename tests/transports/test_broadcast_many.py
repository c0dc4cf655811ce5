"""``broadcast`` with hundreds of engines: what comes from all of them at once is not dropped."""

import socket
import threading
from contextlib import ExitStack

import torch

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.testing.processes import until
from rl_bridge.transports.broadcast.group import Group, GroupStore, send_slices
from rl_bridge.transports.broadcast.init_info import MAGIC
from rl_bridge.transports.broadcast.messages import Arrived, Go, Offer, Ready
from rl_bridge.transports.broadcast.receiver import Receiver, _PendingValues
from rl_bridge.transports.wire.arenas import Arrivals, CPUArenas
from rl_bridge.transports.wire.channel import GREETING_NBYTES, Greeting, Message, fresh_nonce

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
        timeout_s=20.0,
    )
    stores.append(GroupStore(lambda key, value: receiver.learn(1, key, value), timeout_s=20.0))
    try:
        sender = threading.Thread(target=send, args=(stores[0],))
        sender.start()
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
        sender.join(60)
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


def test_what_comes_without_end_is_not_kept() -> None:
    early, value = _PendingValues(), bytes(1 << 20)
    for number in range(100):
        early.add(1, str(number), value)
    assert len(early.take(1)) == 63


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
        nonce = Greeting.nonce_of(MAGIC, hello)
        assert nonce is not None
        greeting = Greeting(MAGIC, bytes.fromhex(info.token), info.identity, nonce)
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
