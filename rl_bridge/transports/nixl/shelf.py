"""What a publisher offers to readers: versions in slots, and who is reading which.

Everything here is called under the server's lock, but for `Shelf.take`, which takes it.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.transports.nixl.agent import AgentError
from rl_bridge.transports.nixl.arenas import RegisteredArenas
from rl_bridge.transports.nixl.host import Host
from rl_bridge.transports.nixl.messages import Entry, Gone, Lease, Leased

__all__ = ["Published", "Shelf", "SlotShelf", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A version that is held: its digests, which write of its slot it is, and when it was ready."""

    digests: bytes
    generation: int
    staged: float


@dataclass(slots=True, eq=False)
class Published:
    """One version, and who reads it."""

    slot: Slot
    generation: int
    arena_nbytes: int
    readers: dict[Hashable, str] = field(default_factory=dict)
    is_released: bool = False


class Shelf(ABC):
    """Versions that can be leased."""

    is_in_place: ClassVar[bool] = False
    """Whether versions lie in the trainer's own tensors."""

    def __init__(self) -> None:
        """Start empty."""
        self._published: dict[str, Published] = {}

    def lease(self, lease: Lease, reader: Hashable, name: str) -> Leased | Gone:
        """Let a reader in, or say why not."""
        known = self._published.get(lease.update_id)
        if known is None or known.is_released:
            reason = "its publisher released it"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=True)
        asked = lease.generation, lease.arena_nbytes
        found = known.generation, known.arena_nbytes
        if asked != found:
            reason = f"asked for (write, bytes) {asked}, it is {found}"
            return Gone(update_id=lease.update_id, reason=reason, is_stale=False)
        known.readers[reader] = name
        return self._where(lease, known)

    @abstractmethod
    def attend(self, *, is_sure: bool = False) -> bool:
        """Have somebody there who serves what is held; returns whether it is somebody else.

        Raises:
            AgentError: nobody can.

        """

    @abstractmethod
    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Taken:
        """Hold a version from now on. Not called under the lock: only its steps need that.

        Raises:
            WeightBridgeError: nothing was taken.

        """

    @abstractmethod
    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the version's stamp."""

    @abstractmethod
    def _where(self, lease: Lease, known: Published) -> Leased:
        """Say where a version is."""

    def unlease(self, update_id: str, reader: Hashable) -> None:
        """Note that a reader is done; unknown ones are ignored."""
        known = self._published.get(update_id)
        if known is not None and known.readers.pop(reader, None) is not None:
            self._settle(update_id, known)

    def readers_of(self, update_id: str) -> list[str]:
        """Who reads a version."""
        known = self._published.get(update_id)
        return [] if known is None else [f"{name} reads it" for name in known.readers.values()]

    def release(self, update_id: str) -> None:
        """Let nobody in any more; its slot is written again once nobody reads it."""
        known = self._published.get(update_id)
        if known is not None:
            known.is_released = True
            self._settle(update_id, known)

    def _settle(self, update_id: str, known: Published) -> None:
        if known.is_released and not known.readers:
            del self._published[update_id]
            self._free(update_id)

    @abstractmethod
    def _free(self, update_id: str) -> None:
        """Let its memory be written again."""

    def slot_of(self, update_id: str) -> Slot | None:
        """The slot of a version that is held."""
        known = self._published.get(update_id)
        return None if known is None else known.slot

    @abstractmethod
    def entries(self) -> tuple[Entry, ...]:
        """What is held."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class SlotShelf(Shelf):
    """Snapshots in a ring of registered slots."""

    def __init__(self, arenas: RegisteredArenas, host: Host, label: str, max_slots: int) -> None:
        """Start empty; slots are made when they are needed."""
        super().__init__()
        self._arenas = arenas
        self._host = host
        self._names = (f"{label}-{number}" for number in itertools.count(1))
        self._slots: dict[Slot, None] = {}
        self.ring = SlotRing(self._make_slot, limit=max_slots, name_holders=self.readers_of)

    def attend(self, *, is_sure: bool = False) -> bool:
        """Have somebody there who serves what is held; see `Host.ensure`."""
        is_new = self._host.ensure(is_sure=is_sure)
        if is_new:
            try:
                self._arenas.move_to(self._host)
            except AgentError:
                self._host.close()  # what it does not know it must not seem to serve
                raise
        return is_new

    def _make_slot(self, arena_nbytes: int) -> Slot:
        name = next(self._names)
        try:
            self.attend()
            try:
                slot = self._arenas.make_slot(name, arena_nbytes)
            except SegmentError:
                if not self.attend():  # its end was not known yet
                    raise
                slot = self._arenas.make_slot(name, arena_nbytes)
        except AgentError as error:
            msg = (
                f"a slot of {arena_nbytes} bytes cannot be served: {error} Ask `rl-bridge doctor` "
                "what NIXL lacks here, or use the transport broadcast."
            )
            raise SegmentError(msg) from error
        self._slots[slot] = None
        return slot

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Taken:
        """Copy it into a slot."""
        table = plan.table
        with lock:
            slot = self.ring.acquire(table.arena_nbytes)
        try:
            if slot.layout_digest != table.digest:
                plan.clear_padding(slot.address)
                slot.layout_digest = table.digest
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=num_threads)
            with lock:
                self.ring.publish(slot, update_id, table.arena_nbytes)
                self._published[update_id] = Published(slot, slot.generation, table.arena_nbytes)
            return Taken(digests, slot.generation, staged)
        except BaseException:
            with lock:
                self.ring.abandon(slot)
            raise

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the slot's stamp."""
        self.ring.seal_header(update_id, digest)

    def _where(self, lease: Lease, known: Published) -> Leased:
        slot = known.slot
        registered = self._arenas.known(slot)
        parts = () if registered.number in lease.known else registered.regions
        is_empty = known.arena_nbytes == 0
        return Leased(
            update_id=lease.update_id,
            slot=registered.number,
            metadata=tuple(self._host.metadata(part).hex() for part in parts),
            stamp=registered.stamp,
            addresses=() if is_empty else (registered.address,),
            starts=() if is_empty else (0,),
            nbytes=() if is_empty else (known.arena_nbytes,),
            memory=registered.memory,
            device=registered.device,
        )

    def _free(self, update_id: str) -> None:
        self.ring.release(update_id)

    def entries(self) -> tuple[Entry, ...]:
        """Every slot, those that nothing is published in too."""
        for slot in list(self._slots):
            if slot.before_close is None:
                del self._slots[slot]
        found = []
        for slot in self._slots:
            known = self._published.get(slot.update_id or "")
            found.append(
                Entry(
                    slot=self._arenas.known(slot).number,
                    update_id=slot.update_id,
                    generation=slot.generation,
                    arena_nbytes=slot.arena_nbytes,
                    nbytes=slot.nbytes,
                    readers=() if known is None else tuple(known.readers.values()),
                )
            )
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.ring.nbytes

    def close(self) -> None:
        """Give the slots back."""
        self._published.clear()
        self.ring.close()
        self._slots.clear()
        self._arenas.close()
