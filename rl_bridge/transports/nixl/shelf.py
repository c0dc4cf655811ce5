"""What a publisher offers to readers: versions in slots, and who is reading which.

Everything here is called under the server's lock, but for `Shelf.take`, which takes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.slots import Slot
from rl_bridge.transports._wire.messages import Gone
from rl_bridge.transports.nixl.agent import Kind, Region
from rl_bridge.transports.nixl.host import Host
from rl_bridge.transports.nixl.messages import Entry, Lease, Leased

__all__ = ["Placed", "Published", "Ranges", "Shelf", "Taken"]

# Of a reader's name in a catalog: who is called by what cannot be printed has a long one.
_MAX_NAME = 1024

Ranges = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Of each range of a version: its address, its first byte in the arena, its size."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where a version lies, as a reader gets to know it.

    Attributes:
        number: of the memory: what was told of one number once need not be told again.
        regions: what is registered there.
        stamp: address of the stamp.
        ranges: the bytes.
        memory: their kind.
        device: its number.

    """

    number: int
    regions: tuple[Region, ...]
    stamp: int
    ranges: Ranges
    memory: Kind
    device: int


class Shelf(ABC):
    """Versions that can be leased."""

    is_in_place: ClassVar[bool] = False
    """Whether versions lie in the trainer's own tensors."""

    def __init__(self, host: Host) -> None:
        """Start empty.

        Args:
            host: serves readers.

        """
        self._host = host
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

    def _where(self, lease: Lease, known: Published) -> Leased:
        placed = self._place_of(lease.update_id, known)
        addresses, starts, nbytes = placed.ranges
        parts = () if placed.number in lease.known else placed.regions
        host = self._host
        return Leased(
            update_id=lease.update_id,
            slot=placed.number,
            metadata=tuple(host.metadata(part).hex() for part in parts),
            stamp=placed.stamp,
            addresses=addresses,
            starts=starts,
            nbytes=nbytes,
            memory=placed.memory,
            device=placed.device,
            epoch=host.epoch,
            moved="" if lease.epoch == host.epoch else host.metadata(None).hex(),
        )

    @abstractmethod
    def _place_of(self, update_id: str, known: Published) -> Placed:
        """Where a version that is held lies."""

    def unlease(self, update_id: str, reader: Hashable) -> None:
        """Note that a reader is done; unknown ones are ignored."""
        known = self._published.get(update_id)
        if known is not None:
            known.readers.pop(reader, None)
            self._settle(update_id, known)

    def readers_of(self, update_id: str) -> list[str]:
        """Who reads a version."""
        known = self._published.get(update_id)
        return [] if known is None else [f"{name} reads it" for name in known.readers.values()]

    def is_released(self, update_id: str) -> bool:
        """Whether a version is held for those alone who read it."""
        known = self._published.get(update_id)
        return known is not None and known.is_released

    def release(self, update_id: str) -> None:
        """Let nobody in any more; its slot is written again once nobody reads it."""
        known = self._published.get(update_id)
        if known is not None:
            known.is_released = True
            self._settle(update_id, known)

    def _settle(self, update_id: str, known: Published) -> None:
        if known.is_released and not known.readers:
            self._free(update_id)
            del self._published[update_id]  # behind it: what an interrupt cuts off is done again

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
        """Let go of everything."""
