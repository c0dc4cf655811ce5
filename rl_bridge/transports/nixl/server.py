"""A publisher's side: the versions that it offers, their readers, and the server that answers them.

`SlotStore` copies each version into a registered slot of a ring. `InPlaceStore` registers the
trainer's own tensors and copies nothing: a stamp in a segment beside them, which `release` empties
at once, and the digests protect the version. The trainer must not write to the tensors before it
released the version. A store is called under the server's lock, except `take`, which takes the lock
itself.

`ControlServer` has one thread. A reader leases the version that it wants to read, which stays
unchanged meanwhile. The lease ends when the reader says so, with its connection, or when it is not
renewed in time. If the network cannot read memory by itself (TCP), the publisher has to make
progress: this thread does, only as long as a reader asks for that.
"""

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rl_bridge.errors import SegmentError, SlotsExhausted
from rl_bridge.memory import vm
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import Place
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.memory.views import Pin, anonymous_pin
from rl_bridge.transports.nixl.agent import AgentError, Counters, Host, Kind, Region
from rl_bridge.transports.nixl.arenas import SlotRegistration, SlotRegistry
from rl_bridge.transports.nixl.messages import (
    MAX_REASON,
    PROTOCOL,
    STALL_PART,
    AskCatalog,
    Catalog,
    Entry,
    FromReader,
    Help,
    Join,
    Lapsed,
    Lease,
    Leased,
    NIXLEndpoint,
    NIXLHandle,
    Renew,
    Unlease,
    Welcome,
)
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import Channel, Gone, Handle, Message, Refused
from rl_bridge.transports.wire.ends import Options, PeerPublisher, Sealed, sealed_in
from rl_bridge.transports.wire.server import Peer, PeerServer

_MAX_NAME = 1024  # a name is long if its characters have to be escaped

_Ranges = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The addresses of a version's ranges, their first bytes in the arena, and their sizes."""
_LOG = logging.getLogger(__name__)

_ROUNDS = 64  # calls into the library between two polls


# ---- the versions -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Published:
    """One version, and its readers."""

    slot: Slot
    generation: int
    arena_nbytes: int
    readers: dict[Hashable, str] = field(default_factory=dict)
    is_released: bool = False


