"""The trainer's end: seals a version in a slot of its own, and leaves the rest to the sender.

The control server's thread and the sender's thread know nothing of the publisher's end. So it ends
with its last reference, and a bridge that is dropped instead of closed does not go on serving.
"""

import itertools
import secrets
import socket
import time
import weakref
from collections.abc import Mapping
from functools import partial

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.control import Record
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.transports.base import Carried, PublisherEnd
from rl_bridge.transports.broadcast.init_info import (
    STEPS_IN_TIME,
    Backend,
    BroadcastHandle,
    BroadcastInitInfo,
)
from rl_bridge.transports.broadcast.sender import Offered, Sender
from rl_bridge.transports.broadcast.server import ControlServer
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.tls import TLS


def group_info(
    listener: socket.socket,
    publisher_id: str,
    *,
    group_name: str | None,
    backend: Backend,
    world_size: int,
    has_tls: bool,
) -> BroadcastInitInfo:
    """Describe a new group to its receivers."""
    address, port = listener.getsockname()[:2]
    return BroadcastInitInfo(
        address=address,
        port=port,
        token=secrets.token_hex(32),
        publisher_id=publisher_id,
        group_name=f"rl_bridge-{publisher_id[:12]}" if group_name is None else group_name,
        backend=backend,
        world_size=world_size,
        has_tls=has_tls,
    )


class BroadcastPublisher(PublisherEnd):
    """See `rl_bridge.transports.base.PublisherEnd`."""

    def __init__(
        self,
        listener: socket.socket,
        info: BroadcastInitInfo,
        arenas: Arenas,
        *,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float,
        tls: TLS | None,
    ) -> None:
        """Serve receivers from now on."""
        self.info = info
        self.place = arenas.place
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._is_closed = False

        numbers = itertools.count(1)

        def make_slot(arena_nbytes: int) -> Slot:
            return arenas.make_slot(f"rlb-{info.publisher_id[:12]}-{next(numbers)}", arena_nbytes)

        def receivers_of(update_id: str) -> list[str]:
            return sender.receivers_of(update_id)

        self._ring = SlotRing(
            make_slot,
            limit=max_slots,
            name_holders=receivers_of,
        )
        self._server = ControlServer(
            listener, info, max_members=max_consumers, timeout_s=timeout_s, tls=tls
        )
        self._sender = sender = Sender(
            self._server,
            arenas,
            timeout_s=timeout_s / STEPS_IN_TIME,
            free=self._ring.release,
            at_end=partial(_close_slots, self._server, self._ring, arenas),
        )
        self._finalizer = weakref.finalize(self, _end, self._server, sender, timeout_s)

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Seal a version; it is sent when its header is sealed, too."""
        table = plan.table
        start = time.perf_counter()
        with self._server.changed:
            slot = self._ring.acquire(table.arena_nbytes)
        try:
            if slot.layout_digest != table.digest:
                plan.clear_padding(slot.address)
                slot.layout_digest = table.digest
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=self._num_threads)
        except BaseException:
            with self._server.changed:
                self._ring.abandon(slot)
            raise
        with self._server.changed:
            self._ring.publish(slot, update_id, table.arena_nbytes)
        handle = BroadcastHandle(group=self.info, generation=slot.generation).model_dump()
        ready = time.perf_counter()
        self._sender.prepare(
            Offered(update_id, slot, slot.generation, table.arena_nbytes, table.digest)
        )
        return Carried(
            digests=digests,
            handle=handle,
            timings_ms={"slot": (staged - start) * 1e3, "stage_digest": (ready - staged) * 1e3},
        )

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Leave the version to the sender, which sends the header's digest ahead of the bytes."""
        self._sender.announce(update_id, digest.hex())

    def snapshot(self, update_id: str) -> Slot:
        """Find the slot of a published version.

        Raises:
            SegmentError: it was released.

        """
        offered = self._sender.find(update_id)
        if offered is None:
            msg = f"update {update_id} is gone: it was released. Publish again."
            raise SegmentError(msg)
        return offered.slot

    def release(self, update_id: str) -> None:
        """Let its slot be written again, once no transfer reads it."""
        self._sender.release(update_id)

    def records(self) -> list[Record]:
        """Everything that receivers reported, as far as it has arrived."""
        return [] if self._is_closed else self._server.records()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 0 if self._is_closed else self._ring.nbytes

    def close(self) -> None:
        """Hang up on the receivers, and end both threads."""
        self._is_closed = True
        self._finalizer()


def _close_slots(server: ControlServer, ring: SlotRing, arenas: Arenas) -> None:
    with server.changed:
        ring.close()
    arenas.close()


def _end(server: ControlServer, sender: Sender, timeout_s: float) -> None:
    # Hang up first: receivers in the middle of a transfer then end their side of it.
    sender.stop()
    server.close()
    sender.close(timeout_s=timeout_s)
