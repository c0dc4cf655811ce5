"""The publisher's ring of slots: where the next version goes without touching a new page.

A slot is one segment: an arena of packed tensors and one last page with a stamp (which update the
arena holds). Where the arena lies in memory of another kind, the segment is that last page alone.
A slot may be written again once its update was released here *and* the kernel says that no reader
holds its lease. A release withdraws the version: its stamp is cleared, so it can be leased no
longer, while readers that have leased it go on reading. Two slots serve updates that follow each
other; each reader that lags behind costs one more, up to a limit, and then an error that names the
holder: a reader that hangs can pin a slot, it can never make a publisher wait.
"""

import ctypes
import gc
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rl_bridge.errors import SegmentError, SlotsExhausted, WeightBridgeError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, SegmentRef

_STAMP = struct.Struct("<8s16sQQ16s")
STAMP_NBYTES = _STAMP.size
# The stamp's format is number 2. Stamps of format 1 had no digest of a header, so that a reader of
# them took a manifest with any header.
_MAGIC = b"rl_brdg2"
_EMPTY = b"\0" * 16
ARRIVING = "arriving"
"""Stands for an update's id while bytes of a read that broke off may still land in the slot.

The lock does not keep this process out, so such a slot must not be used until that is over.
"""
# Updates after which a slot that is no longer used, as of a lagging reader, is given back.
_SURPLUS_AGE = 8


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which update an arena holds, and which write of the slot that was.

    Attributes:
        update_id: the update.
        generation: counts the writes of the slot.
        arena_nbytes: size of what was written.
        header: digest of its manifest's header; None where the publisher sealed none.

    """

    update_id: str
    generation: int
    arena_nbytes: int
    header: bytes | None = None


class Arena(Protocol):
    """Memory for packed tensors that is not part of the slot's segment."""

    @property
    def address(self) -> int:
        """First byte."""

    @property
    def nbytes(self) -> int:
        """Size."""

    def close(self) -> None:
        """Give it back; readers keep what they mapped. Idempotent."""


class Slot:
    """One place of the ring."""

    def __init__(
        self, segment: OwnedSegment, arena: Arena | None = None, *, granularity: int = vm.PAGE
    ) -> None:
        """Use a segment, whose last page is the stamp's.

        Args:
            segment: holds lease and stamp, and the packed tensors where there is no `arena`.
            arena: where the packed tensors go.
            granularity: of what sizes the arena's are multiples.

        """
        self.segment = segment
        self.arena = arena
        self.address = segment.address if arena is None else arena.address
        """First byte of the arena."""
        self.capacity = segment.nbytes - vm.PAGE if arena is None else arena.nbytes
        self._granularity = granularity
        self.generation = 0
        self.update_id: str | None = None
        """The update that it holds; None once that was released."""
        self.last_update_id: str | None = None
        """The update that it held last, whose readers may still be here."""
        self.arena_nbytes = 0
        self.last_used = 0
        self.layout_digest: str | None = None
        self.before_close: Callable[[], None] | None = None
        """Called first when it is closed."""

    @property
    def stamp_address(self) -> int:
        """First byte of the stamp."""
        return self.segment.address + self.segment.nbytes - vm.PAGE

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.segment.nbytes + (0 if self.arena is None else self.arena.nbytes)

    def close(self) -> None:
        """Give the memory back; readers keep what they mapped."""
        if self.before_close is not None:
            self.before_close()
            self.before_close = None
        self.segment.close()
        if self.arena is not None:
            self.arena.close()

    def fits(self, arena_nbytes: int) -> bool:
        """Whether an arena has room here, without wasting more than as much again.

        An arena of its own has to have the very size: an engine's fixed range is mapped as a whole.
        """
        if self.arena is not None:
            return self.capacity == vm.round_up(max(arena_nbytes, 1), self._granularity)
        return arena_nbytes <= self.capacity <= max(2 * arena_nbytes, vm.PAGE)

    def stamp(self, update_id: str | None, arena_nbytes: int, header: bytes | None = None) -> None:
        """Say what the arena holds; None while it is being written."""
        self.arena_nbytes = arena_nbytes
        raw = _EMPTY if update_id is None else bytes.fromhex(update_id)
        record = _STAMP.pack(_MAGIC, raw, self.generation, arena_nbytes, header or _EMPTY)
        # The seal forbids write(2) even to the owner; its own mapping is the only way in.
        ctypes.memmove(self.stamp_address, record, len(record))


def slot_segment_nbytes(arena_nbytes: int) -> int:
    """Size of the segment of a slot whose arena of `arena_nbytes` lies in it."""
    return vm.round_up(max(arena_nbytes, 1)) + vm.PAGE


def read_stamp(fd: int, ref: SegmentRef) -> Stamp:
    """Read a slot's stamp through a descriptor (never through a mapping, which could be torn)."""
    raw = os.pread(fd, _STAMP.size, ref.nbytes - vm.PAGE) if ref.nbytes >= vm.PAGE else b""
    stamp = parse_stamp(raw)
    if stamp is None:
        raise SegmentError(
            f"segment inode {ref.inode} holds no stamp of this transport: it is not a slot, it was "
            "written by another release of rl_bridge, or it was truncated. Use one release and the "
            "manifest as it was published, or publish again."
        )
    return stamp


def parse_stamp(raw: bytes) -> Stamp | None:
    """Read a stamp's bytes; None if they are none."""
    if len(raw) != _STAMP.size or raw[:8] != _MAGIC:
        return None
    _, update_id, generation, arena_nbytes, header = _STAMP.unpack(raw)
    return Stamp(
        update_id.hex(), generation, arena_nbytes, header=None if header == _EMPTY else header
    )