class VersionStore(ABC):
    """Versions that can be leased."""

    is_in_place: ClassVar[bool] = False
    """Whether versions lie in the trainer's own tensors."""

    def __init__(self, host: Host) -> None:
        """Start empty; `host` serves readers."""
        self._host = host
        self._published: dict[str, _Published] = {}

    def lease(self, lease: Lease, reader: Hashable, name: str) -> Leased | Gone:
        """Let a reader read a version, or return the reason against it."""
        known = self._published.get(lease.update_id)
        if known is None or known.is_released:
            reason = "its publisher released it"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=True)
        asked = lease.generation, lease.arena_nbytes
        found = known.generation, known.arena_nbytes
        if asked != found:
            reason = f"asked for (write, bytes) {asked}, but it is {found}"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=False)
        at, (addresses, starts, nbytes) = self._locate(lease.update_id, known)
        for region in at.regions:
            if region.refusal:
                reason = f"its memory cannot be served: {region.refusal}"[:MAX_REASON]
                return Gone(update_id=lease.update_id, reason=reason, is_stale=False, is_short=True)
        known.readers[reader] = name
        host = self._host
        is_moved = lease.epoch != host.epoch
        parts = () if at.number in lease.known and not is_moved else at.regions
        return Leased(
            update_id=lease.update_id,
            slot=at.number,
            metadata=tuple(host.metadata(part).hex() for part in parts),
            stamp=at.stamp,
            addresses=addresses,
            starts=starts,
            nbytes=nbytes,
            memory=at.memory,
            device=at.device,
            epoch=host.epoch,
            moved=host.metadata(None).hex() if is_moved else "",
        )

    @abstractmethod
    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Sealed:
        """Keep a version from now on; takes `lock` only for its short steps.

        Raises:
            WeightBridgeError: nothing was taken.

        """

    @abstractmethod
    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the version's stamp."""

    @abstractmethod
    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find where a version lies, as readers see it."""

    def unlease(self, update_id: str, reader: Hashable) -> None:
        """Note that a reader is done; unknown readers are ignored."""
        known = self._published.get(update_id)
        if known is not None:
            known.readers.pop(reader, None)
            self._free_if_unused(update_id, known)

    def readers_of(self, update_id: str) -> list[str]:
        """Name the readers of a version."""
        known = self._published.get(update_id)
        return [] if known is None else [f"{name} reads it" for name in known.readers.values()]

    def is_released(self, update_id: str) -> bool:
        """Whether a version is kept only because it is still being read."""
        known = self._published.get(update_id)
        return known is not None and known.is_released

    def release(self, update_id: str) -> None:
        """Refuse new readers; the slot is written again once nobody reads the version."""
        known = self._published.get(update_id)
        if known is not None:
            known.is_released = True
            self._free_if_unused(update_id, known)

    def _free_if_unused(self, update_id: str, known: _Published) -> None:
        if known.is_released and not known.readers:
            self._free(update_id)
            del self._published[update_id]

    @abstractmethod
    def _free(self, update_id: str) -> None:
        """Let its memory be written again."""

    def slot_of(self, update_id: str) -> Slot | None:
        """Find the slot of a version."""
        known = self._published.get(update_id)
        return None if known is None else known.slot

    @abstractmethod
    def entries(self) -> tuple[Entry, ...]:
        """Describe the versions, for the catalog."""

    def _entry(self, number: int, slot: Slot, nbytes: int) -> Entry:
        known = self._published.get(slot.update_id or "")
        return Entry(
            slot=number,
            update_id=slot.update_id,
            generation=slot.generation,
            arena_nbytes=slot.arena_nbytes,
            nbytes=nbytes,
            readers=tuple(name[:_MAX_NAME] for name in known.readers.values()) if known else (),
        )

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class SlotStore(VersionStore):
    """Snapshots in a ring of registered slots."""

    def __init__(self, host: Host, arenas: Arenas, label: str, max_slots: int) -> None:
        """Start empty; slots are made when they are needed."""
        super().__init__(host)
        self._arenas = arenas
        self._registry = SlotRegistry(host, arenas.place.device)
        self.ring = SlotRing(
            arenas.slot_maker(label, self._registry.add),
            limit=max_slots,
            name_holders=self.readers_of,
            is_released=self.is_released,
        )

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Sealed:
        """Copy a version into a slot."""
        sealed = sealed_in(self.ring, plan, tensors, update_id, lock=lock, num_threads=num_threads)
        with lock:
            self._published[update_id] = _Published(
                sealed.slot, sealed.generation, plan.table.arena_nbytes
            )
            for region in self._registry[sealed.slot].regions:
                if region.refusal:
                    self._host.try_again(region)
        return sealed

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the slot's stamp."""
        self.ring.seal_header(update_id, digest)

    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find the whole arena, as one range."""
        del update_id
        at, nbytes = self._registry[known.slot], known.arena_nbytes
        return at, (((at.address,), (0,), (nbytes,)) if nbytes else ((), (), ()))

    def _free(self, update_id: str) -> None:
        self.ring.release(update_id)

    def entries(self) -> tuple[Entry, ...]:
        """Describe every slot, with or without a version."""
        return tuple(
            self._entry(at.number, slot, slot.nbytes) for slot, at in self._registry.items()
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.ring.nbytes

    def close(self) -> None:
        """Close the slots."""
        self._published.clear()
        self.ring.close()
        self._arenas.close()


@dataclass(frozen=True, slots=True, eq=False)
class _LiveTensors:
    """The tensors of one plan, which stay where they are for as long as they are registered.

    Attributes:
        plan: the plan.
        tensors: keeps the tensors alive.
        number: the number that readers know them by.
        lists: memory of the store's own for their lists of digests; None if they have none.
        region: all of this memory, registered; None if there is none.
        where: the ranges of the tensors that are not empty, and of the leaf list.

    """

    plan: PackPlan
    tensors: tuple[torch.Tensor, ...]
    number: int
    lists: Pin | None
    region: Region | None
    where: _Ranges


class InPlaceStore(VersionStore):
    """The version that the trainer's own tensors hold, one at a time."""

    is_in_place: ClassVar[bool] = True

    def __init__(self, host: Host, place: Place, label: str) -> None:
        """Start empty."""
        super().__init__(host)
        self._place = place
        self._slot = Slot(OwnedSegment.make(f"{label}-stamp", vm.PAGE))  # no arena, only a stamp
        self._slot.before_close = self._retire
        self._stamp = host.register_segment(self._slot.segment)
        self._numbers = 0
        self._live: _LiveTensors | None = None
        self._tensors_of: dict[str, _LiveTensors] = {}
        """Update -> the tensors that it lies in, while it may be read."""

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Sealed:
        """Digest the tensors where they are."""
        with lock:
            self._require_released()
            slot = self._slot
            slot.generation += 1
            slot.stamp(None, 0)
            generation = slot.generation
        try:
            staged = time.perf_counter()
            digests = plan.digest_in_place(num_threads=num_threads)
            with lock:
                live = self._tensors_of[update_id] = self._registered(plan, tensors)
                if live.lists is not None:
                    plan.write_lists(live.lists.address)
                slot.update_id = update_id
                slot.stamp(update_id, plan.table.arena_nbytes)
                self._published[update_id] = _Published(slot, generation, plan.table.arena_nbytes)
            return Sealed(slot, generation, digests, staged)
        except BaseException:
            with lock:
                self.release(update_id)
                self._free(update_id)
            raise

    def _require_released(self) -> None:
        held = [update_id for update_id, one in self._published.items() if not one.is_released]
        if held:
            readers = "".join(f", {holder}" for holder in self.readers_of(held[0]))
            raise SlotsExhausted(
                f"update {held[0]} lies in these very tensors, and was not released{readers}. "
                "Release it before the weights change (in_place=True), and then publish."
            )

    def _registered(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor]) -> _LiveTensors:
        live = self._live
        if live is not None and live.plan is plan:
            return live
        before, self._live = self._live, None
        self._deregister_unused(before)
        kept = tuple(tensors[name] for name in plan.table.names)
        rows = [
            (tensor.data_ptr(), start, nbytes)
            for tensor, start, nbytes in zip(
                kept, plan.table.offsets, plan.table.nbytes, strict=True
            )
            if nbytes
        ]
        table, lists = plan.table, None
        if table.lists_nbytes:
            lists = anonymous_pin(table.lists_nbytes)
            rows.append((lists.address, table.leaves_offset, table.lists_nbytes))
        columns = tuple(tuple(row[column] for row in rows) for column in range(3))
        region = self._register([(address, nbytes) for address, _, nbytes in rows])
        self._numbers += 1
        where = (columns[0], columns[1], columns[2])
        self._live = _LiveTensors(plan, kept, self._numbers, lists, region, where)
        return self._live

    def _register(self, ranges: list[tuple[int, int]]) -> Region | None:
        if not ranges:
            return None
        try:
            return self._host.register(ranges, self._kind, self._device)
        except AgentError as error:
            raise SegmentError(
                f"{len(ranges)} tensors cannot be registered: {error} Raise the limit of locked "
                "memory (ulimit -l), or leave in_place out."
            ) from error

    @property
    def _kind(self) -> Kind:
        return "DRAM" if self._place.device.type == "cpu" else "VRAM"

    @property
    def _device(self) -> int:
        return self._place.device.index or 0

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the stamp."""
        slot = self._slot
        if slot.update_id == update_id:
            slot.stamp(update_id, slot.arena_nbytes, digest)

    def release(self, update_id: str) -> None:
        """Refuse new readers, and empty the stamp: a read under way sees that it is no version."""
        slot = self._slot
        if slot.update_id == update_id:
            slot.generation += 1
            slot.stamp(None, 0)
            slot.update_id = None
        super().release(update_id)

    def _locate(self, update_id: str, known: _Published) -> tuple[SlotRegistration, _Ranges]:
        """Find one range for each tensor."""
        live = self._tensors_of[update_id]
        assert known.slot is self._slot
        regions = (self._stamp,) if live.region is None else (live.region, self._stamp)
        return SlotRegistration(live.number, regions, self._kind, self._device, 0), live.where

    def _free(self, update_id: str) -> None:
        """Deregister the tensors, if the trainer has others by now."""
        self._deregister_unused(self._tensors_of.get(update_id), but=update_id)
        self._tensors_of.pop(update_id, None)

    def entries(self) -> tuple[Entry, ...]:
        """Describe the version that the tensors hold, if there is one."""
        live = self._live
        if live is None:
            return ()
        return (self._entry(live.number, self._slot, sum(live.where[2])),)

    @property
    def nbytes(self) -> int:
        """Bytes besides the trainer's own."""
        live = self._live
        return self._slot.nbytes + (live.lists.nbytes if live and live.lists else 0)

    def _deregister_unused(self, live: _LiveTensors | None, *, but: str = "") -> None:
        """Deregister tensors unless a version other than `but` lies in them and may be read."""
        others = (one for update_id, one in self._tensors_of.items() if update_id != but)
        if live is None or live is self._live or live in others:
            return
        if live.region is not None:
            self._host.deregister(live.region)

    def close(self) -> None:
        """Release everything."""
        self._published.clear()
        live, self._live = self._live, None
        for one in {live, *self._tensors_of.values()}:
            self._tensors_of.clear()
            self._deregister_unused(one)
        self._slot.close()

    def _retire(self) -> None:
        self._slot.stamp(None, 0)  # so a late reader sees that it is no longer a version
        self._host.deregister(self._stamp)


