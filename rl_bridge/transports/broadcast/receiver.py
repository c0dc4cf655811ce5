"""A receiver's two threads for one publisher: one reads what it says, one takes part in transfers.

A transfer begins with the publisher's `Offer`. The receiver's thread reserves a slot and answers
`Ready`; `Go` then names the group that the bytes come over. A failed transfer is reported to the
publisher, which decides what to do. Its slot is not used again before every slice that was begun
has ended. The consumer's thread sends, and waits for what the two note here.
"""

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from rl_bridge.errors import SegmentError, TransferTimeout, WeightBridgeError
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.broadcast.group import BrokenGroups, Group, GroupStore, said, send_slices
from rl_bridge.transports.broadcast.messages import (
    PROTOCOL,
    STEPS_IN_TIME,
    Arrived,
    Backend,
    BroadcastInitInfo,
    CalledOff,
    Declined,
    Failed,
    FromPublisher,
    Go,
    Join,
    Offer,
    Ready,
    Released,
    StoreValue,
    Want,
    Welcome,
)
from rl_bridge.transports.wire.arenas import Arrival, Arrivals
from rl_bridge.transports.wire.channel import (
    Gone,
    Leave,
    Message,
    Refused,
    Wake,
    error_of,
    keep_newest,
)
from rl_bridge.transports.wire.client import Connector, PeerClient
from rl_bridge.transports.wire.ends import Options

_LOG = logging.getLogger(__name__)
_DRAIN_S = 1.0
_KEPT_UPDATES = 16
# Each of N members has one value, of 160 + 8 N bytes: this is enough for more than 2,000 members.
_MAX_VALUES_NBYTES = 64 << 20
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """What a receiver knows of one update; each news makes another one.

    Attributes:
        progress: when a part of it arrived last; None if it is not on its way.
        num_ended: how many of its transfers have ended here.
        declined: its offer, if it was declined because nobody had asked for it.
        problem: why this side declined it otherwise.
        gone: the publisher's answer, if it cannot be had.

    """

    progress: float | None = None
    num_ended: int = 0
    declined: Offer | None = None
    problem: WeightBridgeError | None = None
    gone: Gone | None = None


