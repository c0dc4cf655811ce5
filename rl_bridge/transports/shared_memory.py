"""``shared-memory``: CPU tensors between processes of one machine, without a copy on import.

By default segments are sealed memfds, found through the owner's ``/proc``. With ``directory=`` they
are named files in a directory that both sides share, for containers and users that cannot see each
other's processes; an import then copies, because a file cannot be sealed against truncation.
"""

import logging
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from rl_bridge.errors import (
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
    WeightBridgeError,
)
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.control import (
    ControlReader,
    ControlWriter,
    Record,
    UpdateReport,
    control_nbytes,
)
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.pins import Pin, anonymous_pin
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, still_there, sweep
from rl_bridge.memory.slots import Slot, SlotRing, slot_segment_nbytes
from rl_bridge.memory.views import ViewCache
from rl_bridge.transports.base import (
    Attachment,
    Availability,
    Carried,
    ConsumerEnd,
    PublisherEnd,
    Transport,
    checked_count,
)

__all__ = ["SharedMemory", "SharedMemoryHandle"]

_LOG = logging.getLogger(__name__)
_PROBED = "0" * 31 + "1"  # the id of the update that the probe leases


class SharedMemoryHandle(BaseModel):
    """The JSON handle: the slot, which write of it, and the way back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: SegmentRef
    control: SegmentRef
    generation: Annotated[StrictInt, Field(ge=1, lt=2**63)]


class SharedMemory(Transport):
    """The ``shared-memory`` transport."""

    name: ClassVar[str] = "shared-memory"
    crosses_processes: bool = True
    zero_copy_import: bool = True

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        max_slots: int = 4,
        max_consumers: int = 64,
        num_threads: int | None = None,
    ) -> None:
        """Configure; both sides of a run take the same `directory`.

        Args:
            directory: None for sealed memfds; else where named segments go (best a tmpfs). The
                publisher makes it, but not what it lies in.
            max_slots: most versions held in memory at a time: 2 for serial updates, and one for
                each consumer that lags.
            max_consumers: most consumers at a time.
            num_threads: threads that copy and digest; None takes the usable cores.

        Raises:
            TypeError: a count that is no integer.
            ValueError: a count below 1.

        """
        self._directory = None if directory is None else Path(directory).absolute()
        self._max_slots = checked_count("max_slots", max_slots)
        self._max_consumers = checked_count("max_consumers", max_consumers)
        self._num_threads = (
            None if num_threads is None else checked_count("num_threads", num_threads)
        )
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

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end; named segments of dead publishers are swept first.

        Raises:
            SegmentError: no memory, or `directory` cannot be used.

        """
        if self._directory is not None:
            try:
                # Not what it lies in: a path with a typing mistake is to be told, not made.
                self._directory.mkdir(exist_ok=True, mode=0o700)
                sweep(self._directory)
            except OSError as error:
                msg = (
                    f"directory={str(self._directory)!r} cannot hold segments: {error}. Give both "
                    "sides a directory that this user may write to, best on a tmpfs."
                )
                raise SegmentError(msg) from error
        return _SharedPublisher(
            publisher_id,
            directory=self._directory,
            max_slots=self._max_slots,
            max_consumers=self._max_consumers,
            num_threads=self._num_threads,
        )

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        return _SharedConsumer(worker, rank, self._directory, self._num_threads)


class _SharedPublisher(PublisherEnd):
    def __init__(
        self,
        publisher_id: str,
        *,
        directory: Path | None,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
    ) -> None:
        self._label = f"rlb-{publisher_id[:12]}"
        self._directory = directory
        self._num_threads = num_threads
        self._made = 0
        self._is_closed = False
        self._ring = SlotRing(self._make, limit=max_slots, name_holders=self._holders)
        self._control = ControlReader(
            OwnedSegment.make(
                f"{self._label}-control",
                control_nbytes(max_consumers),
                directory=directory,
                writers=True,
            ),
            publisher_id,
        )

    def _make(self, arena_nbytes: int) -> Slot:
        self._made += 1
        return Slot(
            OwnedSegment.make(
                f"{self._label}-{self._made}.seg",
                slot_segment_nbytes(arena_nbytes),
                directory=self._directory,
            )
        )

    def _holders(self, update_id: str) -> list[str]:
        return [
            f"worker {record.worker!r} rank {record.rank} (pid {record.pid}, {report.state}"
            + (", tensors still referenced)" if report.tensors_held else ")")
            for record in self._control.records()
            if record.presence == "alive"
            for report in record.updates
            if report.update_id == update_id
            and (report.tensors_held or report.state not in {"rejected", "released"})
        ]

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        table = plan.table
        start = time.perf_counter()
        slot = self._ring.acquire(table.arena_nbytes)
        try:
            if slot.layout_digest != table.digest:
                plan.clear_padding(slot.address)
                slot.layout_digest = table.digest
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=self._num_threads)
            self._ring.publish(slot, update_id, table.arena_nbytes)
            handle = SharedMemoryHandle(
                slot=slot.segment.ref, control=self._control.segment.ref, generation=slot.generation
            )
            return Carried(
                digests=digests,
                handle=handle.model_dump(),
                timings_ms={
                    "slot": (staged - start) * 1e3,
                    "stage_digest": (time.perf_counter() - staged) * 1e3,
                },
            )
        except BaseException:
            self._ring.abandon(slot)
            raise

    def release(self, update_id: str) -> None:
        self._ring.release(update_id)

    def records(self) -> list[Record]:
        return self._control.records()

    @property
    def nbytes(self) -> int:
        return 0 if self._is_closed else self._ring.nbytes + self._control.segment.nbytes

    def close(self) -> None:
        self._is_closed = True
        self._ring.close()
        self._control.close()


