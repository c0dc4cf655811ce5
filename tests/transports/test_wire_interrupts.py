"""An interrupt before any line of what transports over sockets share costs no slot and no byte."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from rl_bridge.errors import SegmentError
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.broadcast.publisher import _SlotMaker
from rl_bridge.transports.wire.acceptor import Acceptor, listen
from rl_bridge.transports.wire.arenas import Arrival, Arrivals, CPUArenas
from rl_bridge.transports.wire.channel import Channel
from rl_bridge.transports.wire.connector import Connector
from tests.helpers import tracing
from tests.interrupts import InterruptBefore

NBYTES = 4096


@contextmanager
def connected() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, socket.socketpair())
    with closing(here), closing(there):
        yield here, there


def heard(channel: Channel) -> list[bytes]:
    channel.fill()
    found = []
    while (text := channel.take()) is not None:
        found.append(text)
    return found


@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_connection_that_an_interrupt_left_whole_goes_on_and_any_other_one_ends(
    what: str,
) -> None:
    """Never is it one that looks alive, and takes or gives no byte any more."""
    number, struck, num_alive = 0, True, 0
    while struck:
        with connected() as (here, there):
            tracer = InterruptBefore(number)
            if what == "receive":
                there.send_bytes(b"first")
            with suppress(KeyboardInterrupt), tracing(tracer):
                if what == "send":
                    here.send_bytes(b"first")
                else:
                    here.fill()
            struck = tracer.struck
            if not here.is_lost:
                num_alive += 1
                sender, receiver = (here, there) if what == "send" else (there, here)
                sender.send_bytes(b"second")
                # Before the first line of all nothing was sent yet.
                assert heard(receiver) in ([b"first", b"second"], [b"second"]), number
                assert not sender.has_outgoing
        number += 1
    assert number > 5
    assert 0 < num_alive < number, "some are cut off, and some are not"


class Cut:
    """A socket whose every call is cut off once it is done."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner

    def send(self, data: bytes, flags: int) -> int:
        self.inner.send(data[: len(data) // 2], flags)
        raise KeyboardInterrupt

    def recv(self, nbytes: int) -> bytes:
        self.inner.recv(nbytes)
        raise KeyboardInterrupt

    def settimeout(self, timeout: float) -> None:
        self.inner.settimeout(timeout)

    def setblocking(self, is_blocking: bool) -> None:
        self.inner.setblocking(is_blocking)


@pytest.mark.parametrize("what", ["send", "receive", "greet"])
def test_who_waits_on_a_connection_that_was_cut_off_is_told_so_at_once(what: str) -> None:
    with connected() as (here, there):
        there.send_bytes(b"lost")
        whole, here.socket = here.socket, Cut(here.socket)  # type: ignore[assignment]  # it stands in
        calls: dict[str, Callable[[], object]] = {
            "send": lambda: here.send_bytes(b"question"),
            "receive": here.fill,
            "greet": lambda: here.receive_raw(4, until=time.monotonic() + 3600),
        }
        with pytest.raises(KeyboardInterrupt):
            calls[what]()
        here.socket = whole
        there.send_bytes(b"behind a gap")
        here.fill()
        assert here.take() is None
        caller = Connector("the publisher", "127.0.0.1", 1, magic=b"", timeout_s=3600.0)
        with pytest.raises(SegmentError, match="hung up"):
            caller.wait_for_message(here)


def test_who_is_lost_at_the_door_is_turned_away_at_once() -> None:
    """Else the acceptor's owner polls it in a busy loop until the greeting's time is over."""
    listener = listen("test", "127.0.0.1", 0)
    with ExitStack() as stack:
        acceptor: Acceptor[bytes] = Acceptor(
            listener,
            magic=b"12345678",
            token=b"t",
            identity="i",
            parse=bytes,
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


def arrive(arrivals: Arrivals, update_id: str, held: list[Slot]) -> None:
    """One version arrives; who is cut off gives back what it holds."""
    arrivals.reserve(NBYTES, held.append)
    (slot,) = held
    version = Arrival(update_id, slot.generation, NBYTES, "", slot, None)
    arrivals.commit(version)
    held.clear()


@pytest.mark.parametrize("what", ["arrive", "arrive again", "drop", "abandon"])
def test_an_interrupt_before_any_line_of_an_arrival_loses_no_slot(what: str) -> None:
    number, struck = 0, True
    arrivals = Arrivals(CPUArenas(), "rlb-interrupts")
    with closing(arrivals):
        while struck:
            update_id, held = f"{number:032x}", list[Slot]()
            if what == "abandon":
                arrivals.reserve(NBYTES, held.append)
            elif what != "arrive":
                arrive(arrivals, update_id, [])
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                match what:
                    case "drop":
                        arrivals.drop(update_id)
                    case "abandon":
                        arrivals.abandon(held[0])
                    case _:
                        arrive(arrivals, update_id, held)
            struck = tracer.struck
            for slot in held:
                arrivals.abandon(slot)
            here = arrivals.find(update_id)
            assert here is None or here.slot.update_id == update_id, number
            arrivals.drop(update_id)
            assert [slot.update_id for slot in arrivals._ring._slots] == [None] * len(
                arrivals._ring
            ), f"before line {number}"
            number += 1
        assert number > 3
        assert len(arrivals._ring) <= 3


def test_an_interrupt_before_any_line_of_making_a_slot_keeps_nobody_from_making_the_next() -> None:
    make, number, struck = _SlotMaker(CPUArenas(), "rlb-interrupts"), 0, True
    while struck:
        tracer = InterruptBefore(number)
        with suppress(KeyboardInterrupt), tracing(tracer):
            make(NBYTES).close()
        struck = tracer.struck
        make(NBYTES).close()
        number += 1
    assert number > 10
