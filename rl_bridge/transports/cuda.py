"""``cuda-vmm`` and ``cuda-ipc``: GPU tensors between processes of one machine.

``cuda-vmm`` imports without a copy. Versions lie in a ring of allocations of CUDA virtual memory,
whose descriptors travel over a socket to any process of the same user that has the manifest.
``cuda-ipc`` uses legacy handles of 64 bytes. Versions lie in a ring of plain allocations, and the
handle travels in the manifest. A consumer opens it once and copies each version out, into memory of
its own: a handle opens memory to be written, and its owner's death takes the memory away, so
nothing that an engine is given may lie there.

Leases, stamps and reports are those of ``shared-memory``. Source: CUDA driver API, sections
"Virtual Memory Management" and "Memory Management".
"""

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from rl_bridge.cuda.broker import Broker
from rl_bridge.cuda.devices import DriverName, cuda_cause, driver_at, has_driver, place_at
from rl_bridge.cuda.driver import VMMDriver
from rl_bridge.cuda.host import HostIPCDriver
from rl_bridge.cuda.ipc import IPC_UNIT, PlainMemory
from rl_bridge.cuda.libcuda import CUDADriver
from rl_bridge.cuda.owners import AddressRange, Allocation, quietly
from rl_bridge.cuda.streams import Writes
from rl_bridge.cuda.views import (
    SHARE_NAMESPACES,
    ArenaRef,
    DeviceView,
    IPCArenaRef,
    IPCView,
    ipc_namespace,
    private_pin,
)
from rl_bridge.errors import DriverError, RangeBeyondSegment, TransportUnavailable
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import checked_count, checked_threads
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, process_start_time
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Attachment, Pin
from rl_bridge.transports._slots import SlotConsumer, SlotHandle, SlotPublisher
from rl_bridge.transports.base import (
    Availability,
    Carried,
    ConsumerEnd,
    PublisherEnd,
    Transport,
    checked_seconds,
)

_REMEDY = "Use shared-memory with a CPU copy of the weights on one machine."


class CUDAVMMHandle(SlotHandle):
    """The JSON handle: the slot's lease and stamp, and where its arena is."""

    arena: ArenaRef


class CUDAIPCHandle(SlotHandle):
    """The JSON handle: the slot's lease and stamp, and the raw handle of its arena."""

    arena: IPCArenaRef


_Handle = TypeVar("_Handle", CUDAVMMHandle, CUDAIPCHandle)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options of a transport through a device's memory, checked."""

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

    def open_driver(self) -> CUDADriver | HostIPCDriver:
        """The driver of the device that was named, or else of torch's current one."""
        self.require_device()
        ordinal = self.device
        if self.driver == "cuda" and ordinal is None:
            ordinal = torch.cuda.current_device()
        try:
            return driver_at(self.driver, ordinal)
        except DriverError as error:
            raise TransportUnavailable(self.name, error.cause, error.remedy) from error

    def check_arena(
        self, manifest: WeightUpdateManifest, arena: ArenaRef | IPCArenaRef, kind: str
    ) -> None:
        """Refuse an arena that is well-formed and cannot be right here, before it is opened.

        Args:
            manifest: whose.
            arena: where it is.
            kind: of the slot's segment.

        Raises:
            TransportUnavailable: memory of another kind, or of another device than this side's.
            RangeBeyondSegment: it is too small for the manifest's tensors.

        """
        if arena.driver != self.driver:
            raise TransportUnavailable(
                self.name,
                f"the publisher uses memory of {arena.driver!r} and this side of {self.driver!r}",
                "Make both sides of the same transport.",
            )
        if manifest.table.arena_nbytes > arena.nbytes or kind != "memfd":
            raise RangeBeyondSegment(
                f"update {manifest.update_id}: its arena of {manifest.table.arena_nbytes} bytes "
                f"does not fit its allocation of {arena.nbytes}. Send the manifest as it was "
                "published."
            )
        if self.device is not None:
            mine = self.open_driver().device.uuid
            if mine != arena.device:
                raise TransportUnavailable(
                    self.name,
                    f"the update lies on GPU {arena.device} and this side was given device="
                    f"{self.device}, which is {mine}",
                    "Publish on the engine's GPU, or carry the update over shared-memory.",
                )