class _SharedConsumer(ConsumerEnd):
    def __init__(
        self, worker: str, rank: int, directory: Path | None, num_threads: int | None
    ) -> None:
        self._worker = worker
        self._rank = rank
        self._directory = directory
        self._num_threads = num_threads
        self._views = ViewCache(directory)
        self._writers: dict[str, ControlWriter] = {}
        self._plans: dict[str, BytePlan] = {}
        self._is_closed = False
        # A bridge that is dropped instead of closed must not leave descriptors and mappings.
        weakref.finalize(self, _abandon, os.getpid(), self._views, self._writers).atexit = False

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        handle = self._handle(manifest)
        self._writer(manifest.publisher_id, handle)
        return self._map(manifest, handle)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        # A record may be the last trace of a consumer that died: a look must not replace it.
        return self._map(manifest, self._handle(manifest))

    def _map(self, manifest: WeightUpdateManifest, handle: SharedMemoryHandle) -> Attachment:
        table = manifest.table
        if handle.slot.kind == "memfd":
            view = self._views.get(handle.slot)
            pin = view.pin(manifest.update_id, handle.generation, table.arena_nbytes)
        else:
            pin = self._copy_in(manifest, handle)
        plan = self._plans.get(table.digest)
        if plan is None:
            self._plans.clear()  # one layout at a time is the rule; keeping more would only grow
            plan = self._plans[table.digest] = BytePlan(table.nbytes_column)
        return Attachment(table, pin, plan, num_threads=self._num_threads)

    def _copy_in(self, manifest: WeightUpdateManifest, handle: SharedMemoryHandle) -> Pin:
        view = self._views.get(handle.slot)
        nbytes = manifest.table.arena_nbytes
        # The lease is held until the copy is done; a truncated file shortens a read, and nothing
        # ever touches a page of it through a mapping.
        lease = view.pin(manifest.update_id, handle.generation, nbytes)
        try:
            pin = anonymous_pin(nbytes)
            got = vm.read_into(view.fd, pin.address, nbytes)
        except OSError as error:
            msg = (
                f"update {manifest.update_id}: segment {handle.slot.name} cannot be read: {error}. "
                "Publish again."
            )
            raise SegmentError(msg) from error
        finally:
            del lease  # also for whoever keeps the exception
        if got != nbytes:
            msg = (
                f"update {manifest.update_id}: segment {handle.slot.name} ended after {got} of "
                f"{nbytes} bytes: it was truncated. Publish again."
            )
            raise SegmentError(msg)
        return pin

    def _handle(self, manifest: WeightUpdateManifest) -> SharedMemoryHandle:
        handle = self._parse(manifest)
        if (handle.slot.kind == "file") != (self._directory is not None):
            mine = "no directory=" if self._directory is None else f"directory={self._directory}"
            raise TransportUnavailable(
                SharedMemory.name,
                f"the publisher uses {handle.slot.kind} segments and this side is set up for the "
                f"other kind, with {mine}",
                "Give both sides the same directory=, or neither.",
            )
        return handle

    def _parse(self, manifest: WeightUpdateManifest) -> SharedMemoryHandle:
        try:
            handle = SharedMemoryHandle.model_validate(thaw(manifest.handle))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            msg = (
                f"update {manifest.update_id}: handle field {where}: {first['msg']}. Send the "
                "manifest as it was published."
            )
            raise MalformedManifest(msg) from error
        room = handle.slot.nbytes - vm.PAGE
        if manifest.table.arena_nbytes > room:
            msg = (
                f"update {manifest.update_id}: its arena of {manifest.table.arena_nbytes} bytes "
                f"does not fit its segment, which has room for {room}. Send the manifest as it was "
                "published."
            )
            raise RangeBeyondSegment(msg)
        return handle

    def _writer(self, publisher_id: str, handle: SharedMemoryHandle) -> ControlWriter:
        writer = self._writers.get(publisher_id)
        if writer is None or writer.ref != handle.control:
            known, writer = (
                writer,
                ControlWriter(
                    handle.control,
                    publisher_id,
                    worker=self._worker,
                    rank=self._rank,
                    directory=self._directory,
                ),
            )
            # Only now: a manifest that leads nowhere must not cost the way back that works.
            self._writers[publisher_id] = writer
            if known is not None:
                known.close()
        return writer

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        writer = self._writers.get(manifest.publisher_id)
        if writer is None and not self._is_closed:
            try:  # refused before anything of it was opened: that is news as well
                writer = self._writer(manifest.publisher_id, self._handle(manifest))
            except WeightBridgeError as error:
                _LOG.info("the publisher will not hear of %s: %s", report.update_id, error)
        if writer is not None:
            writer.report(report)

    def settle(self) -> None:
        self._views.sweep()
        for publisher_id, writer in list(self._writers.items()):
            if not still_there(writer.ref, directory=self._directory):
                writer.close()
                del self._writers[publisher_id]

    def close(self) -> None:
        self._is_closed = True
        self._views.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _abandon(pid: int, views: ViewCache, writers: dict[str, ControlWriter]) -> None:
    if os.getpid() == pid:
        views.close()
        for writer in writers.values():
            writer.close()
