"""The trainer's end: seals a version in a registered slot, and lets readers come for it."""

import socket
import time
import weakref
from collections.abc import Mapping

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.control import Record
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import Place
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.base import Carried, PublisherEnd
from rl_bridge.transports.nixl.agent import Counters
from rl_bridge.transports.nixl.messages import Entry, NIXLEndpoint, NIXLHandle
from rl_bridge.transports.nixl.server import Server
from rl_bridge.transports.nixl.serving_process import Host
from rl_bridge.transports.nixl.shelf import Shelf

__all__ = ["NIXLPublisher"]


class NIXLPublisher(PublisherEnd):
    """See `rl_bridge.transports.base.PublisherEnd`."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: NIXLEndpoint,
        host: Host,
        shelf: Shelf,
        *,
        place: Place,
        token: bytes,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float,
    ) -> None:
        """Serve readers from now on."""
        self.endpoint = endpoint
        self.place = place
        self._host = host
        self._num_threads = num_threads
        self._is_closed = False
        self._shelf = shelf
        self._server = Server(
            listener,
            endpoint,
            self._shelf,
            host,
            token=token,
            max_members=max_consumers,
            timeout_s=timeout_s,
        )
        # A bridge that is dropped instead of closed must not go on serving.
        self._finalizer = weakref.finalize(self, _end, self._server, self._shelf, host)

    @property
    def counters(self) -> Counters:
        """What was made so far."""
        return self._host.made

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""
        return self._host.num_registered

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Hold a version for readers: sealed in a slot, or where it lies."""
        start = time.perf_counter()
        self._server.catch_up()  # else a lease whose end has arrived would cost another slot
        taken = self._shelf.take(
            plan, tensors, update_id, lock=self._server.changed, num_threads=self._num_threads
        )
        ready = time.perf_counter()
        handle = NIXLHandle(
            endpoint=self.endpoint, generation=taken.generation, in_place=self._shelf.is_in_place
        )
        return Carried(
            digests=taken.digests,
            handle=handle.model_dump(),
            timings_ms={
                "slot": (taken.staged - start) * 1e3,
                "stage_digest": (ready - taken.staged) * 1e3,
            },
        )

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the stamp."""
        with self._server.changed:
            self._shelf.seal_header(update_id, digest)

    def snapshot(self, update_id: str) -> Slot:
        """The slot of a published version.

        Raises:
            SegmentError: it was released.

        """
        slot = self._shelf.slot_of(update_id)
        if slot is None:
            msg = f"update {update_id} is gone: it was released. Publish again."
            raise SegmentError(msg)
        return slot

    def release(self, update_id: str) -> None:
        """Let its slot be written again, once nobody reads it."""
        with self._server.changed:
            self._shelf.release(update_id)

    def records(self) -> list[Record]:
        """What readers said, as far as it has arrived."""
        return [] if self._is_closed else self._server.records()

    def catalog(self) -> tuple[Entry, ...]:
        """What is held, in which slots, and who reads it."""
        with self._server.changed:
            return () if self._is_closed else self._shelf.entries()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 0 if self._is_closed else self._shelf.nbytes

    def close(self) -> None:
        """Tell the readers, and give everything back. Idempotent."""
        self._is_closed = True
        _end(self._server, self._shelf, self._host)
        self._finalizer.detach()  # behind it: what an interrupt cuts off, the next call ends


def _end(server: Server, shelf: Shelf, host: Host) -> None:
    server.close()
    with server.changed:
        shelf.close()
    host.close()
