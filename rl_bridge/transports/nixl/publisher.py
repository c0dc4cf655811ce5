"""The trainer's end: seals a version in registered memory, where readers fetch it."""

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
from rl_bridge.transports.nixl.agent import Counters, Host
from rl_bridge.transports.nixl.messages import Entry, NIXLEndpoint, NIXLHandle
from rl_bridge.transports.nixl.server import ControlServer
from rl_bridge.transports.nixl.store import VersionStore
from rl_bridge.transports.wire.tls import TLS


class NIXLPublisher(PublisherEnd):
    """See `rl_bridge.transports.base.PublisherEnd`."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: NIXLEndpoint,
        host: Host,
        store: VersionStore,
        *,
        place: Place,
        columns: bool,
        token: bytes,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float,
        tls: TLS | None,
    ) -> None:
        """Serve readers from now on."""
        self.endpoint = endpoint
        self.place = place
        self.columns = columns
        self._host = host
        self._num_threads = num_threads
        self._is_closed = False
        self._store = store
        self._server = ControlServer(
            listener,
            endpoint,
            self._store,
            host,
            token=token,
            max_members=max_consumers,
            timeout_s=timeout_s,
            tls=tls,
        )
        # A bridge that is dropped instead of closed must not go on serving.
        self._finalizer = weakref.finalize(self, _end, self._server, self._store, host)

    @property
    def counters(self) -> Counters:
        """How much was made so far."""
        return self._host.made

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""
        return self._host.num_registered

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Keep a version for readers: sealed in a slot, or in place."""
        start = time.perf_counter()
        self._server.catch_up()  # a lease whose end has arrived must not cost another slot
        try:
            taken = self._store.take(
                plan, tensors, update_id, lock=self._server.changed, num_threads=self._num_threads
            )
        finally:
            self._server.poke()  # answers may have been taken here that its thread waits for
        ready = time.perf_counter()
        handle = NIXLHandle(
            endpoint=self.endpoint, generation=taken.generation, in_place=self._store.is_in_place
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
            self._store.seal_header(update_id, digest)

    def snapshot(self, update_id: str) -> Slot:
        """Find the slot of a published version.

        Raises:
            SegmentError: it was released.

        """
        slot = self._store.slot_of(update_id)
        if slot is None:
            msg = f"update {update_id} is gone: it was released. Publish again."
            raise SegmentError(msg)
        return slot

    def release(self, update_id: str) -> None:
        """Let its slot be written again, once nobody reads it."""
        with self._server.changed:
            self._store.release(update_id)

    def records(self) -> list[Record]:
        """Everything that readers reported, as far as it has arrived."""
        return [] if self._is_closed else self._server.records()

    def catalog(self) -> tuple[Entry, ...]:
        """Describe the versions, their slots and their readers."""
        with self._server.changed:
            return () if self._is_closed else self._store.entries()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 0 if self._is_closed else self._store.nbytes

    def close(self) -> None:
        """Hang up on the readers, and release everything. Idempotent."""
        self._is_closed = True
        self._finalizer()


def _end(server: ControlServer, store: VersionStore, host: Host) -> None:
    server.close()
    with server.changed:
        store.close()
    host.close()