class DevicePublisher(SlotPublisher):
    """The trainer's end of a transport whose slots a device writes, on its current stream."""

    def __init__(self, publisher_id: str, options: DeviceOptions) -> None:
        """Open the device, then the control segment.

        Raises:
            TransportUnavailable: no such device; with the cause.

        """
        self._driver = options.open_driver()
        self.place = place_at(self._driver.device)
        self._writes = Writes(self.place.device)
        super().__init__(
            publisher_id,
            max_slots=options.max_slots,
            max_consumers=options.max_consumers,
            num_threads=options.num_threads,
        )

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        """Write a slot, after whatever a publish that failed left to be written."""
        self._writes.begin()
        try:
            carried = super().carry(plan, tensors, update_id)
        except BaseException:
            self._writes.fail()
            raise
        self._writes.end()
        return carried


class DeviceConsumer(SlotConsumer[_Handle]):
    """The engine's end of a transport whose slots lie in a device's memory."""

    def __init__(self, worker: str, rank: int, options: DeviceOptions) -> None:
        """Open nothing yet: which device it is, the first manifest says.

        Raises:
            TransportUnavailable: no device at all, with the cause.

        """
        options.require_device()
        super().__init__(worker, rank, num_threads=options.num_threads)
        self._options = options

    def _check(self, manifest: WeightUpdateManifest, handle: _Handle) -> None:
        self._options.check_arena(manifest, handle.arena, handle.slot.kind)


class DeviceTransport(Transport):
    """A transport through a device's memory."""

    driver_name: ClassVar[DriverName] = "cuda"
    crosses_processes: bool = True
    binds_header: bool = True
    _publisher: ClassVar[type[DevicePublisher]]
    _consumer: ClassVar[type[DeviceConsumer[Any]]]

    def __init__(
        self,
        *,
        device: int | None,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float = 1.0,
    ) -> None:
        """Check the options that a user gave."""
        if device is not None and (type(device) is not int or device < 0):
            raise ValueError(f"device={device!r}: expected the number of a GPU, or None.")
        self._options = DeviceOptions(
            name=self.name,
            driver=self.driver_name,
            device=device,
            max_slots=checked_count("max_slots", max_slots),
            max_consumers=checked_count("max_consumers", max_consumers),
            num_threads=checked_threads(num_threads),
            timeout_s=checked_seconds("timeout_s", timeout_s),
        )

    @staticmethod
    @abstractmethod
    def _try(driver: CUDADriver | HostIPCDriver) -> None:
        """Do with a little memory what this transport does."""

    @classmethod
    def probe(cls) -> Availability:
        """Try it with a little memory of torch's current device."""
        try:
            cls._try(cls.create()._options.open_driver())  # noqa: SLF001 - its own
        except (TransportUnavailable, DriverError) as error:
            return Availability(cls.name, "blocked", error.cause, error.remedy, has_driver())
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end.

        Raises:
            TransportUnavailable: no such device, or it cannot share memory; with the cause.

        """
        return self._publisher(publisher_id, self._options)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end; which device it is, the first manifest says.

        Raises:
            TransportUnavailable: no device at all, with the cause.

        """
        return self._consumer(worker, rank, self._options)


# ---- cuda-vmm ------------------------------------------------------------------------------------


class _Arena:
    """A slot's memory: allocated, mapped to be written, offered to consumers."""

    def __init__(
        self, driver: VMMDriver, broker: Broker, writes: Writes, key: int, nbytes: int
    ) -> None:
        self.key = key
        self._broker = broker
        self._writes = writes
        with ExitStack() as undo:  # at once: somebody may keep the exception
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
        # A lost device takes nothing back, which must not stop the rest of a bridge from closing.
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
        assert isinstance(arena, _Arena)  # of `_make_slot`
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


class _VMMConsumer(DeviceConsumer[CUDAVMMHandle]):
    _handle_type = CUDAVMMHandle

    def _pin(self, manifest: WeightUpdateManifest, handle: CUDAVMMHandle) -> Pin:
        where = (handle.slot, handle.arena)
        view = self._views.find(
            handle.slot,
            where,
            lambda: DeviceView(handle.slot, handle.arena, timeout_s=self._options.timeout_s),
        )
        return view.pin(manifest.update_id, handle.generation, manifest.table.arena_nbytes)


