"""``shared-memory``: CPU tensors between processes of one machine, without a copy on import.

By default segments are sealed memfds, found through the owner's ``/proc``. With ``directory=`` they
are named files in a directory that both sides share, for containers and users that cannot see each
other's processes; an import then copies, because a file cannot be sealed against truncation.
"""

import os
from pathlib import Path
from typing import ClassVar

from rl_bridge.errors import (
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
    WeightBridgeError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.passes import checked_count, checked_flag, checked_threads
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, require_resources, sweep
from rl_bridge.memory.slots import Slot, SlotRing, slot_segment_nbytes
from rl_bridge.memory.views import Pin, ViewCache, anonymous_pin
from rl_bridge.transports._slots import SlotConsumer, SlotHandle, SlotPublisher
from rl_bridge.transports.base import Availability, ConsumerEnd, Transport

_PROBED = "0" * 31 + "1"  # the id of the update that the probe leases


class SharedMemory(Transport):
    """The ``shared-memory`` transport."""

    name: ClassVar[str] = "shared-memory"
    crosses_processes: bool = True
    zero_copy_import: bool = True
    binds_header: bool = True

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        max_slots: int = 4,
        max_consumers: int = 64,
        columns: bool = False,
        num_threads: int | None = None,
    ) -> None:
        """Configure; both sides of a run take the same `directory`.

        Args:
            directory: None for sealed memfds; else where named segments go (best a tmpfs). The
                publisher makes it, but not what it lies in.
            max_slots: most versions held in memory at a time: 2 for serial updates, and one for
                each consumer that lags.
            max_consumers: most consumers at a time.
            columns: digest blocks of columns, too, by which a reader of some columns verifies only
                those. Sealing a version takes up to half as long again; on one host, where reading
                costs nothing else, that is worth it for readers that cut tensors into many parts.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.

        Raises:
            TypeError: a count that is no integer, or a flag that is no bool.
            ValueError: a count below 1.

        """
        self._directory = None if directory is None else Path(directory).absolute()
        self._max_slots = checked_count("max_slots", max_slots)
        self._max_consumers = checked_count("max_consumers", max_consumers)
        self._columns = checked_flag("columns", columns)
        self._num_threads = checked_threads(num_threads)
        self.zero_copy_import = directory is None

    @classmethod
    def probe(cls) -> Availability:
        """Make, seal, open, lease and map a segment the way publisher and consumer do."""
        try:
            ring = SlotRing(
                lambda nbytes: Slot(
                    OwnedSegment.make("rl_bridge-probe", slot_segment_nbytes(nbytes))
                ),
                limit=1,
                name_holders=lambda _: [],
            )
            views = ViewCache()
            try:
                slot = ring.acquire(vm.PAGE)
                ring.publish(slot, _PROBED, vm.PAGE)
                views.get(slot.segment.ref).pin(_PROBED, slot.generation, vm.PAGE)
            finally:
                views.close()
                ring.close()
        except (WeightBridgeError, OSError) as error:
            return Availability(
                cls.name,
                "blocked",
                str(error),
                "rl_bridge needs Linux 5.13 or later with /proc; in containers give both sides "
                "directory=.",
            )
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> "SharedPublisher":
        """Open the trainer's end; named segments of dead publishers are swept first.

        Raises:
            SegmentError: no memory, or `directory` cannot be used.

        """
        if self._directory is not None:
            try:
                # Without its parents: a mistyped path must be an error, and not a new directory.
                self._directory.mkdir(exist_ok=True, mode=0o700)
                sweep(self._directory)
            except OSError as error:
                raise SegmentError(
                    f"directory={str(self._directory)!r} cannot hold segments: {error}. Give both "
                    "sides a directory that this user may write to, best on a tmpfs."
                ) from error
        end = SharedPublisher(
            publisher_id,
            directory=self._directory,
            max_slots=self._max_slots,
            max_consumers=self._max_consumers,
            num_threads=self._num_threads,
        )
        end.columns = self._columns
        return end

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        return _SharedConsumer(
            worker, rank, num_threads=self._num_threads, directory=self._directory
        )


class SharedPublisher(SlotPublisher):
    """The trainer's end."""

    def _make_slot(self, arena_nbytes: int) -> Slot:
        return Slot(
            OwnedSegment.make(
                f"{self._label}-{next(self._numbers)}.seg",
                slot_segment_nbytes(arena_nbytes),
                directory=self._directory,
            )
        )

    def _handle(self, slot: Slot, control: SegmentRef) -> SlotHandle:
        return SlotHandle(slot=slot.segment.ref, control=control, generation=slot.generation)


class _SharedConsumer(SlotConsumer[SlotHandle]):
    _handle_type = SlotHandle

    def _pin(self, manifest: WeightUpdateManifest, handle: SlotHandle) -> Pin:
        if handle.slot.kind != "memfd":
            return self._copy_in(manifest, handle)
        return self._views.get(handle.slot).pin(
            manifest.update_id, handle.generation, manifest.table.arena_nbytes
        )

    def _copy_in(self, manifest: WeightUpdateManifest, handle: SlotHandle) -> Pin:
        view = self._views.get(handle.slot)
        nbytes = manifest.table.arena_nbytes
        # The lease is held until the copy is done; a truncated file shortens a read, and nothing
        # ever touches a page of it through a mapping.
        lease = view.pin(manifest.update_id, handle.generation, nbytes)
        try:
            pin = anonymous_pin(nbytes)
            pin.header = lease.header
            got = vm.read_into(view.fd, pin.address, nbytes)
        except OSError as error:
            require_resources(error)
            raise SegmentError(
                f"update {manifest.update_id}: segment {handle.slot.name} cannot be read: {error}. "
                "Publish again."
            ) from error
        finally:
            del lease  # also if a caller keeps the exception
        if got != nbytes:
            raise SegmentError(
                f"update {manifest.update_id}: segment {handle.slot.name} ended after {got} of "
                f"{nbytes} bytes: it was truncated. Publish again."
            )
        return pin

    def _check(self, manifest: WeightUpdateManifest, handle: SlotHandle) -> None:
        room = handle.slot.nbytes - vm.PAGE
        if manifest.table.arena_nbytes > room:
            raise RangeBeyondSegment(
                f"update {manifest.update_id}: its arena of {manifest.table.arena_nbytes} bytes "
                f"does not fit its segment, which has room for {room}. Send the manifest as it was "
                "published."
            )
        if (handle.slot.kind == "file") != (self._directory is not None):
            mine = "no directory=" if self._directory is None else f"directory={self._directory}"
            raise TransportUnavailable(
                SharedMemory.name,
                f"the publisher uses {handle.slot.kind} segments and this side is set up for the "
                f"other kind, with {mine}",
                "Give both sides the same directory=, or neither.",
            )