# ---- the server ---------------------------------------------------------------------------------


class _Member(Peer):
    """One reader."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(channel, join)
        self.needs_help = False
        self.leases: dict[str, float] = {}
        """Update -> when its lease ends."""
        self.asked: list[Join | Lease] = []
        """Messages that are answered once a host serves."""
        self.stall_s = join.timeout_s * STALL_PART


class ControlServer(PeerServer[_Member, Join]):
    """The server; its lock is the versions', too."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: NIXLEndpoint,
        store: VersionStore,
        host: Host,
        *,
        token: bytes,
        options: Options,
    ) -> None:
        """Serve at `listener`, and close it at the end.

        A lease has to be renewed within `timeout_s`.
        """
        self._store = store
        self._host = host
        self._epoch = host.epoch
        super().__init__(
            listener,
            endpoint.server_name,
            PROTOCOL,
            token=token,
            identity=endpoint.identity,
            timeout_s=options.timeout_s,
            max_members=options.max_consumers,
            tls=options.tls,
        )

    @property
    def _is_helping(self) -> bool:
        return any(m.needs_help and m.leases for m in self.members)

    def _work(self) -> None:
        with self.changed:
            is_helping = self._is_helping and not self._is_stopping
            self._host.help(is_needed=is_helping)
            if not is_helping or self._host.serves_itself:
                return
        # Not under the lock: the trainer may publish meanwhile.
        for _ in range(_ROUNDS):
            self._progress()
        time.sleep(0)  # lets other threads of this process run

    def _progress(self) -> None:
        try:
            self._host.progress()
        except AgentError:
            # A reader may have died in the middle of a read: its own connection shows that.
            _LOG.debug("%s: no progress", self.name, exc_info=True)

    def _begin(self, ready: set[int]) -> None:
        left = self._host.seconds_left
        if self._host.fileno() in ready or (left is not None and left <= 0):
            self._host.hear()
        self._check_host()

    def _watched(self) -> list[Any]:
        return [self._host]

    def _wait_s(self) -> float | None:
        if self._is_helping and not self._host.serves_itself:
            return 0
        now = time.monotonic()
        left = [until - now for m in self.members for until in m.leases.values()]
        others = self._acceptor.seconds_left, self._host.seconds_left
        return min([*left, *(one for one in others if one is not None)], default=None)

    def _check_host(self) -> None:
        """Hang up on the members that read if their host is gone: they connect again."""
        host = self._host
        if host.is_lost and host.is_hopeless:
            for member in [member for member in self.members if member.asked]:
                self._refuse_asked(member, host.ended)
        epoch = host.epoch + host.is_lost  # one that is lost is as good as replaced
        if epoch == self._epoch:
            return
        busy = [member for member in self.members if member.leases]
        _LOG.warning(
            "%s: %s. %d readers were in the middle, and connect again; another process takes its "
            "place when it is needed.",
            self.name,
            host.ended,
            len(busy),
        )
        for member in busy:
            self.lose(member)
        self._epoch = epoch

    def _answer_asked(self, member: _Member) -> None:
        """Answer what only a host that serves can answer, if one does by now; else start one."""
        if not member.asked:
            return
        try:
            if not self._host.ensure():
                self._host.doubt(member.stall_s)
                return
        except AgentError as error:
            self._refuse_asked(member, str(error))
            return
        self._check_host()
        asked, member.asked = member.asked, []
        for message in () if member.is_gone else asked:
            answer = self._welcome() if isinstance(message, Join) else self._lease(member, message)
            member.channel.send(answer)

    def _refuse_asked(self, member: _Member, reason: str) -> None:
        asked, member.asked = member.asked, []
        for message in asked:
            text = f"it cannot be served now: {reason}"[:MAX_REASON]
            if isinstance(message, Join):
                member.channel.send(Refused(reason=text))
                self.lose(member)
            else:
                gone = Gone(update_id=message.update_id, reason=text, is_stale=False, is_short=True)
                member.channel.send(gone)

    def _welcome(self) -> Welcome:
        metadata, epoch = self._host.metadata(None).hex(), self._host.epoch
        return Welcome(metadata=metadata, epoch=epoch, timeout_s=self._timeout_s)

    def _end(self) -> None:
        now = time.monotonic()
        for member in self.members:
            for update_id, until in list(member.leases.items()):
                if until <= now:
                    _LOG.warning(
                        "%s: %s did not renew its lease of update %s within %s s; it ends",
                        self.name,
                        member.name,
                        update_id,
                        self._timeout_s,
                    )
                    self._unlease(member, update_id)
        for member in list(self.members):
            self._answer_asked(member)

    def _unlease(self, member: _Member, update_id: str) -> None:
        if update_id in member.leases:
            self._store.unlease(update_id, member)
            del member.leases[update_id]
            self.changed.notify_all()

    def join(self, channel: Channel, join: Join) -> None:
        """See `PeerServer`."""
        if self.has_room(channel):
            member = _Member(channel, join)
            member.asked.append(join)  # answered by `_end`
            self.admit(member, None)

    def handle(self, member: _Member, message: FromReader) -> Message | None:
        """See `PeerServer`."""
        match message:
            case Lease():
                member.asked.append(message)
                self._answer_asked(member)
            case Renew(update_id=update_id):
                if update_id not in member.leases:
                    return Lapsed(update_id=update_id)
                member.leases[update_id] = time.monotonic() + self._timeout_s
            case Help(is_needed=is_needed):
                self._help(member, is_needed=is_needed)
            case Unlease(update_id=update_id):
                member.asked = [one for one in member.asked if not _is_lease(one, update_id)]
                self._unlease(member, update_id)
            case AskCatalog():
                return Catalog(entries=self._store.entries())
        return None

    def _help(self, member: _Member, *, is_needed: bool) -> None:
        if is_needed and member.needs_help:  # and still nothing arrives
            self._host.doubt(member.stall_s)
        member.needs_help = is_needed

    def _lease(self, member: _Member, lease: Lease) -> Message:
        is_moved = lease.epoch != self._host.epoch
        # To make a new connection, the reader always needs progress here.
        member.needs_help = lease.needs_help or is_moved
        is_new = lease.update_id not in member.leases
        # Before the lease: it ends with its time or with the connection, whatever happens here.
        member.leases[lease.update_id] = time.monotonic() + self._timeout_s
        answer = self._store.lease(lease, member, member.name)
        if is_new and isinstance(answer, Gone):
            del member.leases[lease.update_id]
        return answer

    def let_go(self, member: _Member) -> None:
        """See `PeerServer`."""
        # The library notices only in these calls that its own connection to the reader ended.
        for _ in range(1 if self._host.serves_itself else _ROUNDS):
            self._progress()
        for update_id in list(member.leases):
            self._unlease(member, update_id)