class Receiver:
    """Receives one publisher's versions, in a thread of its own."""

    def __init__(
        self,
        backend: Backend,
        arrivals: Arrivals,
        *,
        send: Callable[[Message], None],
        send_value: Callable[[int, str, bytes], None],
        address: str,
        takes_offers: bool,
        timeout_s: float,
    ) -> None:
        """Start the thread, which waits `timeout_s` at most for members and for a slice.

        Without `takes_offers`, it declines a version unless somebody calls `ask`.
        `send` sends messages to the publisher, and `send_value` values of a group's rendezvous.
        `address` is the one of the interface that leads to the publisher.
        """
        self.arrivals = arrivals
        self.takes_offers = takes_offers
        self._asked = ""
        self._backend: Backend = backend
        self._send = send
        self._send_value = send_value
        self._address = address
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._messages: queue.SimpleQueue[Offer | Go | CalledOff | None] = queue.SimpleQueue()
        self._known: dict[str, Known] = {}
        self._reserved: tuple[Offer, Slot] | None = None
        self._group: tuple[int, Group] | None = None
        self._store: tuple[int, GroupStore] | None = None
        self._pending_values = _PendingValues()
        self._given_up: str | None = None
        self._called_off = (0, "")
        self._broken_groups = BrokenGroups()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="rlb-broadcast-receiver", daemon=True
        )
        self._thread.start()

    # ---- calls from the client's thread and the consumer ----------------------------------------

    def put(self, message: Offer | Go | CalledOff) -> None:
        """Hand the next step of a transfer to the thread."""
        with self._changed:
            if isinstance(message, Offer):
                self.note(message.update_id, progress=time.monotonic())
            if isinstance(message, CalledOff):
                # At once: the thread may be waiting for members that are gone.
                self._called_off = message.transfer, message.reason
                if self._store is not None:
                    self._store[1].fail(message.reason)
        self._messages.put(message)

    def learn(self, group: int, key: str, value: bytes) -> None:
        """Note another member's value; values may come before the `Go` of their group."""
        with self._changed:
            if self._store is not None and self._store[0] == group:
                self._store[1].learn(key, value)
            else:
                self._pending_values.add(group, key, value)

    def known(self, update_id: str) -> Known:
        """What is known of an update by now."""
        with self._changed:
            return self._known.get(update_id, Known())

    def note(self, update_id: str, **news: Any) -> None:
        """Note news of an update, by the names of `Known`, and wake the threads in `wait`."""
        with self._changed:
            self._known[update_id] = replace(self._known.pop(update_id, Known()), **news)
            keep_newest(self._known, _KEPT_UPDATES)
            self._changed.notify_all()

    def ask(self, update_id: str, *, is_read: bool) -> None:
        """Forget why an update did not come before; with `is_read`, take it when it is offered."""
        with self._changed:
            self.note(update_id, problem=None, gone=None)
            if is_read:
                self._asked = update_id
                self.note(update_id, declined=None)

    def forget(self, update_id: str) -> None:
        """Forget a version that nobody imported: its publisher released it."""
        self.note(update_id, declined=None)
        self.arrivals.drop(update_id)

    def wait(self, is_news: Callable[[], bool], timeout_s: float) -> None:
        """Wait until there is news, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(is_news, timeout_s)

    def give_up(self, reason: str) -> None:
        """End everything that waits for the publisher: it is gone, or this side leaves."""
        with self._changed:
            self._given_up = reason
            if self._store is not None:
                self._store[1].fail(reason)
            self._changed.notify_all()
        self._messages.put(None)

    def close(self, *, timeout_s: float) -> bool:
        """End the thread; returns whether nothing writes to memory any longer."""
        self.give_up("this side closed")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._broken_groups.join(_DRAIN_S)

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (message := self._messages.get()) is not None and self._given_up is None:
            try:
                self._take(message)
            except Exception as error:  # noqa: BLE001 - reported to the publisher, which decides
                is_known = isinstance(error, RuntimeError)
                _LOG.warning("a transfer failed: %s", error, exc_info=not is_known)
                self._fail(message.transfer, error)
        self._drop_reserved()
        self._leave()
        self._stop_progress()

    def _take(self, message: Offer | Go | CalledOff) -> None:
        match message:
            case Offer():
                self._answer(message)
            case Go(transfer=transfer):
                reserved, self._reserved = self._reserved, None
                if reserved is None or reserved[0].transfer != transfer:
                    if reserved is not None:
                        self.arrivals.abandon(reserved[1])
                    self._leave()
                    self._send(Failed(transfer=transfer, reason="it was not offered"))
                    return
                self._receive(message, *reserved)
            case CalledOff():
                self._drop_reserved()
                self._leave()

    def _answer(self, offer: Offer) -> None:
        self._drop_reserved(but=offer.update_id)
        known = self.arrivals.find(offer.update_id)
        if known is not None and known.generation == offer.generation:
            self._send(Declined(transfer=offer.transfer, reason="it is here already"))
            self._end(offer.update_id)
            return
        with self._changed:
            is_wanted = self.takes_offers or self._asked == offer.update_id
            if not is_wanted:
                self.note(offer.update_id, declined=offer)
        if not is_wanted:
            self._send(Declined(transfer=offer.transfer, reason="nobody here reads its bytes"))
            self._end(offer.update_id)
            return
        try:
            slot = self.arrivals.reserve(offer.arena_nbytes)
        except WeightBridgeError as error:
            self.note(offer.update_id, problem=error)
            self._send(Declined(transfer=offer.transfer, reason=str(error)[:2000]))
            self._end(offer.update_id)
            return
        self._reserved = offer, slot
        self._send(Ready(transfer=offer.transfer))

    def _receive(self, go: Go, offer: Offer, slot: Slot) -> None:
        try:
            group = self._join(go)
            group.why_aborted = partial(self._why_aborted, go.transfer)
            arena = self.arrivals.tensor(slot, offer.arena_nbytes)
            digest = self.arrivals.digest_of(
                offer.layout_digest, go.slice_nbytes, slot, offer.arena_nbytes
            )

            def advance(watermark: int) -> None:
                self.note(offer.update_id, progress=time.monotonic())
                if digest is not None:
                    digest.advance(watermark)

            send_slices(group, arena, go.slice_nbytes, meanwhile=advance)
            if digest is not None:
                digest.advance(offer.arena_nbytes)
        except BaseException:
            # Slices that were begun may still write to the slot: abandon it when they have ended.
            self._leave(partial(self.arrivals.abandon, slot))
            raise
        # Before `commit`: once the version can be attached, the publisher knows that it arrived.
        self._send(Arrived(transfer=go.transfer))
        self.arrivals.commit(
            Arrival(
                update_id=offer.update_id,
                generation=offer.generation,
                arena_nbytes=offer.arena_nbytes,
                layout_digest=offer.layout_digest,
                header=bytes.fromhex(offer.header),
                slot=slot,
                digests=None if digest is None else digest.digests(),
            )
        )
        self._end(offer.update_id)

    def _join(self, go: Go) -> Group:
        known = self._group
        if known is not None and known[0] == go.group:
            return known[1]
        self._leave()

        def send(key: str, value: bytes) -> None:
            self._send_value(go.group, key, value)

        store = GroupStore(send, timeout_s=self._timeout_s)
        with self._changed:
            self._store = go.group, store
            for key, value in self._pending_values.take(go.group).items():
                store.learn(key, value)
            reason = self._why_aborted(go.transfer)
            if reason is not None:
                store.fail(reason)
        made = Group(
            self._backend,
            store,
            rank=go.rank,
            size=go.size,
            address=self._address,
            timeout_s=self._timeout_s,
            why_aborted=partial(self._why_aborted, go.transfer),
        )
        self._group = go.group, made
        return made

    def _why_aborted(self, transfer: int) -> str | None:
        """Why a transfer cannot succeed any longer; None while it can."""
        called_off, reason = self._called_off
        return reason if called_off >= transfer else self._given_up

    def _leave(self, then: Callable[[], object] = lambda: None) -> None:
        """Leave the group; calls `then` when nothing that it began is still running."""
        known, self._group = self._group, None
        with self._changed:
            self._store = None
        if known is None:
            then()
        else:
            self._broken_groups.end(known[1], then)

    def _drop_reserved(self, but: str = "") -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self.arrivals.abandon(reserved[1])
            if reserved[0].update_id != but:
                self._end(reserved[0].update_id)

    def _fail(self, transfer: int, error: Exception) -> None:
        self._leave()
        self._stop_progress()
        self._send(Failed(transfer=transfer, reason=said(error)))

    def _end(self, update_id: str) -> None:
        with self._changed:
            self.note(update_id, progress=None, num_ended=self.known(update_id).num_ended + 1)

    def _stop_progress(self) -> None:
        with self._changed:
            for update_id in list(self._known):
                self.note(update_id, progress=None)


class _PendingValues:
    """Values of a rendezvous whose `Go` has not come yet.

    Groups are numbered upwards: the values of the newest group are kept, up to a bound. Beyond it
    they are dropped, and the rendezvous ends at its deadline.
    """

    def __init__(self) -> None:
        self._group = 0
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def add(self, group: int, key: str, value: bytes) -> None:
        """Keep a value, unless its group is older than the newest."""
        if group > self._group:
            self._group, self._values, self._nbytes = group, {}, 0
        before = self._values.get(key, b"")
        nbytes = self._nbytes + len(key) + len(value) - len(before)
        if group == self._group and nbytes <= _MAX_VALUES_NBYTES:
            self._values[key], self._nbytes = value, nbytes

    def take(self, group: int) -> dict[str, bytes]:
        """Return the values of a group that begins now, and forget them."""
        found = self._values if group == self._group else {}
        self._values, self._nbytes = {}, 0
        return found


# ---- the connection ------------------------------------------------------------------------------


class ControlClient(PeerClient[Welcome]):
    """One publisher, as a receiver sees it.

    The thread reads all messages, so nobody else asks or waits for one.
    """

    def __init__(
        self,
        info: BroadcastInitInfo,
        arrivals: Arrivals,
        join: Join,
        options: Options,
        *,
        takes_offers: bool,
    ) -> None:
        """Connect, prove that the token is known, and join.

        Without `takes_offers`, no version is taken that nobody asked for with `fetch`.
        """
        self.info = info
        self._timeout_s = timeout_s = options.timeout_s
        self._pid = os.getpid()
        self._lost: str | None = None
        self._has_left = False
        self._has_ended = False
        self._before: ControlClient | None = None
        connector = Connector(
            "the publisher's broadcast group",
            info.address,
            info.port,
            PROTOCOL,
            timeout_s=timeout_s,
            tls=options.tls,
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
        if self._lost is not None or self._channel.is_lost or os.getpid() != self._pid:
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
        receiver.ask(update_id, is_read=is_read)
        while receiver.arrivals.find(update_id) is None:
            known = receiver.known(update_id)
            offer = None if is_read else known.declined
            # (If it is another one, the publisher says so.)
            if offer and (offer.generation, offer.arena_nbytes) == (generation, arena_nbytes):
                return offer
            self._raise_problem(update_id, known)
            last = max(last, known.progress or 0.0)
            left = last + self._timeout_s - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"update {update_id}: nothing of it arrived for {self._timeout_s} s "
                    f"({time.monotonic() - start:.1f} s in all). Check that the publisher runs, "
                    "then import again, or raise timeout_s."
                )
            # A version may arrive and be evicted before it is attached: then ask again.
            if known.progress is None and wanted != known.num_ended:
                wanted = known.num_ended
                self.send(
                    Want(update_id=update_id, generation=generation, arena_nbytes=arena_nbytes)
                )
            receiver.wait(partial(self._has_news, update_id, known), left)
        return None

    def _has_news(self, update_id: str, known: Known) -> bool:
        return self._lost is not None or self._receiver.known(update_id) != known

    def _raise_problem(self, update_id: str, known: Known) -> None:
        if known.problem is not None:
            self._receiver.note(update_id, problem=None)  # it refers to what its frames do
            raise known.problem
        if known.gone is not None:
            raise error_of(known.gone)
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
        self._lost = self._lost or reason
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
                self._receiver.note(update_id, gone=message)
            case Released(update_id=update_id):
                self._receiver.forget(update_id)
            case Refused(reason=reason):
                self._lose(f"the publisher ended the connection: {reason}")
            case _:
                pass
