"""``cuda-vmm``: GPU tensors between processes of one machine, without a copy on import.

Versions lie in a ring of allocations of CUDA virtual memory. Their descriptors travel over a socket
to whoever has the manifest and is the same user; leases, stamps and the way back are those of
``shared-memory``. Source: CUDA driver API, section "Virtual Memory Management".
"""

import itertools
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from rl_bridge.errors import (
    DriverError,
    RangeBeyondSegment,
    TransportUnavailable,
    WeightBridgeError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.broker import Broker
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.segment import OwnedSegment, SegmentRef
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.vmm.driver import VMMDriver
from rl_bridge.memory.vmm.local import DriverName, cuda_cause, driver_at, place_at
from rl_bridge.memory.vmm.owners import AddressRange, Allocation
from rl_bridge.memory.vmm.references import quietly
from rl_bridge.memory.vmm.view import ArenaRef, DeviceView
from rl_bridge.transports._slots import SlotConsumer, SlotHandle, SlotPublisher
from rl_bridge.transports.base import (
    Availability,
    ConsumerEnd,
    PublisherEnd,
    Transport,
    checked_count,
)

__all__ = ["CUDAVMM", "CUDAVMMHandle"]

_REMEDY = "Use shared-memory with a CPU copy of the weights on one machine."


class CUDAVMMHandle(SlotHandle):
    """The JSON handle: the slot's lease and stamp, and where its arena is."""

    arena: ArenaRef


@dataclass(frozen=True, slots=True)
class _Options:
    name: str
    driver: DriverName
    device: int | None
    max_slots: int
    max_consumers: int
    num_threads: int | None
    timeout_s: float

    def require_device(self) -> None:
        """Raise `TransportUnavailable` where there is no device at all."""
        cause = cuda_cause() if self.driver == "cuda" else None
        if cause is not None:
            raise TransportUnavailable(self.name, cause, _REMEDY)

    def open_driver(self) -> VMMDriver:
        """The driver of the device that was named, or else of torch's current one."""
        self.require_device()
        ordinal = self.device
        if self.driver == "cuda" and ordinal is None:
            ordinal = torch.cuda.current_device()
        try:
            return driver_at(self.driver, ordinal)
        except DriverError as error:
            raise TransportUnavailable(self.name, error.cause, error.remedy) from error


class CUDAVMM(Transport):
    """The ``cuda-vmm`` transport.

    Stream contract: a publish waits for what was submitted to torch's current stream of the device
    before it, and for nothing else; a trainer that writes weights on another stream makes the
    current one wait for that first. An import verifies on torch's current stream.
    """

    name: ClassVar[str] = "cuda-vmm"
    driver_name: ClassVar[DriverName] = "cuda"
    crosses_processes: bool = True
    zero_copy_import: bool = True
    writable_import: bool = False
    binds_header: bool = True

    def __init__(
        self,
        *,
        device: int | None = None,
        max_slots: int = 4,
        max_consumers: int = 64,
        num_threads: int | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Configure.

        Args:
            device: number of the GPU in this process; None takes torch's current one to publish,
                and the publisher's to import.
            max_slots: most versions held in memory at a time: 2 for serial updates, and one for
                each consumer that lags.
            max_consumers: most consumers at a time.
            num_threads: as other transports take it; the GPU has no use for it.
            timeout_s: how long a consumer waits, once for each slot, for the publisher to hand over
                the slot's memory.

        Raises:
            TypeError: a count that is no integer.
            ValueError: a count below 1, a device below 0, or a time that is not positive.

        """
        if device is not None and (type(device) is not int or device < 0):
            raise ValueError(f"device={device!r}: expected the number of a GPU, or None.")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s!r}: expected a positive number of seconds.")
        self._options = _Options(
            name=self.name,
            driver=self.driver_name,
            device=device,
            max_slots=checked_count("max_slots", max_slots),
            max_consumers=checked_count("max_consumers", max_consumers),
            num_threads=(
                None if num_threads is None else checked_count("num_threads", num_threads)
            ),
            timeout_s=float(timeout_s),
        )

    @classmethod
    def probe(cls) -> Availability:
        """Allocate, export, import and map a little memory of torch's current device."""
        try:
            cls()._options.open_driver().probe()  # noqa: SLF001 - its own
        except TransportUnavailable as error:
            return Availability(cls.name, "blocked", error.cause, error.remedy)
        except DriverError as error:
            return Availability(cls.name, "blocked", error.cause, error.remedy)
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end.

        Raises:
            TransportUnavailable: no such device, or it cannot share memory; with the cause.

        """
        return _VMMPublisher(publisher_id, self._options)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end; which device it is, the first manifest says.

        Raises:
            TransportUnavailable: no device at all, with the cause.

        """
        self._options.require_device()
        return _VMMConsumer(worker, rank, self._options)


class _Arena:
    """A slot's memory: allocated, mapped to be written, offered to consumers."""

    def __init__(self, driver: VMMDriver, broker: Broker, key: int, nbytes: int) -> None:
        self.key = key
        self._broker = broker
        # An arena that an interrupt loses on its way to the ring must not be offered for good.
        weakref.finalize(self, broker.withdraw, key).atexit = False
        with ExitStack() as undo:  # at once, whoever keeps the exception
            self._allocation = Allocation.create(driver, nbytes)
            undo.callback(quietly, self._allocation.close)
            self._range = AddressRange(driver, self._allocation.nbytes)
            undo.callback(quietly, self._range.close)
            self._range.map(self._allocation, writable=True)
            undo.callback(broker.withdraw, key)
            broker.offer(key, self._allocation.export(), self._allocation.nbytes)
            undo.pop_all()

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def nbytes(self) -> int:
        return self._allocation.nbytes

    def close(self) -> None:
        self._broker.withdraw(self.key)
        # What a lost device does not take back must not stop the rest of a bridge from closing.
        quietly(self._range.close)
        quietly(self._allocation.close)


class _VMMPublisher(SlotPublisher):
    def __init__(self, publisher_id: str, options: _Options) -> None:
        self._driver = options.open_driver()
        self.place = place_at(self._driver.device)
        self._keys = itertools.count(1)
        self._broker = Broker()
        try:
            super().__init__(
                publisher_id,
                max_slots=options.max_slots,
                max_consumers=options.max_consumers,
                num_threads=options.num_threads,
            )
        except BaseException:
            self._broker.close()
            raise

    def _make_slot(self, arena_nbytes: int) -> Slot:
        # Its last page, and the only one, is the stamp's.
        segment = OwnedSegment.make(f"{self._label}-slot", vm.PAGE)
        try:
            arena = _Arena(self._driver, self._broker, next(self._keys), arena_nbytes)
        except BaseException:
            segment.close()
            raise
        return Slot(segment, arena, granularity=self._driver.granularity())

    def _handle(self, slot: Slot, control: SegmentRef) -> CUDAVMMHandle:
        arena = slot.arena
        if not isinstance(arena, _Arena):
            raise WeightBridgeError("a slot of another transport. Publish again.")
        return CUDAVMMHandle(
            slot=slot.segment.ref,
            control=control,
            generation=slot.generation,
            arena=ArenaRef(
                driver="host" if self._driver.device.ordinal is None else "cuda",
                device=self._driver.device.uuid,
                nbytes=arena.nbytes,
                key=arena.key,
                broker=self._broker.ref,
            ),
        )

    def close(self) -> None:
        super().close()
        self._broker.close()


class _VMMConsumer(SlotConsumer[CUDAVMMHandle]):
    _handle_type = CUDAVMMHandle

    def __init__(self, worker: str, rank: int, options: _Options) -> None:
        super().__init__(worker, rank, num_threads=options.num_threads)
        self._options = options

    def _check(self, manifest: WeightUpdateManifest, handle: CUDAVMMHandle) -> None:
        arena = handle.arena
        if arena.driver != self._options.driver:
            raise TransportUnavailable(
                self._options.name,
                f"the publisher uses memory of {arena.driver!r} and this side of "
                f"{self._options.driver!r}",
                "Make both sides of the same transport.",
            )
        if manifest.table.arena_nbytes > arena.nbytes or handle.slot.kind != "memfd":
            msg = (
                f"update {manifest.update_id}: its arena of {manifest.table.arena_nbytes} bytes "
                f"does not fit its allocation of {arena.nbytes}. Send the manifest as it was "
                "published."
            )
            raise RangeBeyondSegment(msg)
        if self._options.device is not None:
            mine = self._options.open_driver().device.uuid
            if mine != arena.device:
                raise TransportUnavailable(
                    self._options.name,
                    f"the update lies on GPU {arena.device} and this side was given device="
                    f"{self._options.device}, which is {mine}",
                    "Publish on the engine's GPU, or carry the update over shared-memory.",
                )

    def _pin(self, manifest: WeightUpdateManifest, handle: CUDAVMMHandle) -> Pin:
        where = (handle.slot, handle.arena)
        view = self._views.find(
            handle.slot,
            where,
            lambda: DeviceView(handle.slot, handle.arena, timeout_s=self._options.timeout_s),
        )
        return view.pin(manifest.update_id, handle.generation, manifest.table.arena_nbytes)
