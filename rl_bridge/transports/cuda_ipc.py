"""``cuda-ipc``: GPU tensors between processes of one machine, by legacy CUDA IPC handles.

Versions lie in a ring of plain allocations. A handle of 64 bytes travels in the manifest; whoever
has the manifest opens it once and copies each version out, into memory of its own: a handle opens
memory to be written, and its owner's death takes the memory away, so nothing that an engine is
given may lie there. Leases, stamps and the way back are those of ``shared-memory``. Source: CUDA
driver API, section "Memory Management".
"""

from contextlib import ExitStack
from typing import ClassVar

from rl_bridge.errors import DriverError, TransportUnavailable, WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, process_start_time
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.vmm.ipc import IPC_UNIT, PlainMemory
from rl_bridge.memory.vmm.ipc_view import (
    SHARE_NAMESPACES,
    IPCArenaRef,
    IPCView,
    ipc_namespace,
    private_pin,
)
from rl_bridge.memory.vmm.local import DriverName
from rl_bridge.transports._device import DeviceOptions, DevicePublisher
from rl_bridge.transports._slots import SlotConsumer, SlotHandle
from rl_bridge.transports.base import (
    Attachment,
    Availability,
    ConsumerEnd,
    PublisherEnd,
    Transport,
)

__all__ = ["CUDAIPC", "CUDAIPCHandle"]


class CUDAIPCHandle(SlotHandle):
    """The JSON handle: the slot's lease and stamp, and the raw handle of its arena."""

    arena: IPCArenaRef


class CUDAIPC(Transport):
    """The ``cuda-ipc`` transport.

    Stream contract: a publish waits for what was submitted to torch's current stream of the device
    before it, and for nothing else. An import copies and verifies on torch's current stream. The
    end of a copy waits for the device.
    """

    name: ClassVar[str] = "cuda-ipc"
    driver_name: ClassVar[DriverName] = "cuda"
    crosses_processes: bool = True
    zero_copy_import: bool = False
    binds_header: bool = True

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
        self._options = DeviceOptions.checked(
            self.name,
            self.driver_name,
            device=device,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
        )

    @classmethod
    def probe(cls) -> Availability:
        """Allocate a little memory of torch's current device, and name it.

        Whether another process can open what is named here, an import tells.
        """
        try:
            cls()._options.open_driver().probe_ipc()  # noqa: SLF001 - its own
        except (TransportUnavailable, DriverError) as error:
            return Availability(cls.name, "blocked", error.cause, error.remedy)
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end.

        Raises:
            TransportUnavailable: no such device; with the cause.

        """
        return _IPCPublisher(publisher_id, self._options)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end; which device it is, the first manifest says.

        Raises:
            TransportUnavailable: no device at all, with the cause.

        """
        self._options.require_device()
        return _IPCConsumer(worker, rank, self._options)


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
        if not isinstance(arena, PlainMemory):
            raise WeightBridgeError("a slot of another transport. Publish again.")
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


class _Copy(Attachment):
    """A version copied out of its slot, with the digests of the bytes that were copied."""

    def __init__(self, source: Attachment, pin: Pin) -> None:
        plan, threads = source._plan, source._num_threads  # noqa: SLF001 - of its own kind
        super().__init__(source.tensors.table, pin, plan, num_threads=threads)
        pin.header = source.tensors.pin.header
        self._copied: bytes | None = self._plan.copy_digest(
            source.tensors.addresses, self.tensors.addresses, num_threads=self._num_threads
        )

    def digests(self) -> bytes:
        # The first time: what was read is what was written, in one pass.
        copied, self._copied = self._copied, None
        return super().digests() if copied is None else copied


class _IPCConsumer(SlotConsumer[CUDAIPCHandle]):
    _handle_type = CUDAIPCHandle

    def __init__(self, worker: str, rank: int, options: DeviceOptions) -> None:
        super().__init__(worker, rank, num_threads=options.num_threads)
        self._options = options

    def _check(self, manifest: WeightUpdateManifest, handle: CUDAIPCHandle) -> None:
        self._options.check_arena(manifest, handle.arena, handle.slot.kind)
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
        source = super()._attachment(manifest, handle)
        try:
            return _Copy(source, private_pin(self._view(handle), manifest.table.arena_nbytes))
        finally:
            # The lease ends here, whoever keeps an exception.
            source.tensors.forget()
