"""A publisher's slot in device memory, seen from a consumer: imported once, mapped to be read."""

import logging
import os
import weakref
from collections.abc import Hashable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from rl_bridge.cuda.broker import BrokerRef, fetch_fd
from rl_bridge.cuda.devices import driver_of, place_at
from rl_bridge.cuda.driver import CAPTURING, INVALID_VALUE
from rl_bridge.cuda.ipc import IPC_HANDLE_NBYTES, IPC_UNIT, Core, IPCDriver, Opening
from rl_bridge.cuda.owners import AddressRange, Allocation, put_off, quietly, settle_late
from rl_bridge.errors import (
    DeadlineExceeded,
    DriverError,
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.memory.segment import SegmentRef, still_there
from rl_bridge.memory.views import LeasedView, Pin, anonymous_pin

_LOG = logging.getLogger(__name__)


class DeviceArena(BaseModel):
    """Where a slot's arena is, as it travels in a manifest. Checked, never believed.

    Attributes:
        driver: whose memory.
        device: UUID of the GPU, or ``host``.
        nbytes: size of the allocation.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: Literal["cuda", "host"]
    device: Annotated[StrictStr, Field(max_length=64)]
    nbytes: Annotated[StrictInt, Field(ge=1, lt=2**63)]


class ArenaView(LeasedView):
    """A slot whose arena lies in device memory, which consumers only read."""

    arena: DeviceArena

    @property
    def where(self) -> Hashable:
        """The segment and the arena."""
        return (self.ref, self.arena)

    @property
    def capacity(self) -> int:
        """Bytes that the arena has room for."""
        return self.arena.nbytes

    def refresh(self, address: int, nbytes: int) -> bool:
        """Nothing to drop: no consumer writes there."""
        del address, nbytes
        return False

    def prefault(self, nbytes: int) -> None:
        """Nothing to do: device memory is present."""


# ---- CUDA virtual memory: imported once, mapped to be read ---------------------------------------


class ArenaRef(DeviceArena):
    """An arena whose descriptor a broker hands over.

    Attributes:
        key: the allocation's number at its publisher's broker.
        broker: where its descriptor is to be had.

    """

    key: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    broker: BrokerRef


class DeviceView(ArenaView):
    """A slot whose arena is mapped here; nobody in this process can write to it."""

    arena: ArenaRef

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

    def _open(self) -> int:
        try:
            return self._import()
        except (DeadlineExceeded, DriverError) as error:
            if isinstance(error, DriverError) and error.code == INVALID_VALUE:
                raise  # that is how a driver names a descriptor of something else
            raise WeightBridgeUnavailableError(
                f"this side cannot have the update now: import it again once it can. {error}"
            ) from error

    def _import(self) -> int:
        driver = driver_of(self.arena.driver, self.arena.device)
        self.place = place_at(driver.device)
        # The size in the manifest counts: the driver refuses a descriptor of another size.
        fd, _ = fetch_fd(self.arena.broker, self.arena.key, timeout_s=self._timeout_s)
        with ExitStack() as undo:  # at once: somebody may keep the exception
            self.allocation = Allocation.received(driver, fd, self.arena.nbytes)
            undo.callback(quietly, self.allocation.close)
            self._range = AddressRange(driver, self.arena.nbytes)
            undo.callback(quietly, self._range.close)
            self._range.map(self.allocation, writable=False)
            undo.pop_all()
        return self._range.address

    def _unmap(self) -> None:
        # A lost device takes nothing back, which must not stop the rest of a bridge from closing.
        quietly(self._range.close)
        quietly(self.allocation.close)

    def _is_quiet(self) -> bool:
        # A tensor may be dead while kernels that read it still run. The publisher may overwrite the
        # slot as soon as the lease ends, so they are waited for first.
        try:
            self.allocation.driver.fence()
        except (DeadlineExceeded, DriverError) as error:
            if isinstance(error, DeadlineExceeded) or error.code == CAPTURING:
                # A retired view may have no other user: it must not die with its lease.
                put_off(self.settle)
                return False
            _LOG.warning("a lease ends although the device does not answer: %s", error)
        return True


# ---- plain device memory: opened once, only ever read --------------------------------------------
#
# A legacy IPC handle opens memory to be written, and its owner's death takes the memory away. So
# nothing that a consumer is given lies there: `IPCView` is where a version is copied from, into
# memory of this process (`private_pin`), and what is copied is what is verified.

_USE_VMM = "Use cuda-vmm, or run CUDA IPC on a runtime where it was seen to work."
SHARE_NAMESPACES = (
    "Start both sides in one IPC and one process namespace (--ipc=host --pid=host, or those of one "
    "container)."
)


def ipc_namespace() -> int:
    """Number of this process's IPC namespace; 0 where the kernel does not tell."""
    try:
        return Path("/proc/self/ns/ipc").stat().st_ino
    except OSError:
        return 0


class IPCArenaRef(DeviceArena):
    """An arena with a legacy handle.

    Attributes:
        handle: the raw handle, in hexadecimal digits.
        namespace: the publisher's `ipc_namespace`, which tells why a handle does not open.

    """

    handle: Annotated[StrictStr, Field(pattern=rf"^[0-9a-f]{{{2 * IPC_HANDLE_NBYTES}}}$")]
    namespace: Annotated[StrictInt, Field(ge=0, lt=2**63)]

    @property
    def apart(self) -> str | None:
        """That the publisher is in another IPC namespace, if it is."""
        theirs, mine = self.namespace, ipc_namespace()
        if theirs == mine or 0 in {theirs, mine}:
            return None
        return f"the publisher is in IPC namespace {theirs} and this process in {mine}"


class IPCView(ArenaView):
    """A slot whose arena lies in another process's plain device memory, or in this one's own."""

    arena: IPCArenaRef
    driver: IPCDriver

    def __init__(self, ref: SegmentRef, arena: IPCArenaRef, *, transport: str) -> None:
        """Open the slot's segment and the arena's handle.

        Args:
            ref: the segment with the slot's lease and stamp.
            arena: where the arena is.
            transport: whose name errors give.

        Raises:
            SegmentError: it is gone, or not what the references say.
            TransportUnavailable: the handle does not open here; with the cause.
            DriverError: the handle is none.

        """
        self.arena = arena
        self._transport = transport
        super().__init__(ref, None)

    def _open(self) -> int:
        try:
            self.driver = driver_of(self.arena.driver, self.arena.device)
            self.place = place_at(self.driver.device)
            handle = bytes.fromhex(self.arena.handle)
            self._opening = Opening(self.driver, handle, self.ref)
            try:
                self._check_size()
            except BaseException:
                self._opening.close()  # at once: somebody may keep the exception
                raise
        except DriverError as error:
            if error.code == INVALID_VALUE:
                raise  # that is how a driver names a handle that is none
            raise self._blocked(error) from error
        return self._opening.address

    def _blocked(self, error: DriverError) -> TransportUnavailable:
        cause, remedy = f"CUDA IPC handle reconstruction failed: {error.cause}", error.remedy
        apart = self.arena.apart
        if apart is not None:
            cause, remedy = f"{cause}; {apart}", f"{SHARE_NAMESPACES} {_USE_VMM}"
        elif error.call == "cuIpcOpenMemHandle":
            cause += "; the publisher lives, and the memory is there"
            remedy = f"{error.remedy} {_USE_VMM}"
        return TransportUnavailable(self._transport, cause, remedy)

    def _check_size(self) -> None:
        # The stamp says how much of it is read. Where a driver does not tell the size of opened
        # memory, the publisher is believed: a lie would only harm its own reader.
        found = self.driver.size_at(self._opening.address)
        if found is not None and found < self.arena.nbytes:
            raise RangeBeyondSegment(
                f"the handle opens {found} bytes and the manifest says {self.arena.nbytes}. Send "
                "the manifest as it was published."
            )

    def require_owner(self) -> None:
        """Make sure that the memory is there to be read.

        Raises:
            SegmentError: its owner died or gave it up, and took it away.

        """
        if not still_there(self.ref):
            raise SegmentError(
                f"the publisher (pid {self.ref.pid}) died or closed, and its memory went with it: "
                "a legacy IPC handle keeps none. Import from its successor."
            )

    def _unmap(self) -> None:
        self._opening.close()


class _Private(Core):
    """Plain memory of this process, which nobody else can open."""

    def close(self) -> None:
        """Free it, when every kernel that may use it has ended."""
        if self.address and os.getpid() == self.held.pid:
            # A tensor may be dead while kernels that read it still run.
            self.driver.fence()
            self.give_back(self.driver.dealloc)


def private_pin(view: IPCView, nbytes: int) -> Pin:
    """Memory for a copy of a version, where `view` is; given back when its last tensor dies.

    Raises:
        WeightBridgeUnavailableError: no memory.

    """
    if view.place.device.type == "cpu":
        return anonymous_pin(nbytes)
    settle_late()
    nbytes = -(-max(nbytes, 1) // IPC_UNIT) * IPC_UNIT
    memory = _Private(view.driver)
    try:
        memory.address = view.driver.alloc(nbytes)
        pin = Pin(memory.address, nbytes, place=view.place)
        weakref.finalize(pin.buffer, quietly, memory.close).atexit = False
    except BaseException as error:
        quietly(memory.close)
        if isinstance(error, DriverError):
            raise WeightBridgeUnavailableError(
                f"{error.cause}: no memory for a copy of the update. Free some, then import it "
                "again."
            ) from error
        raise
    return pin
