"""What both ends of a transport over sockets have in common: options, sealing, reports.

`Options` holds what every such transport may be told. `PeerPublisher` seals versions and leaves
serving them to a `PeerServer`; `PeerConsumer` names itself to publishers and reports to them.
"""

import logging
import os
import secrets
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import Record, UpdateReport
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import checked_count, checked_threads
from rl_bridge.memory.places import Place
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.transports.base import Carried, ConsumerEnd, PublisherEnd, checked_seconds
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import Handle, checked_address, checked_port
from rl_bridge.transports.wire.client import PeerClient
from rl_bridge.transports.wire.server import PeerServer
from rl_bridge.transports.wire.tls import load_tls

_LOG = logging.getLogger(__name__)


class Options:
    """What every transport over sockets may be told, checked; each documents them itself."""

    def __init__(
        self,
        *,
        address: str,
        port: int,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float,
        tls: object,
    ) -> None:
        """Check them, and read the files of `tls`.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of its range.
            WeightBridgeUnavailableError: one of the files of `tls` cannot be used.

        """
        self.address = checked_address(address)
        self.port = checked_port(port)
        self.max_slots = checked_count("max_slots", max_slots)
        self.max_consumers = checked_count("max_consumers", max_consumers)
        self.num_threads = checked_threads(num_threads)
        self.timeout_s = checked_seconds("timeout_s", timeout_s)
        self.tls = load_tls(tls)


# ---- the publisher's end ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sealed:
    """A version that was sealed: its slot, which write of it, its digests, when copying began."""

    slot: Slot
    generation: int
    digests: bytes
    staged: float


def sealed_in(
    ring: SlotRing,
    plan: PackPlan,
    tensors: Mapping[str, torch.Tensor],
    update_id: str,
    *,
    lock: AbstractContextManager[object],
    num_threads: int | None,
) -> Sealed:
    """Copy a version into a slot of a ring; takes `lock` only for the short steps.

    Raises:
        WeightBridgeError: there is no slot, or it cannot be written; nothing was taken.

    """
    table = plan.table
    with lock:
        slot = ring.acquire(table.arena_nbytes)
    try:
        if slot.layout_digest != table.digest:
            plan.clear_padding(slot.address)
            slot.layout_digest = table.digest
        staged = time.perf_counter()
        digests = plan.pack(tensors, slot.address, num_threads=num_threads)
        with lock:
            ring.publish(slot, update_id, table.arena_nbytes)
            return Sealed(slot, slot.generation, digests, staged)
    except BaseException:
        with lock:
            ring.abandon(slot)
        raise


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


class PeerPublisher(PublisherEnd):
    """The trainer's end: seals a version, and leaves the rest to threads that do not know of it.

    So it ends with its last reference, and a bridge that is dropped instead of closed does not go
    on serving.
    """

    def __init__(
        self,
        server: PeerServer[Any, Any],
        memory: _Sized,
        place: Place,
        end: Callable[..., object],
        *things: object,
    ) -> None:
        """Own a server, and memory in a `place`; at the end `end` is called with the `things`."""
        self.place = place
        self._server = server
        self._memory = memory
        self._is_closed = False
        self._finalizer = weakref.finalize(self, end, *things)

    @abstractmethod
    def _seal(
        self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str
    ) -> tuple[Sealed, Handle]:
        """Seal a version; also returns its handle."""

    @abstractmethod
    def _slot_of(self, update_id: str) -> Slot | None:
        """Find the slot of a version that is not released."""

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Seal a version; receivers hear of it when its header is sealed, too."""
        start = time.perf_counter()
        sealed, handle = self._seal(plan, tensors, update_id)
        return Carried(
            digests=sealed.digests,
            handle=handle.model_dump(),
            timings_ms={
                "slot": (sealed.staged - start) * 1e3,
                "stage_digest": (time.perf_counter() - sealed.staged) * 1e3,
            },
        )

    def snapshot(self, update_id: str) -> Slot:
        """Find the slot of a published version.

        Raises:
            SegmentError: it was released.

        """
        slot = self._slot_of(update_id)
        if slot is None:
            raise SegmentError(f"update {update_id} is gone: it was released. Publish again.")
        return slot

    def records(self) -> list[Record]:
        """Everything that receivers reported, as far as it has arrived."""
        return [] if self._is_closed else self._server.records()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return 0 if self._is_closed else self._memory.nbytes

    def close(self) -> None:
        """Hang up on the receivers, and release everything. Idempotent."""
        self._is_closed = True
        self._finalizer()


# ---- the engine's end ---------------------------------------------------------------------------


class PeerConsumer(ConsumerEnd):
    """The engine's end: names itself to every publisher that it connects to."""

    def __init__(
        self,
        worker: str,
        rank: int,
        *,
        backend: str,
        make_arenas: Callable[[], Arenas],
        options: Options,
    ) -> None:
        """Open nothing yet."""
        self._worker = worker[:512]
        self._rank = rank
        self._reader = secrets.token_hex(16)
        self._backend = backend
        self._make_arenas = make_arenas
        self._options = options

    @property
    def place(self) -> Place:
        """See `ConsumerEnd`."""
        return self._make_arenas().place

    @abstractmethod
    def _client_of(self, publisher_id: str) -> PeerClient[Any] | None:
        """Find the connection to a publisher."""

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Send a report to the publisher, if this side is connected to it."""
        client = self._client_of(manifest.publisher_id)
        if client is None:
            _LOG.info("the publisher will not hear of %s: not connected to it", report.update_id)
        else:
            client.report(report)

    def _name(self, *, is_observer: bool) -> dict[str, Any]:
        """The fields of `PeerJoin` that name this side."""
        return {
            "worker": self._worker,
            "rank": self._rank,
            "pid": os.getpid(),
            "reader": self._reader,
            "is_observer": is_observer,
        }
