"""A receiver's connection to one publisher: joins its group, fetches versions, reports.

Each connection has two threads: this one reads what the publisher says, and the receiver's takes
part in transfers. The consumer's thread sends, and waits for what the two note here.
"""

import logging
import os
import select
import threading
import time
from collections import OrderedDict
from functools import partial
from typing import Self

from rl_bridge.errors import SegmentError, TransferTimeout
from rl_bridge.transports.broadcast.init_info import STEPS_IN_TIME, BroadcastInitInfo
from rl_bridge.transports.broadcast.messages import (
    PROTOCOL,
    CalledOff,
    FromPublisher,
    Go,
    Join,
    Offer,
    Released,
    StoreValue,
    Want,
    Welcome,
)
from rl_bridge.transports.broadcast.receiver import Receiver
from rl_bridge.transports.wire.arenas import Arrivals
from rl_bridge.transports.wire.channel import (
    Gone,
    Leave,
    Refused,
    Wake,
    error_of,
    keep_newest,
)
from rl_bridge.transports.wire.client import Connector, PeerClient
from rl_bridge.transports.wire.tls import TLS

_LOG = logging.getLogger(__name__)

_KEPT_REFUSALS = 16
_GOODBYE_S = 1.0


class ControlClient(PeerClient[Welcome]):
    """One publisher, as a receiver sees it.

    The thread reads all messages, so nobody else asks or waits for one.
    """

    def __init__(
        self,
        info: BroadcastInitInfo,
        arrivals: Arrivals,
        *,
        worker: str,
        rank: int,
        reader: str,
        is_observer: bool,
        takes_offers: bool,
        timeout_s: float,
        tls: TLS | None,
    ) -> None:
        """Connect, prove that the token is known, and join; an observer leaves no record.

        Without `takes_offers`, no version is taken that nobody asked for with `fetch`.

        Raises:
            SegmentError: the publisher is gone, or refuses the token.
            WeightBridgeUnavailableError: it has no room for this side, or a certificate is refused.
            TransferTimeout: it does not answer in time.

        """
        self.info = info
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._gone: OrderedDict[str, Gone] = OrderedDict()
        self._lost: str | None = None
        self._has_left = False
        self._has_ended = False
        self._before: ControlClient | None = None
        join = Join(
            worker=worker[:512],
            rank=rank,
            group_rank=rank + info.rank_offset,
            pid=self._pid,
            reader=reader,
            is_observer=is_observer,
        )
        connector = Connector(
            "the publisher's broadcast group",
            info.address,
            info.port,
            PROTOCOL,
            timeout_s=timeout_s,
            tls=tls,
            has_tls=info.has_tls,
        )
        token = bytes.fromhex(info.token)
        super().__init__(connector, token, info.identity, join)
        self._wake = Wake()
        self._receiver = Receiver(
            info.backend,
            arrivals,
            send=self.send,
            send_value=self._send_value,
            address=self._channel.socket.getsockname()[0],
            takes_offers=takes_offers,
            timeout_s=timeout_s / STEPS_IN_TIME,
        )
        self._thread = threading.Thread(target=self._run, name="rlb-broadcast-client", daemon=True)
        self._thread.start()

    # ---- calls from the consumer's end ----------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the connection ended, even if this side's thread has not read that yet."""
        if self._lost is not None or self._channel.is_lost:
            return True
        poll = select.poll()
        poll.register(self._channel.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def take_offers(self, *, unasked: bool) -> None:
        """Take every version that is offered from now on, or with False only what is fetched."""
        self._receiver.takes_offers = unasked

    def fetch(
        self, update_id: str, *, generation: int, arena_nbytes: int, is_read: bool
    ) -> Offer | None:
        """Wait for a version that is on its way, or ask for it.

        Without `is_read`, it suffices that the publisher offers it.

        Returns:
            That offer; None where the version arrived.

        Raises:
            StaleUpdate: the publisher released it.
            SegmentError: the publisher is gone, or the version is not what was asked for.
            TransferTimeout: for `timeout_s` nothing of it arrived.

        """
        receiver = self._receiver
        start = last = time.monotonic()
        wanted: int | None = None
        with self._changed:
            self._gone.pop(update_id, None)
        if is_read:
            receiver.ask(update_id)
        while receiver.arrivals.find(update_id) is None:
            offer = None if is_read else receiver.declined(update_id)
            # (If it is another one, the publisher says so.)
            if offer and (offer.generation, offer.arena_nbytes) == (generation, arena_nbytes):
                return offer
            self._raise_problem(update_id)
            progress, ended = receiver.progress_of(update_id), receiver.num_ended(update_id)
            last = max(last, progress or 0.0)
            left = last + self._timeout_s - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"update {update_id}: nothing of it arrived for {self._timeout_s} s "
                    f"({time.monotonic() - start:.1f} s in all). Check that the publisher runs, "
                    "then import again, or raise timeout_s."
                )
            # A version may arrive and be evicted before it is attached: then ask again.
            if progress is None and wanted != ended:
                wanted = ended
                self.send(
                    Want(update_id=update_id, generation=generation, arena_nbytes=arena_nbytes)
                )
            receiver.wait(partial(self._has_news, update_id, progress, ended), left)
        return None

    def _has_news(self, update_id: str, progress: float | None, ended: int) -> bool:
        receiver = self._receiver
        return (
            self._lost is not None
            or update_id in self._gone
            or receiver.progress_of(update_id) != progress
            or receiver.num_ended(update_id) != ended
        )

    def _raise_problem(self, update_id: str) -> None:
        problem = self._receiver.take_problem(update_id)
        if problem is not None:
            raise problem
        with self._changed:
            gone = self._gone.pop(update_id, None)
        if gone is not None:
            raise error_of(gone)
        if self._lost is not None:
            raise SegmentError(
                f"update {update_id} did not arrive: {self._lost}. Publish again, or import again "
                "if the publisher still runs."
            )

    def send_text(self, text: bytes) -> None:
        """Send the text of a message; the thread sends what the kernel does not take at once."""
        super().send_text(text)
        if self._channel.has_outgoing:
            self._wake.poke()

    def take_over(self, other: Self) -> None:
        """Repeat the reports of an earlier connection to the same publisher, and close it."""
        super().take_over(other)
        if not other.close():
            self._before = other  # it may still write to slots that both share

    def close(self) -> bool:
        """Leave the group and end both threads; returns whether nothing can arrive any longer.

        Idempotent; does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return self._has_ended
        if not self._has_left:
            self.leave()
            self._has_left = True
        self._has_ended = self._receiver.close(timeout_s=self._timeout_s)
        return self._has_ended and (self._before is None or self._before.close())

    def leave(self) -> None:
        """Say goodbye, hang up, and end the thread that reads; once only."""
        self.send(Leave())
        # The publisher hangs up once it has noted that this side is gone.
        self._await_thread(_GOODBYE_S)
        self._lose("this side closed")
        self._wake.poke()
        self._await_thread(self._timeout_s)
        self._channel.close()
        self._wake.close()

    def _await_thread(self, timeout_s: float) -> None:
        # Garbage collection may close a bridge in any thread, also in this one.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # ---- the thread -----------------------------------------------------------------------------

    def _send_value(self, group: int, key: str, value: bytes) -> None:
        self.send(StoreValue(group=group, key=key, value=value.hex()))

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = reason
        self._channel.is_lost = True
        self._receiver.give_up(reason)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake.fd, select.POLLIN)
        channel = self._channel
        while True:
            # Messages may have come together with the answer to `Join`: look before waiting.
            while self._lost is None and (text := channel.take()) is not None:
                self._handle(self._parse(text))
            if channel.is_lost:
                self._lose("the publisher hung up: its bridge was closed, or it died")
            if self._lost is not None:
                break
            wants = select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0)
            poll.register(channel.socket, wants)
            poll.poll()
            self._wake.clear()
            channel.flush()
            channel.fill()
        channel.close()

    def _handle(self, message: FromPublisher | None) -> None:
        match message:
            case None:
                self._lose("the publisher sent a text that is no message")
            case Offer() | Go() | CalledOff():
                self._receiver.put(message)
            case StoreValue(group=group, key=key, value=value):
                self._receiver.learn(group, key, bytes.fromhex(value))
            case Gone(update_id=update_id):
                with self._changed:
                    self._gone[update_id] = message
                    keep_newest(self._gone, _KEPT_REFUSALS)
                self._receiver.notify()
            case Released(update_id=update_id):
                self._receiver.forget(update_id)
            case Refused(reason=reason):
                self._lose(f"the publisher ended the connection: {reason}")
            case _:
                pass