class SlotRing:
    """All slots of one publisher. The bridge calls it under its own lock."""

    def __init__(
        self,
        make_slot: Callable[[int], Slot],
        *,
        limit: int,
        name_holders: Callable[[str], list[str]],
        is_released: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Start empty.

        Args:
            make_slot: makes a slot with room for an arena of a number of bytes.
            limit: most slots at a time.
            name_holders: names the holders of an update, for the error message.
            is_released: whether an update keeps its slot for its readers alone, for that message.

        """
        self._make_slot = make_slot
        self._limit = limit
        self._name_holders = name_holders
        self._is_released = is_released
        self._slots: list[Slot] = []
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, arena_nbytes: int) -> Slot:
        """Find or make a slot and lock it for writing; end with `publish` or `abandon`.

        Raises:
            SlotsExhausted: all slots are held.
            SegmentError: no memory for another one.

        """
        self._uses += 1
        usable = self._find(arena_nbytes)
        if usable is None and len(self._slots) >= self._limit:
            # A reader in this very process may have failed, and the exception's frames still hold
            # its tensors in a cycle, until the next full collection.
            gc.collect()
            usable = self._find(arena_nbytes)
        if usable is None:
            usable = self._grow(arena_nbytes)
        usable.last_used = self._uses
        usable.generation += 1
        usable.stamp(None, 0)
        return usable

    def publish(
        self, slot: Slot, update_id: str, arena_nbytes: int, header: bytes | None = None
    ) -> None:
        """Stamp a written slot and let readers in; without `header`, `seal_header` may follow."""
        slot.update_id = slot.last_update_id = update_id
        slot.stamp(update_id, arena_nbytes, header)
        leases.unlock(slot.segment.fd)

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Note the digest of a published update's header in its stamp, before anybody knows it.

        A reader of an earlier update may read the stamp at this moment: all that it compares is
        written again as it was.
        """
        for slot in self._slots:
            if slot.update_id == update_id:
                slot.stamp(update_id, slot.arena_nbytes, digest)

    def abandon(self, slot: Slot) -> None:
        """Give a slot back whose update did not come about, also in the middle of `publish`."""
        slot.layout_digest = slot.update_id = None
        slot.stamp(None, 0)
        leases.unlock(slot.segment.fd)

    def release(self, update_id: str) -> None:
        """Withdraw an update; its slot may be written again as soon as its readers are gone."""
        for slot in self._slots:
            if slot.update_id == update_id:
                slot.update_id = None
                slot.stamp(None, 0)

    def address_of(self, update_id: str) -> int:
        """Address of a published update's first byte."""
        for slot in self._slots:
            if slot.update_id == update_id:
                return slot.address
        raise SegmentError(f"update {update_id} lies in no slot here: it was released. Publish it.")

    def close(self) -> None:
        """Give all segments back; readers keep what they mapped."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _find(self, arena_nbytes: int) -> Slot | None:
        """Lock a slot without readers; drop those of the wrong size, or long not needed."""
        # The one that was used last is the likeliest to be in the cache, and lets others age out.
        free = sorted(
            (slot for slot in self._slots if slot.update_id is None),
            key=lambda slot: -slot.last_used,
        )
        usable: Slot | None = None
        for slot in free:
            if not leases.try_exclusive(slot.segment.fd):
                continue
            if slot.segment.ref.kind == "file" and not slot.segment.is_whole:
                self._drop(slot)
                continue
            if usable is None and slot.fits(arena_nbytes):
                usable = slot
                continue
            # A slot of one page was for a version that was leased and not read. It takes next to
            # no room, so it is kept for the next such version, although this one does not fit.
            is_misfit = arena_nbytes > 0 and slot.capacity > vm.PAGE and not slot.fits(arena_nbytes)
            if is_misfit or self._uses - slot.last_used > _SURPLUS_AGE:
                self._drop(slot)
            else:
                leases.unlock(slot.segment.fd)
        return usable

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.close()

    def _grow(self, arena_nbytes: int) -> Slot:
        if len(self._slots) >= self._limit:
            raise SlotsExhausted(self._exhausted())
        slot = self._make_slot(arena_nbytes)
        if not leases.try_exclusive(slot.segment.fd):
            slot.close()
            raise WeightBridgeError(
                f"a new slot of {slot.nbytes} bytes was locked by somebody else before its "
                "first use. Keep other programs out of this process's descriptors, and try again."
            )
        self._slots.append(slot)
        return slot

    def _exhausted(self) -> str:
        reasons = []
        for slot in self._slots:
            if slot.update_id == ARRIVING:
                reasons.append("a read that broke off may still write to one (it ends by itself)")
            elif slot.update_id is not None:
                state = "the publisher has not released it (call release)"
                if self._is_released(slot.update_id):
                    state = "released"
                holders = self._name_holders(slot.update_id)
                reasons.append(f"update {slot.update_id}: {', '.join([state, *holders])}")
            else:
                held = slot.last_update_id or "(none)"
                holders = self._name_holders(held) or ["a reader that left no record"]
                reasons.append(f"update {held}: still read by {', '.join(holders)}")
        return (
            f"all {self._limit} slots are held, so nothing can be published: {'; '.join(reasons)}. "
            "Release old updates, drop tensors of old versions, stop the reader that hangs, or "
            "raise max_slots."
        )
