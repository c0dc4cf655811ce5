"""Connections of transports over sockets: errors name the remedy, and strangers keep nobody out."""

import os
import resource
import select
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.transports.broadcast.messages import PROTOCOL, Join
from rl_bridge.transports.wire.acceptor import Acceptor, listen
from rl_bridge.transports.wire.channel import Channel, Greeting, fresh_nonce
from rl_bridge.transports.wire.client import Connector


def call(address: str = "127.0.0.1") -> None:
    Connector("the publisher", address, 1, PROTOCOL, timeout_s=5.0).connect(b"", "")


def test_a_process_without_a_descriptor_left_gets_an_error_that_says_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the next one that would be given out
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(WeightBridgeUnavailableError, match=r"gets no socket.*ulimit -n"):
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


def test_strangers_push_out_no_peer_that_knows_the_token() -> None:
    listener = listen("test", "127.0.0.1", 0)
    with ExitStack() as stack:
        acceptor: Acceptor[Join] = Acceptor(
            listener,
            PROTOCOL,
            token=b"token",
            identity="identity",
            timeout_s=3600.0,
            max_members=1,
        )
        stack.callback(acceptor.close)
        pause = threading.Condition()
        stack.enter_context(pause)

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
    listener = listen("test", "127.0.0.1", 0)
    with ExitStack() as stack:
        acceptor: Acceptor[Join] = Acceptor(
            listener,
            PROTOCOL,
            token=b"t",
            identity="i",
            timeout_s=3600.0,
            max_members=1,
        )
        stack.callback(acceptor.close)
        stack.enter_context(closing(socket.create_connection(listener.getsockname())))
        pause = threading.Condition()
        with pause:
            acceptor.serve({listener.fileno()}, pause)
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