class CUDAVMM(DeviceTransport):
    """The ``cuda-vmm`` transport.

    Stream contract: a publish waits for what was submitted to torch's current stream of the device
    before it, and for nothing else; a trainer that writes weights on another stream makes the
    current one wait for that first. An import verifies on torch's current stream.
    """

    name: ClassVar[str] = "cuda-vmm"
    zero_copy_import: bool = True
    writable_import: bool = False
    _publisher = _VMMPublisher
    _consumer = _VMMConsumer

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
            TypeError: a count that is no integer, or a time that is no number.
            ValueError: a count below 1, a device below 0, or a time that is not positive.

        """
        super().__init__(
            device=device,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
            timeout_s=timeout_s,
        )

    @staticmethod
    def _try(driver: CUDADriver | HostIPCDriver) -> None:
        driver.probe()


# ---- cuda-ipc ------------------------------------------------------------------------------------


class _IPCPublisher(DevicePublisher):
    def _make_slot(self, arena_nbytes: int) -> Slot:
        with ExitStack() as undo:
            # Its last page, and the only one, is the stamp's.
            segment = OwnedSegment.make(f"{self._label}-slot", vm.PAGE)
            undo.callback(segment.close)
            nbytes = vm.round_up(max(arena_nbytes, 1), IPC_UNIT)
            arena = PlainMemory(self._driver, nbytes, segment.fd)
            undo.callback(arena.close)
            slot = Slot(segment, arena, granularity=IPC_UNIT)
            undo.pop_all()
        return slot

    def _handle(self, slot: Slot, control: SegmentRef) -> CUDAIPCHandle:
        arena = slot.arena
        assert isinstance(arena, PlainMemory)  # of `_make_slot`
        return CUDAIPCHandle(
            slot=slot.segment.ref,
            control=control,
            generation=slot.generation,
            arena=IPCArenaRef(
                driver="host" if self._driver.device.ordinal is None else "cuda",
                device=self._driver.device.uuid,
                nbytes=arena.nbytes,
                handle=arena.handle.hex(),
                namespace=ipc_namespace(),
            ),
        )


class _IPCConsumer(DeviceConsumer[CUDAIPCHandle]):
    _handle_type = CUDAIPCHandle

    def _check(self, manifest: WeightUpdateManifest, handle: CUDAIPCHandle) -> None:
        super()._check(manifest, handle)
        apart, slot = handle.arena.apart, handle.slot
        if apart is not None and process_start_time(slot.pid) != slot.start_time:
            # Nobody died: the update is as good as before, and out of reach from here.
            cause = f"{apart}, from which its process, pid {slot.pid}, is not to be seen"
            raise TransportUnavailable(self._options.name, cause, SHARE_NAMESPACES)

    def _view(self, handle: CUDAIPCHandle) -> IPCView:
        return self._views.find(
            handle.slot,
            (handle.slot, handle.arena),
            lambda: IPCView(handle.slot, handle.arena, transport=self._options.name),
        )

    def _pin(self, manifest: WeightUpdateManifest, handle: CUDAIPCHandle) -> Pin:
        view = self._view(handle)
        view.require_owner()
        return view.pin(manifest.update_id, handle.generation, manifest.table.arena_nbytes)

    def _attachment(self, manifest: WeightUpdateManifest, handle: CUDAIPCHandle) -> Attachment:
        table = manifest.table
        lease = self._pin(manifest, handle)
        try:
            pin = private_pin(self._view(handle), table.arena_nbytes)
            pin.header = lease.header
            plan = self._plan(table, pin.place)
            copy = Attachment(table, pin, plan, num_threads=self._num_threads)
            sources = table.offset_column + np.uint64(lease.address)
            # One pass reads and writes the same bytes.
            copy.digested(
                plan.copy_digest(sources, copy.tensors.addresses, num_threads=self._num_threads)
            )
            return copy
        finally:
            del lease  # somebody may keep an exception


class CUDAIPC(DeviceTransport):
    """The ``cuda-ipc`` transport.

    Stream contract: a publish waits for what was submitted to torch's current stream of the device
    before it, and for nothing else. An import copies and verifies on torch's current stream. The
    end of a copy waits for the device.
    """

    name: ClassVar[str] = "cuda-ipc"
    zero_copy_import: bool = False
    _publisher = _IPCPublisher
    _consumer = _IPCConsumer

    def __init__(
        self,
        *,
        device: int | None = None,
        max_slots: int = 4,
        max_consumers: int = 64,
        num_threads: int | None = None,
    ) -> None:
        """Configure.

        Args:
            device: number of the GPU in this process; None takes torch's current one to publish,
                and the publisher's to import.
            max_slots: most versions held in memory at a time.
            max_consumers: most consumers at a time.
            num_threads: as other transports take it; the GPU has no use for it.

        Raises:
            TypeError: a count that is no integer.
            ValueError: a count below 1, or a device below 0.

        """
        super().__init__(
            device=device,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
        )

    @staticmethod
    def _try(driver: CUDADriver | HostIPCDriver) -> None:
        # Whether another process can open what is named here, an import tells.
        driver.probe_ipc()
