"""Connections of transports over sockets: errors name the remedy, and strangers keep nobody out."""

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeUnavailableError
from rl_bridge.testing.processes import until
from rl_bridge.transports import UpdateReport
from rl_bridge.transports.broadcast.messages import PROTOCOL, Join
from rl_bridge.transports.wire import (
    HungUp,
    Message,
    Peer,
    PeerClient,
    PeerJoin,
    PeerProtocol,
    PeerServer,
)
from rl_bridge.transports.wire.channel import Channel, Greeting, fresh_nonce
from rl_bridge.transports.wire.client import Connector
from rl_bridge.transports.wire.server import Acceptor, listen


def call(address: str = "127.0.0.1") -> None:
    Connector("the publisher", address, 1, PROTOCOL, timeout_s=5.0).connect(b"", "")


def test_a_process_without_a_descriptor_left_gets_an_error_that_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the next one that would be given out
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(WeightBridgeUnavailableError, match=r"Too many open files.*ulimit"):
            call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_publisher_that_does_not_listen_is_gone() -> None:
    with pytest.raises(
        SegmentError, match=r"at 127\.0\.0\.1 port 1 cannot be reached.* publish again"
    ):
        call()


@pytest.mark.parametrize("said", [b"", PROTOCOL.magic + bytes(32)], ids=["at once", "behind hello"])
def test_a_peer_that_is_pushed_out_of_its_greeting_may_come_again(said: bytes) -> None:
    """Anybody can have that happen who opens many connections, without the token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def push_out() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(said)
                    if said:
                        connection.recv(4096)

        thread = threading.Thread(target=push_out)
        thread.start()
        port = listener.getsockname()[1]
        connector = Connector("the publisher", "127.0.0.1", port, PROTOCOL, timeout_s=20.0)
        with pytest.raises(WeightBridgeUnavailableError, match="hung up in the greeting"):
            connector.connect(b"token", "identity")
        thread.join(20)


def test_a_publisher_that_dies_while_it_is_greeted_is_gone() -> None:
    """Its listener took the connection, and goes with it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def die() -> None:
        connection, _ = listener.accept()
        listener.close()
        connection.close()

    thread = threading.Thread(target=die)
    thread.start()
    connector = Connector("the publisher", "127.0.0.1", port, PROTOCOL, timeout_s=20.0)
    with pytest.raises(SegmentError, match="it died"):
        connector.connect(b"token", "identity")
    thread.join(20)


@contextmanager
def accepting() -> Iterator[tuple[Acceptor[Join], threading.Condition]]:
    """One that is served by hand, under its owner's lock."""
    made: Acceptor[Join] = Acceptor(
        listen("test", "127.0.0.1", 0),
        PROTOCOL,
        token=b"token",
        identity="identity",
        timeout_s=3600.0,
        max_members=1,
    )
    pause = threading.Condition()
    with closing(made), pause:
        yield made, pause


def test_strangers_push_out_no_peer_that_knows_the_token() -> None:
    with accepting() as (acceptor, pause), ExitStack() as stack:
        listener = acceptor.listener

        def come() -> Channel:
            near = Channel(socket.create_connection(listener.getsockname(), timeout=20))
            stack.enter_context(closing(near))
            acceptor.serve({listener.fileno()}, pause)
            return near

        near = come()
        (far,) = acceptor.channels
        hello = near.receive_raw(40, until=time.monotonic() + 20)
        assert hello is not None
        greeting = Greeting(PROTOCOL.magic, b"token", "identity", hello[8:])
        near.send_raw(greeting.answer(fresh_nonce()))
        select.select([far.socket], [], [], 20)
        acceptor.serve({far.socket.fileno()}, pause)
        for _ in range(80):
            come()
        assert len(acceptor.channels) == 64
        assert far in acceptor.channels


def test_a_connection_that_is_lost_while_it_joins_is_closed_at_once() -> None:
    """Else the acceptor's owner polls it in a busy loop until the greeting's time is over."""
    with accepting() as (acceptor, pause):
        with closing(socket.create_connection(acceptor.listener.getsockname())):
            acceptor.serve({acceptor.listener.fileno()}, pause)
            (channel,) = acceptor.channels
            channel.is_lost = True  # as after a send to one who hung up
            acceptor.serve(set(), pause)
        assert acceptor.channels == []
        assert channel.socket.fileno() < 0


# More than a pair of sockets buffers.
LONG = "x" * (4 << 20)


def test_a_question_goes_on_leaving_while_its_answer_is_waited_for() -> None:
    here, there = socket.socketpair()
    near = Channel(here, max_message_nbytes=len(LONG))
    far = Channel(there, max_message_nbytes=len(LONG))
    near.send_bytes(LONG.encode())
    assert near.has_outgoing
    until = time.monotonic() + 20.0

    def answer() -> None:
        far.receive(until=until)
        far.send_bytes(b"here")

    peer = threading.Thread(target=answer)
    peer.start()
    try:
        assert near.receive(until=until) == b"here"
    finally:
        near.close()
        peer.join()
        far.close()


