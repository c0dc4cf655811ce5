"""Both ends of a transport whose versions lie in a ring of slots of one machine.

What differs between such transports is where an arena lies and how a consumer reaches it; which
slot is written next, leases, stamps, and the way back are the same.
"""

import logging
import os
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.control import (
    ControlReader,
    ControlWriter,
    Record,
    UpdateReport,
    control_nbytes,
)
from rl_bridge.memory.packing import PackPlan, clear_padding
from rl_bridge.memory.places import Pass, Place
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, still_there
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.memory.views import Attachment, Pin, ViewCache
from rl_bridge.transports.base import Carried, ConsumerEnd, PublisherEnd

_LOG = logging.getLogger(__name__)


class SlotHandle(BaseModel):
    """The JSON handle: the slot, which write of it, and the way back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: SegmentRef
    control: SegmentRef
    generation: Annotated[StrictInt, Field(ge=1, lt=2**63)]


_Handle = TypeVar("_Handle", bound=SlotHandle)


class SlotPublisher(PublisherEnd):
    """The trainer's end: a ring of slots and the control segment."""

    def __init__(
        self,
        publisher_id: str,
        *,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
        directory: Path | None = None,
    ) -> None:
        """Open the control segment; slots are made when they are needed."""
        self._label = f"rlb-{publisher_id[:12]}"
        self._numbers = count(1)
        self._directory = directory
        self._num_threads = num_threads
        self._is_closed = False
        self._ring = SlotRing(self._make_slot, limit=max_slots, name_holders=self._holders)
        self._publisher_id = publisher_id
        self._max_consumers = max_consumers
        self._control = self._make_control()

    def _make_control(self) -> ControlReader:
        segment = OwnedSegment.make(
            f"{self._label}-control",
            control_nbytes(self._max_consumers),
            directory=self._directory,
            writers=True,
        )
        return ControlReader(segment, self._publisher_id)

    @abstractmethod
    def _make_slot(self, arena_nbytes: int) -> Slot:
        """Make a slot with room for an arena."""

    @abstractmethod
    def _handle(self, slot: Slot, control: SegmentRef) -> SlotHandle:
        """Say where a written slot is."""

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
        start = time.perf_counter()
        slot = self.reserve(plan.table)
        try:
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=self._num_threads)
            handle = self.commit(slot, update_id, plan.table)
            return Carried(
                digests=digests,
                handle=handle,
                timings_ms={
                    "slot": (staged - start) * 1e3,
                    "stage_digest": (time.perf_counter() - staged) * 1e3,
                },
            )
        except BaseException:
            self.abandon(slot)
            raise

    def reserve(self, table: TensorTable) -> Slot:
        """Find room for an arena of this layout; end with `commit` or `abandon`.

        Raises:
            SlotsExhausted: all slots are held.
            SegmentError: no memory for another one.

        """
        if not self._control.segment.is_whole:  # somebody cleaned directory= up
            _LOG.warning("the files in %s were removed: they are made anew", self._directory)
            gone, self._control = self._control, self._make_control()
            gone.close()
        slot = self._ring.acquire(table.arena_nbytes)
        try:
            if slot.layout_digest != table.digest:
                clear_padding(table, slot.address, self.place)
                slot.layout_digest = table.digest
        except BaseException:
            self.abandon(slot)
            raise
        return slot

    def commit(self, slot: Slot, update_id: str, table: TensorTable) -> Mapping[str, JSONValue]:
        """Let readers in; returns the JSON handle that leads to the arena."""
        self._ring.publish(slot, update_id, table.arena_nbytes)
        return self._handle(slot, self._control.segment.ref).model_dump()

    def abandon(self, slot: Slot) -> None:
        """Give a slot back whose update did not come about: nothing can land there any more."""
        self._ring.abandon(slot)

    def seal_header(self, update_id: str, digest: bytes) -> None:
        self._ring.seal_header(update_id, digest)

    def release(self, update_id: str) -> None:
        self._ring.release(update_id)

    def address_of(self, update_id: str) -> int:
        """Address of a published update's first byte, in this process."""
        return self._ring.address_of(update_id)

    def records(self) -> list[Record]:
        return self._control.records()

    @property
    def nbytes(self) -> int:
        return 0 if self._is_closed else self._ring.nbytes + self._control.segment.nbytes

    def close(self) -> None:
        self._is_closed = True
        self._ring.close()
        self._control.close()


class SlotConsumer(ConsumerEnd, Generic[_Handle]):
    """The engine's end: views of the publisher's slots, and a record in its control segment."""

    def __init__(
        self, worker: str, rank: int, *, num_threads: int | None, directory: Path | None = None
    ) -> None:
        """Open nothing yet; `directory` is where named segments are looked for."""
        self._worker = worker
        self._rank = rank
        self._directory = directory
        self._num_threads = num_threads
        self._views = ViewCache(directory)
        self._writers: dict[str, ControlWriter] = {}
        self._plans: dict[tuple[str, torch.device], Pass] = {}
        self._is_closed = False
        # A bridge that is dropped instead of closed must not leave descriptors and mappings.
        weakref.finalize(self, _end, os.getpid(), self._views, self._writers).atexit = False

    _handle_type: type[_Handle]

    @abstractmethod
    def _check(self, manifest: WeightUpdateManifest, handle: _Handle) -> None:
        """Refuse a handle that is well-formed and cannot be right, before anything is opened."""

    @abstractmethod
    def _pin(self, manifest: WeightUpdateManifest, handle: _Handle) -> Pin:
        """Make the arena readable here and lease its version."""

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        handle = self._handle(manifest)
        self._writer(manifest.publisher_id, handle)
        return self._attachment(manifest, handle)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        # A record may be the last trace of a consumer that died: a look must not replace it.
        return self._attachment(manifest, self._handle(manifest))

    def _attachment(self, manifest: WeightUpdateManifest, handle: _Handle) -> Attachment:
        pin = self._pin(manifest, handle)
        try:
            plan = self._plan(manifest.table, pin.place)
        except BaseException:
            del pin  # a caller that keeps the exception must not keep the lease
            raise
        return Attachment(manifest.table, pin, plan, num_threads=self._num_threads)

    def _plan(self, table: TensorTable, place: Place) -> Pass:
        key = (table.digest, place.device)
        if key not in self._plans:
            self._plans.clear()  # one layout at a time is the rule; more would only grow
            self._plans[key] = place.plan(table.nbytes_column)
        return self._plans[key]

    def _handle(self, manifest: WeightUpdateManifest) -> _Handle:
        handle = manifest.parse_handle(self._handle_type)
        self._check(manifest, handle)
        return handle

    def _writer(self, publisher_id: str, handle: SlotHandle) -> ControlWriter:
        known = self._writers.get(publisher_id)
        if known is not None and known.ref == handle.control:
            return known
        # Made first: a manifest that leads nowhere must not cost the way back that works.
        writer = self._writers[publisher_id] = ControlWriter(
            handle.control,
            publisher_id,
            worker=self._worker,
            rank=self._rank,
            directory=self._directory,
        )
        if known is not None:
            known.close()
        return writer

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        writer = self._writers.get(manifest.publisher_id)
        if writer is None and not self._is_closed:
            try:  # an update that was refused before it was opened is reported as well
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
        _end(os.getpid(), self._views, self._writers)


def _end(pid: int, views: ViewCache, writers: dict[str, ControlWriter]) -> None:
    if os.getpid() == pid:
        views.close()
        for writer in writers.values():
            writer.close()
        writers.clear()
