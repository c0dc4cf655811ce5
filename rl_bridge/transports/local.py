"""``local-clone``: publisher and consumer in one process, every update copied. The safest baseline.

It is the oracle of the conformance suite: nothing is shared, so nothing can be shared wrongly.
"""

import ctypes
import threading
import time
import weakref
from collections.abc import Mapping
from typing import ClassVar

import torch

from rl_bridge.errors import MalformedManifest, SegmentError
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import Record, UpdateReport, legible, take_note
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan, checked_threads
from rl_bridge.memory.views import Attachment, Pin, anonymous_pin
from rl_bridge.transports.base import Availability, Carried, ConsumerEnd, PublisherEnd, Transport

# Consumers that are gone stay listed, but not for ever.
_REMEMBERED = 64

_PUBLISHERS: "weakref.WeakValueDictionary[str, _LocalPublisher]" = weakref.WeakValueDictionary()


class LocalClone(Transport):
    """The ``local-clone`` transport."""

    name: ClassVar[str] = "local-clone"
    crosses_processes: bool = False
    zero_copy_import: bool = False
    binds_header: bool = True

    def __init__(self, *, num_threads: int | None = None) -> None:
        """Copy on `num_threads` threads; None takes the usable cores, at most 8.

        Raises:
            TypeError: the number is no integer.
            ValueError: it is below 1.

        """
        self._num_threads = checked_threads(num_threads)

    @classmethod
    def probe(cls) -> Availability:
        """It works wherever rl_bridge does: on Linux."""
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end."""
        return _LocalPublisher(publisher_id, self._num_threads)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        return _LocalConsumer(worker, rank, self._num_threads)


class _LocalPublisher(PublisherEnd):
    def __init__(self, publisher_id: str, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._snapshots: dict[str, Pin] = {}
        # Keyed by the consumer's end: its record is gone when it is.
        self._records: dict[int, tuple[weakref.ref[_LocalConsumer], Record]] = {}
        self._lock = threading.RLock()
        _PUBLISHERS[publisher_id] = self

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        start = time.perf_counter()
        pin = anonymous_pin(plan.table.arena_nbytes)
        digests = plan.pack(tensors, pin.address, num_threads=self._num_threads)
        self._snapshots[update_id] = pin
        elapsed = (time.perf_counter() - start) * 1e3
        return Carried(digests=digests, handle={}, timings_ms={"stage_digest": elapsed})

    def snapshot(self, update_id: str) -> Pin:
        pin = self._snapshots.get(update_id)
        if pin is None:
            raise SegmentError(
                f"update {update_id} is gone: its publisher released it. Import the latest "
                "manifest."
            )
        return pin

    def seal_header(self, update_id: str, digest: bytes) -> None:
        self.snapshot(update_id).header = digest

    def release(self, update_id: str) -> None:
        self._snapshots.pop(update_id, None)

    def note(self, end: "_LocalConsumer", report: UpdateReport) -> None:
        with self._lock:
            known = self._records.get(id(end))
            # An id is used again once its object is gone: then it is another consumer.
            updates = known[1].updates if known and known[0]() is end else ()
            kept = {item.update_id: item for item in updates}
            take_note(kept, report)
            worker = legible(end.worker)
            record = Record(worker=worker, rank=end.rank, pid=0, updates=tuple(kept.values()))
            self._records.pop(id(end), None)
            self._records[id(end)] = (weakref.ref(end), record)
            self._forget_old()

    def _forget_old(self) -> None:
        records = self._records.copy()  # a collection in the middle may note something
        gone = [key for key, (end, _) in records.items() if not _is_alive(end)]
        for key in gone[:-_REMEMBERED]:
            self._records.pop(key, None)

    def records(self) -> list[Record]:
        with self._lock:
            self._forget_old()  # some have gone since the last one said something
            return [
                record.model_copy(update={"presence": "alive" if _is_alive(end) else "gone"})
                for end, record in self._records.copy().values()
            ]

    @property
    def nbytes(self) -> int:
        return sum(pin.nbytes for pin in list(self._snapshots.values()))

    def close(self) -> None:
        self._snapshots.clear()


def _is_alive(end: "weakref.ref[_LocalConsumer]") -> bool:
    held = end()
    return held is not None and not held.is_closed


class _LocalConsumer(ConsumerEnd):
    def __init__(self, worker: str, rank: int, num_threads: int | None) -> None:
        self.worker = worker
        self.rank = rank
        self.is_closed = False
        self._num_threads = num_threads

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        if thaw(manifest.handle) != {}:
            raise MalformedManifest(
                f"update {manifest.update_id}: a local-clone handle is empty, got "
                f"{manifest.handle}. Send the manifest as it was published."
            )
        publisher = _PUBLISHERS.get(manifest.publisher_id)
        if publisher is None:
            raise SegmentError(
                f"update {manifest.update_id}: publisher {manifest.publisher_id} is not in this "
                "process; local-clone crosses none. Use shared-memory between processes."
            )
        source = publisher.snapshot(manifest.update_id)
        table = manifest.table
        if table.arena_nbytes > source.nbytes:
            raise SegmentError(
                f"update {manifest.update_id}: the manifest's arena of {table.arena_nbytes} bytes "
                f"is larger than what was published, {source.nbytes} bytes. Send the manifest as "
                "it was published."
            )
        pin = anonymous_pin(table.arena_nbytes)
        pin.header = source.header
        plan = BytePlan(table.nbytes_column)
        attachment = Attachment(table, pin, plan, num_threads=self._num_threads)
        sources = table.offset_column + source.address
        plan.copy(sources, attachment.tensors.addresses, num_threads=self._num_threads)
        at = table.leaves_offset
        ctypes.memmove(pin.address + at, source.address + at, table.lists_nbytes)
        return attachment

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        publisher = _PUBLISHERS.get(manifest.publisher_id)
        if publisher is not None:
            publisher.note(self, report)

    def settle(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        self.is_closed = True
