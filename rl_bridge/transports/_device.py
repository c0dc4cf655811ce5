"""What the transports through a device's memory are told, and what both ends check of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from rl_bridge.errors import DriverError, RangeBeyondSegment, TransportUnavailable
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.device.streams import Writes
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.vmm.cuda import CUDADriver
from rl_bridge.memory.vmm.host_ipc import HostIPCDriver
from rl_bridge.memory.vmm.ipc_view import IPCArenaRef
from rl_bridge.memory.vmm.local import DriverName, cuda_cause, driver_at, place_at
from rl_bridge.memory.vmm.view import ArenaRef
from rl_bridge.transports._slots import SlotPublisher
from rl_bridge.transports.base import Carried, checked_count

__all__ = ["DeviceOptions", "DevicePublisher"]

_REMEDY = "Use shared-memory with a CPU copy of the weights on one machine."


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of a transport through a device's memory, checked."""

    name: str
    driver: DriverName
    device: int | None
    max_slots: int
    max_consumers: int
    num_threads: int | None
    timeout_s: float

    @classmethod
    def checked(
        cls,
        name: str,
        driver: DriverName,
        *,
        device: int | None,
        max_slots: int,
        max_consumers: int,
        num_threads: int | None,
        timeout_s: float = 1.0,
    ) -> Self:
        """Check what a user gave.

        Raises:
            TypeError: a count that is no integer.
            ValueError: a count below 1, a device below 0, or a time that is not positive.

        """
        if device is not None and (type(device) is not int or device < 0):
            raise ValueError(f"device={device!r}: expected the number of a GPU, or None.")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s!r}: expected a positive number of seconds.")
        return cls(
            name=name,
            driver=driver,
            device=device,
            max_slots=checked_count("max_slots", max_slots),
            max_consumers=checked_count("max_consumers", max_consumers),
            num_threads=(
                None if num_threads is None else checked_count("num_threads", num_threads)
            ),
            timeout_s=float(timeout_s),
        )

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
            msg = (
                f"update {manifest.update_id}: its arena of {manifest.table.arena_nbytes} bytes "
                f"does not fit its allocation of {arena.nbytes}. Send the manifest as it was "
                "published."
            )
            raise RangeBeyondSegment(msg)
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
        """Write a slot, behind whatever a publish that failed left to be written."""
        self._writes.begin()
        try:
            carried = super().carry(plan, tensors, update_id)
        except BaseException:
            self._writes.fail()
            raise
        self._writes.end()
        return carried