def _is_lease(message: Join | Lease, update_id: str) -> bool:
    return isinstance(message, Lease) and message.update_id == update_id


# ---- the publisher's end ------------------------------------------------------------------------


class NIXLPublisher(PeerPublisher):
    """See `rl_bridge.transports.base.PublisherEnd`."""

    def __init__(
        self,
        listener: socket.socket,
        endpoint: NIXLEndpoint,
        host: Host,
        store: VersionStore,
        options: Options,
        *,
        place: Place,
        columns: bool,
        token: bytes,
    ) -> None:
        """Serve readers from now on."""
        self.endpoint = endpoint
        self.columns = columns
        self._host = host
        self._store = store
        self._num_threads = options.num_threads
        server = ControlServer(listener, endpoint, store, host, token=token, options=options)
        super().__init__(server, store, place, _end, server, store, host)

    @property
    def counters(self) -> Counters:
        """How much was made so far."""
        return self._host.made

    def _seal(
        self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str
    ) -> tuple[Sealed, Handle]:
        self._server.catch_up()  # a lease whose end has arrived must not cost another slot
        try:
            sealed = self._store.take(
                plan, tensors, update_id, lock=self._server.changed, num_threads=self._num_threads
            )
        finally:
            self._server.poke()  # answers may have been taken here that its thread waits for
        is_in_place = self._store.is_in_place
        return sealed, NIXLHandle(
            endpoint=self.endpoint, generation=sealed.generation, in_place=is_in_place
        )

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the stamp."""
        with self._server.changed:
            self._store.seal_header(update_id, digest)

    def _slot_of(self, update_id: str) -> Slot | None:
        return self._store.slot_of(update_id)

    def release(self, update_id: str) -> None:
        """Let its slot be written again, once nobody reads it."""
        with self._server.changed:
            self._store.release(update_id)

    def catalog(self) -> tuple[Entry, ...]:
        """Describe the versions, their slots and their readers."""
        with self._server.changed:
            return () if self._is_closed else self._store.entries()


def _end(server: ControlServer, store: VersionStore, host: Host) -> None:
    server.close()
    with server.changed:
        store.close()
    host.close()
