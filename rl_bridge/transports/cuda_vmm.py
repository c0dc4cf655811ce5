"""``cuda-vmm``: GPU tensors between processes of one machine, without a copy on import.

Versions lie in a ring of allocations of CUDA virtual memory. Their descriptors travel over a socket
to whoever has the manifest and is the same user; leases, stamps and the way back are those of
``shared-memory``. Source: CUDA driver API, section "Virtual Memory Management".
"""

import itertools
import weakref
from contextlib import ExitStack
from typing import ClassVar

from rl_bridge.errors import (
    DriverError,
    TransportUnavailable,
    WeightBridgeError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.broker import Broker
from rl_bridge.memory.device.streams import Writes
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.segment import OwnedSegment, SegmentRef
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.vmm.driver import VMMDriver
from rl_bridge.memory.vmm.local import DriverName
from rl_bridge.memory.vmm.owners import AddressRange, Allocation
from rl_bridge.memory.vmm.references import quietly
from rl_bridge.memory.vmm.view import ArenaRef, DeviceView
from rl_bridge.transports._device import DeviceOptions, DevicePublisher
from rl_bridge.transports._slots import SlotConsumer, SlotHandle
from rl_bridge.transports.base import (
    Availability,
    ConsumerEnd,
    PublisherEnd,
    Transport,
)

__all__ = ["CUDAVMM", "CUDAVMMHandle"]


class CUDAVMMHandle(SlotHandle):
    """The JSON handle: the slot's lease and stamp, and where its arena is."""

    arena: ArenaRef


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
        self._options = DeviceOptions.checked(
            self.name,
            self.driver_name,
            device=device,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
            timeout_s=timeout_s,
        )

    @classmethod
    def probe(cls) -> Availability:
        """Allocate, export, import and map a little memory of torch's current device."""
        try:
            cls()._options.open_driver().probe()  # noqa: SLF001 - its own
        except (TransportUnavailable, DriverError) as error:
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

    def __init__(
        self, driver: VMMDriver, broker: Broker, writes: Writes, key: int, nbytes: int
    ) -> None:
        self.key = key
        self._broker = broker
        self._writes = writes
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
        # Nothing but a publish writes here, and each has waited for its own: a drain would have a
        # publish that replaces a slot wait for all that runs on the device.
        fence = not self._writes.are_over
        # What a lost device does not take back must not stop the rest of a bridge from closing.
        quietly(lambda: self._range.close(fence=fence))
        quietly(self._allocation.close)


class _VMMPublisher(DevicePublisher):
    def __init__(self, publisher_id: str, options: DeviceOptions) -> None:
        super().__init__(publisher_id, options)
        self._keys = itertools.count(1)
        try:
            self._broker = Broker()
        except BaseException:
            super().close()
            raise

    def _make_slot(self, arena_nbytes: int) -> Slot:
        # Its last page, and the only one, is the stamp's.
        segment = OwnedSegment.make(f"{self._label}-slot", vm.PAGE)
        try:
            arena = _Arena(self._driver, self._broker, self._writes, next(self._keys), arena_nbytes)
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

    def __init__(self, worker: str, rank: int, options: DeviceOptions) -> None:
        super().__init__(worker, rank, num_threads=options.num_threads)
        self._options = options

    def _check(self, manifest: WeightUpdateManifest, handle: CUDAVMMHandle) -> None:
        self._options.check_arena(manifest, handle.arena, handle.slot.kind)

    def _pin(self, manifest: WeightUpdateManifest, handle: CUDAVMMHandle) -> Pin:
        where = (handle.slot, handle.arena)
        view = self._views.find(
            handle.slot,
            where,
            lambda: DeviceView(handle.slot, handle.arena, timeout_s=self._options.timeout_s),
        )
        return view.pin(manifest.update_id, handle.generation, manifest.table.arena_nbytes)
