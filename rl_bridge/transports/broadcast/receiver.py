"""A receiver's second thread: takes part in transfers, and keeps the versions that arrive.

A transfer begins with the publisher's `Offer`. The thread reserves a slot and answers `Ready`;
`Go` then names the group that the bytes come over. A failed transfer is reported to the publisher,
which decides what to do. Its slot is not used again before every slice that was begun has ended.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from rl_bridge.errors import WeightBridgeError
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.broadcast.group import BrokenGroups, Group, GroupStore, said, send_slices
from rl_bridge.transports.broadcast.init_info import Backend
from rl_bridge.transports.broadcast.messages import (
    Arrived,
    CalledOff,
    Declined,
    Failed,
    Go,
    Offer,
    Ready,
)
from rl_bridge.transports.wire.arenas import Arrival, Arrivals
from rl_bridge.transports.wire.channel import Message, keep_newest

_LOG = logging.getLogger(__name__)
_DRAIN_S = 1.0
_KEPT_PROBLEMS = 4
_KEPT_ENDS = 16
# Each of N members has one value, of 160 + 8 N bytes: this is enough for more than 2,000 members.
_MAX_VALUES_NBYTES = 64 << 20


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
        self._declined: OrderedDict[str, Offer] = OrderedDict()
        self._backend: Backend = backend
        self._send = send
        self._send_value = send_value
        self._address = address
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._messages: queue.SimpleQueue[Offer | Go | CalledOff | None] = queue.SimpleQueue()
        self._progress: dict[str, float] = {}
        self._problems: dict[str, WeightBridgeError] = {}
        self._num_ended: dict[str, int] = {}
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
                self._progress[message.update_id] = time.monotonic()
            if isinstance(message, CalledOff):
                # At once: the thread may be waiting for members that are gone.
                self._called_off = message.transfer, message.reason
                if self._store is not None:
                    self._store[1].fail(message.reason)
        self._messages.put(message)
        self.notify()

    def learn(self, group: int, key: str, value: bytes) -> None:
        """Note another member's value; values may come before the `Go` of their group."""
        with self._changed:
            if self._store is not None and self._store[0] == group:
                self._store[1].learn(key, value)
            else:
                self._pending_values.add(group, key, value)

    def progress_of(self, update_id: str) -> float | None:
        """When a part of an update arrived last; None if it is not on its way."""
        with self._changed:
            return self._progress.get(update_id)

    def num_ended(self, update_id: str) -> int:
        """How many transfers of an update have ended here."""
        with self._changed:
            return self._num_ended.get(update_id, 0)

    def ask(self, update_id: str) -> None:
        """Take this version when it is offered."""
        with self._changed:
            self._asked = update_id
            self._declined.pop(update_id, None)

    def declined(self, update_id: str) -> Offer | None:
        """The offer of a version that was declined, because nobody had asked for it."""
        with self._changed:
            return self._declined.get(update_id)

    def forget(self, update_id: str) -> None:
        """Forget a version that nobody imported: its publisher released it."""
        with self._changed:
            self._declined.pop(update_id, None)
        self.arrivals.drop(update_id)

    def take_problem(self, update_id: str) -> WeightBridgeError | None:
        """Why this side declined an update's transfer; returned once."""
        with self._changed:
            return self._problems.pop(update_id, None)

    def wait(self, is_news: Callable[[], bool], timeout_s: float) -> None:
        """Wait until there is news, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(is_news, timeout_s)

    def notify(self) -> None:
        """Wake the threads in `wait`."""
        with self._changed:
            self._changed.notify_all()

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
        with self._changed:
            self._progress.clear()
            self._changed.notify_all()

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
                self._declined[offer.update_id] = offer
                keep_newest(self._declined, _KEPT_ENDS)
        if not is_wanted:
            self._send(Declined(transfer=offer.transfer, reason="nobody here reads its bytes"))
            self._end(offer.update_id)
            return
        try:
            slot = self.arrivals.reserve(offer.arena_nbytes)
        except WeightBridgeError as error:
            with self._changed:
                self._problems[offer.update_id] = error
                keep_newest(self._problems, _KEPT_PROBLEMS)
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
                with self._changed:
                    self._progress[offer.update_id] = time.monotonic()
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
        with self._changed:
            self._progress.clear()
            self._changed.notify_all()
        self._send(Failed(transfer=transfer, reason=said(error)))

    def _end(self, update_id: str) -> None:
        with self._changed:
            self._progress.pop(update_id, None)
            self._num_ended[update_id] = self._num_ended.get(update_id, 0) + 1
            keep_newest(self._num_ended, _KEPT_ENDS)
            self._changed.notify_all()


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
