"""A publisher's slot in device memory, seen from a consumer: imported once, mapped to be read."""

import logging
from collections.abc import Hashable
from contextlib import ExitStack
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.errors import DeadlineExceeded, DriverError, WeightBridgeUnavailableError
from rl_bridge.memory.broker import BrokerRef, fetch_fd
from rl_bridge.memory.leased import LeasedView
from rl_bridge.memory.segment import SegmentRef
from rl_bridge.memory.vmm.driver import CAPTURING, INVALID_VALUE
from rl_bridge.memory.vmm.local import driver_of, place_at
from rl_bridge.memory.vmm.owners import AddressRange, Allocation
from rl_bridge.memory.vmm.references import put_off, quietly

__all__ = ["ArenaRef", "DeviceView"]

_LOG = logging.getLogger(__name__)


class ArenaRef(BaseModel):
    """Where a slot's arena is, as it travels in a manifest. Checked, never believed.

    Attributes:
        driver: whose memory.
        device: UUID of the GPU, or ``host``.
        nbytes: size of the allocation.
        key: the allocation's number at its publisher's broker.
        broker: where its descriptor is to be had.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: Literal["cuda", "host"]
    device: Annotated[StrictStr, Field(max_length=64)]
    nbytes: Annotated[StrictInt, Field(ge=1, lt=2**63)]
    key: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    broker: BrokerRef


class DeviceView(LeasedView):
    """A slot whose arena lies in device memory; nobody in this process can write to it."""

    def __init__(self, ref: SegmentRef, arena: ArenaRef, *, timeout_s: float) -> None:
        """Open the slot's segment, fetch the arena's descriptor, import and map it.

        Args:
            ref: the segment with the slot's lease and stamp.
            arena: where the arena is.
            timeout_s: how long the publisher's broker may take.

        Raises:
            SegmentError: it is gone, or not what the references say.
            DriverError: the descriptor is no memory of that size on that device.
            WeightBridgeUnavailableError: this process does not see the device, cannot map its
                memory now, or the broker did not answer in time: the update is as good as before.

        """
        self.arena = arena
        self._timeout_s = timeout_s
        super().__init__(ref, None)

    @property
    def where(self) -> Hashable:
        """The segment and the arena."""
        return (self.ref, self.arena)

    @property
    def capacity(self) -> int:
        """Bytes that the arena has room for."""
        return self.arena.nbytes

    def _open(self) -> int:
        try:
            return self._import()
        except (DeadlineExceeded, DriverError) as error:
            if isinstance(error, DriverError) and error.code == INVALID_VALUE:
                raise  # that is how a driver names a descriptor of something else
            msg = f"this side cannot have the update now: import it again once it can. {error}"
            raise WeightBridgeUnavailableError(msg) from error

    def _import(self) -> int:
        driver = driver_of(self.arena.driver, self.arena.device)
        self.place = place_at(driver.device)
        fd, nbytes = fetch_fd(self.arena.broker, self.arena.key, timeout_s=self._timeout_s)
        # What the manifest says counts: the driver refuses a descriptor of another size.
        del nbytes
        with ExitStack() as undo:  # at once, whoever keeps the exception
            self.allocation = Allocation.received(driver, fd, self.arena.nbytes)
            undo.callback(quietly, self.allocation.close)
            self._range = AddressRange(driver, self.arena.nbytes)
            undo.callback(quietly, self._range.close)
            self._range.map(self.allocation, writable=False)
            undo.pop_all()
        return self._range.address

    def _unmap(self) -> None:
        # What a lost device does not take back must not stop the rest of a bridge from closing.
        quietly(self._range.close)
        quietly(self.allocation.close)

    def _is_quiet(self) -> bool:
        # A tensor may be dead while kernels that read it still run. The publisher may overwrite the
        # slot as soon as the lease ends, so they are waited for first.
        try:
            self.allocation.driver.fence()
        except (DeadlineExceeded, DriverError) as error:
            if isinstance(error, DeadlineExceeded) or error.code == CAPTURING:
                # Nobody else may look at a view that was retired: it must not die with its lease.
                put_off(self.settle)
                return False
            _LOG.warning("a lease ends although the device does not answer: %s", error)
        return True

    def refresh(self, address: int, nbytes: int) -> bool:
        """Nothing to drop: this process cannot write there."""
        del address, nbytes
        return False

    def prefault(self, nbytes: int) -> None:
        """Nothing to do: a mapping of device memory is complete."""
