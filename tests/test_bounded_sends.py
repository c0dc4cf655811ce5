"""A peer that reads nothing, because it is stopped for instance, makes no sender wait for ever."""

import multiprocessing
import signal
import socket
import threading

import pytest

from rl_bridge.cli import bench as measure
from rl_bridge.demo.frames import Channel, Frame, bound_sends
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.transports.wire import channel as wire
from rl_bridge.transports.wire.connector import Connector
from tests.helpers import stop

# More than a pair of sockets buffers.
LONG = "x" * (4 << 20)


def test_a_frame_that_nobody_reads_is_given_up() -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        channel = Channel(here, peer="rollout", send_timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match=r"the rollout took no message within 0.05 s"):
            channel.send(Frame({"text": LONG}))


def test_a_frame_that_is_read_slowly_arrives_whole() -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        Channel(here, peer="rollout").send(Frame({"text": "short"}))
        assert Channel(there, peer="trainer").receive(timeout_s=30).values == {"text": "short"}


def test_a_consumer_of_the_bench_that_is_stopped_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "bound_sends", lambda pipe, _: bound_sends(pipe, 0.05))
    monkeypatch.setattr(measure, "_STOP_TIMEOUT_S", 0.05)
    with measure._consumer() as ask:
        (child,) = multiprocessing.active_children()
        stop(child.pid or 0)
        with pytest.raises(DeadlineExceeded, match=rf"pid {child.pid}\) took no message"):
            ask({"do": "update", "manifest": LONG})
    child.join(30)  # it was killed; a busy machine takes longer to end it than was waited for
    assert child.exitcode == -signal.SIGKILL


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
