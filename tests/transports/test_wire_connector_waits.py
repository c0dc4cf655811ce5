"""A client that waits for an answer goes on sending what is left of its question."""

import socket
import threading

from rl_bridge.transports.wire import channel as wire
from rl_bridge.transports.wire.connector import Connector

# More than a pair of sockets buffers.
LONG = "x" * (4 << 20)


def test_a_question_goes_on_leaving_while_its_answer_is_waited_for() -> None:
    here, there = socket.socketpair()
    near = wire.Channel(here, max_message_nbytes=len(LONG))
    far = wire.Channel(there, max_message_nbytes=len(LONG))
    near.send_bytes(LONG.encode())
    assert near.has_outgoing
    caller = Connector("the publisher", "127.0.0.1", 1, magic=b"", timeout_s=5.0)

    def answer() -> None:
        caller.wait_for_message(far)
        far.send_bytes(b"here")

    peer = threading.Thread(target=answer)
    peer.start()
    try:
        assert caller.wait_for_message(near) == b"here"
    finally:
        near.close()
        peer.join()
        far.close()