# ---- PeerClient and PeerServer ------------------------------------------------------------------


class Question(Message):
    kind: Literal["question"] = "question"
    number: int


class Answer(Message):
    kind: Literal["answer"] = "answer"
    number: int


class Hello(PeerJoin):
    kind: Literal["hello"] = "hello"


class Welcome(Message):
    kind: Literal["welcome"] = "welcome"


SMALL = PeerProtocol(
    magic=b"small_01",
    join=Hello,
    welcome=Welcome,
    from_receiver=(Question,),
    from_publisher=(Answer,),
)


class SmallServer(PeerServer[Peer, Hello]):
    """Answers even numbers, ends the connection at 13, and is silent at the rest."""

    def __init__(self) -> None:
        listener = listen("test", "127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener, "it", SMALL, token=b"t", identity="i", timeout_s=20.0, max_members=2
        )

    def join(self, channel: Channel, join: Hello) -> None:
        if self.has_room(channel):
            self.admit(Peer(channel, join), Welcome())

    def handle(self, member: Peer, message: Question) -> Message | None:
        if message.number == 13:
            self.lose(member)
        return Answer(number=message.number) if message.number % 2 == 0 else None


@pytest.fixture
def small() -> Iterator[SmallServer]:
    with closing(SmallServer()) as server:
        yield server


def client(server: SmallServer, reader: str = "", *, is_observer: bool = False) -> PeerClient[Any]:
    connector = Connector("the publisher", "127.0.0.1", server.port, SMALL, timeout_s=20.0)
    join = Hello(worker="w", rank=0, pid=1, reader=reader, is_observer=is_observer)
    return PeerClient(connector, b"t", "i", join)


def report(version: int, state: str = "acknowledged") -> UpdateReport:
    return UpdateReport(update_id=f"{version:032x}", weight_version=version, state=state)


def test_a_question_gets_its_answer(small: SmallServer) -> None:
    asking = client(small)
    assert asking.ask(Question(number=2), Answer, within_s=20.0).number == 2
    asking.leave()
    asking.leave()


def test_an_answer_to_another_question_is_passed_over(small: SmallServer) -> None:
    asking = client(small)
    asking.send(Question(number=2))
    asking.send(Question(number=4))
    answer = asking.wait_for(Answer, within_s=20.0, is_answer=lambda it: it.number == 4)
    assert answer.number == 4
    asking.hang_up()


def test_a_publisher_that_does_not_answer_in_time_is_hung_up_on(small: SmallServer) -> None:
    asking = client(small)
    with pytest.raises(TransferTimeout, match="could not answer within"):
        asking.ask(Question(number=1), Answer, within_s=0.05)
    assert asking.is_lost


def test_a_connection_that_ends_is_told_from_a_publisher_that_refuses(small: SmallServer) -> None:
    asking = client(small)
    with pytest.raises(HungUp, match="hung up"):
        asking.ask(Question(number=13), Answer, within_s=20.0)
    asking = client(small)
    small.close()
    with pytest.raises(SegmentError, match="ended the connection: the publisher closed"):
        asking.wait_for(Answer, within_s=20.0)


def test_a_side_too_many_is_refused_by_name_and_an_end_makes_room(small: SmallServer) -> None:
    first, second = client(small), client(small)
    with pytest.raises(WeightBridgeUnavailableError, match="has room for 2 consumers"):
        client(small)
    second.leave()
    client(small).leave()
    first.leave()


def test_a_reader_that_connects_again_is_one_reader(small: SmallServer) -> None:
    before = client(small, "a" * 32)
    before.report(report(1))
    before.hang_up()
    after = client(small, "a" * 32)
    after.take_over(before)
    after.report(report(2))
    until(lambda: len(small.records()[0].updates) == 2, what="both reports")
    (record,) = small.records()
    assert record.presence == "alive"
    assert [one.weight_version for one in record.updates] == [1, 2]
    after.leave()


def test_the_newest_connection_of_a_reader_takes_the_place_of_the_one_before(
    small: SmallServer,
) -> None:
    connections = [client(small, "a" * 32) for _ in range(5)]
    until(lambda: all(one.is_lost for one in connections[:-1]), what="the others are ended")
    assert connections[-1].ask(Question(number=2), Answer, within_s=20.0).number == 2
    for one in connections:
        one.leave()


def test_an_observer_leaves_no_record_until_it_follows(small: SmallServer) -> None:
    looking = client(small, is_observer=True)
    looking.report(report(1))
    looking.ask(Question(number=2), Answer, within_s=20.0)
    assert small.records() == []
    with small.changed:
        looking.follow()
        # Whoever waits for followers has to learn of it.
        assert small.changed.wait(20.0)
    until(small.records, what="a record")
    looking.leave()


def test_a_protocol_with_a_name_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 8 bytes"):
        replace(SMALL, magic=b"small")
