"""The consumer's side of a slot: map it once, lease it per version, hand out tensors.

A mapping is private: reading shares the publisher's pages, writing makes a copy of the page that is
this process's own, so a consumer can neither change a published version nor crash by writing to it.
The mapping stays for as long as the publisher keeps the slot; what comes and goes per version is a
*pin*: it holds the lease, and every tensor holds the pin. The lease ends when the last tensor dies.

How the arena of a slot is reached differs: `SegmentView` is for memory of the CPU, `rl_bridge.cuda`
has views of a device's.
"""

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from rl_bridge.errors import (
    SegmentError,
    StaleUpdate,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.digest import digest_rows, digests_differ
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.holding import Holding
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.places import CPU_PLACE, Pass, Place
from rl_bridge.memory.segment import SegmentRef, open_segment, require_resources, still_there
from rl_bridge.memory.slots import Stamp, read_stamp


@lru_cache(maxsize=32)
def _range_type(nbytes: int) -> Any:
    # A subclass, because instances of plain ctypes arrays take no weak references' callbacks. Some
    # are kept: ctypes never forgets `c_char * n`, and one made for each pin would wait for the
    # garbage collector, which some trainers switch off.
    return type("PinnedRange", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": nbytes})


class Pin:
    """Keeps an address range alive: as long as it, or a tensor made from it, lives.

    Attributes:
        address: first byte.
        nbytes: size.
        view: the leased slot behind it; None for memory that no publisher writes.
        place: what can read and write there.
        header: digest of the header of the manifest that the bytes were published with; None where
            none was sealed.

    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        view: "LeasedView | None" = None,
        *,
        place: Place = CPU_PLACE,
    ) -> None:
        """Describe a range; `buffer` keeps it alive, and nothing is read through it."""
        self.buffer: ctypes.Array[ctypes.c_char] = _range_type(nbytes).from_address(address)
        self.address = address
        self.nbytes = nbytes
        self.view = view
        self.place = place
        self.header: bytes | None = None


def tensor_in(
    pin: Pin, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor that aliases `nbytes` bytes at `offset` of a pinned range, without a copy.

    Each tensor has a storage of its own, which starts at its first byte and keeps the pin.
    """
    # No inference tensors: as an engine's weights, no later version could take their place.
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
        kind: torch.dtype = getattr(torch, dtype)
        if nbytes == 0:
            # By way of bytes: torch warns of some dtypes (complex32) when asked outright.
            empty = torch.empty(0, dtype=torch.uint8, device=pin.place.device)
            return empty.view(kind).view(shape)
        flat = pin.place.tensor(pin.buffer, offset, nbytes, kind)
        return flat if len(shape) == 1 else flat.view(shape)


def anonymous_pin(nbytes: int) -> Pin:
    """Fresh zero-filled memory of this process, given back when its last tensor dies."""
    nbytes = vm.round_up(max(nbytes, 1))
    try:
        address = vm.map_anonymous(nbytes)
    except OSError as error:
        raise WeightBridgeUnavailableError(
            f"no {nbytes} bytes of memory for a copy of an update: {error}. Free some, try again."
        ) from error
    pin = Pin(address, nbytes)
    weakref.finalize(pin.buffer, vm.unmap, address, nbytes).atexit = False
    return pin


class LeasedView(ABC):
    """A publisher's slot, reached from here; `pin` leases the version that it holds now."""

    place: Place = CPU_PLACE

    def __init__(self, ref: SegmentRef, directory: Path | None) -> None:
        """Open and check the slot's segment, and make its arena readable.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        self.ref = ref
        self.directory = directory
        # A pinned view is not dropped: its pins' finalizers hold it.
        self._held = Holding(self)
        self.fd = open_segment(ref, directory=directory, held=self._held)
        try:
            self.address = self._open()
        except BaseException:
            self._held.dispose()  # at once: a caller may keep the exception
            raise
        # Reentrant: a pin's finalizer may run inside any allocation, also under this lock.
        self._lock = threading.RLock()
        # The pins that live. They are not looked at: that takes a reference, which may be the last
        # one by the time it is dropped, and the pin would die under the lock.
        self._pins: list[weakref.ref[object]] = []
        self._is_leased = False
        self._is_retired = False
        self._is_over = False
        self._pid = os.getpid()

    @property
    def where(self) -> Hashable:
        """What leads here: another one leads to another slot."""
        return self.ref

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that the arena has room for."""

    @abstractmethod
    def _open(self) -> int:
        """Make the arena readable; returns its first address."""

    def _is_quiet(self) -> bool:
        """Whether no read of the last tensor's bytes still runs. Asked again if one does."""
        return True

    def _unmap(self) -> None:  # noqa: B027 - what is noted suffices as a rule
        """Give back what `_open` made, but for what it noted in `_held`."""

    @abstractmethod
    def refresh(self, address: int, nbytes: int) -> bool:
        """Drop this process's own copies of pages, which date from an earlier version.

        Returns:
            Whether there could be any: the caller then reads again.

        """

    @abstractmethod
    def prefault(self, nbytes: int) -> None:
        """Have the first `nbytes` present at the slot's own address.

        Raises:
            WeightBridgeUnavailableError: this process is short of memory.
            SegmentError: a page cannot be read.

        """

    @property
    def is_pinned(self) -> bool:
        """Whether any tensor of this segment lives."""
        return bool(self._pins)

    def pin(self, update_id: str, generation: int, arena_nbytes: int) -> Pin:
        """Lease the version that the segment holds.

        Raises:
            StaleUpdate: the slot holds another version by now, or is being written.
            SegmentError: the segment shrank.

        """
        if arena_nbytes > self.capacity:
            raise SegmentError(self._another_size(update_id, self.capacity, arena_nbytes))
        # Noted as living before the lease is taken and the stamp is read: a finalizer of an older
        # pin, which may run in between, then does not give the lease back.
        pin = Pin(self.address, max(arena_nbytes, 1), self, place=self.place)
        # In this order: when the pin dies, what was registered last is called first.
        weakref.finalize(pin.buffer, self.settle).atexit = False
        self._pins.append(weakref.ref(pin.buffer, self._pins.remove))
        try:
            with self._lock:
                self._is_leased = True
                if not leases.try_shared(self.fd):
                    raise StaleUpdate(self._overwritten(update_id, "is being overwritten"))  # noqa: TRY301
                stamp = read_stamp(self.fd, self.ref)
                self._check_stamp(stamp, update_id, generation, arena_nbytes)
                pin.header = stamp.header
        except BaseException:
            del pin  # a caller that keeps the exception must not keep the lease
            raise
        return pin

    def _check_stamp(
        self, stamp: Stamp, update_id: str, generation: int, arena_nbytes: int
    ) -> None:
        if (stamp.update_id, stamp.generation) != (update_id, generation):
            holds = f"holds update {stamp.update_id}" if int(stamp.update_id, 16) else "is free"
            raise StaleUpdate(self._overwritten(update_id, holds))
        if stamp.arena_nbytes != arena_nbytes:
            raise SegmentError(self._another_size(update_id, stamp.arena_nbytes, arena_nbytes))

    @staticmethod
    def _another_size(update_id: str, found: int, expected: int) -> str:
        return (
            f"update {update_id}: its slot holds {found} bytes, the manifest says {expected}. Use "
            "the manifest as it was published, or publish again."
        )

    def _overwritten(self, update_id: str, what: str) -> str:
        return (
            f"update {update_id} is gone: its slot {what}. The publisher released it before this "
            "side imported it. Import the publisher's latest manifest."
        )

    def settle(self) -> None:
        """Give the lease back if no tensor lives; harmless at any time."""
        if os.getpid() != self._pid:
            return  # before the lock: at the fork, another thread of the parent may have held it
        with self._lock:
            if self._pins or self._is_over:
                return
            if self._is_leased:
                # The wait runs signals' handlers and finalizers, which may pin in this very thread.
                if not self._is_quiet() or self._pins:
                    return
                leases.unlock(self.fd)
                self._is_leased = False
            is_over = self._is_over = self._is_retired
        if is_over:
            # Not under the lock: what ends here may wait for a thread that collects a tensor, whose
            # end waits for this lock.
            try:
                self._unmap()
            finally:
                self._held.dispose()

    def retire(self) -> None:
        """Unmap as soon as no tensor needs it any more."""
        self._is_retired = True
        self.settle()


_View = TypeVar("_View", bound=LeasedView)


class SegmentView(LeasedView):
    """A publisher's segment, mapped here privately."""

    @property
    def nbytes(self) -> int:
        """Size of the mapping."""
        return self.ref.nbytes

    @property
    def capacity(self) -> int:
        """Bytes that the arena has room for: all but the stamp's page."""
        return self.ref.nbytes - vm.PAGE

    def _open(self) -> int:
        try:
            address: int = self._held.reserve(self.nbytes)
            vm.map_fixed(address, self.nbytes, self.fd)
        except OSError as error:
            require_resources(error)
            raise SegmentError(
                f"segment inode {self.ref.inode} of {self.nbytes} bytes cannot be mapped: {error}. "
                "Publish again, or use local-clone in one process."
            ) from error
        return address

    def refresh(self, address: int, nbytes: int) -> bool:
        """See `LeasedView`."""
        low = address // vm.PAGE * vm.PAGE
        high = vm.round_up(address + nbytes)
        own = vm.private_ranges(low, high - low)
        if own is None:
            own = [(low, high - low)]
        for start, size in own:
            vm.drop_pages(start, size)
        return bool(own)

    def prefault(self, nbytes: int) -> None:
        """See `LeasedView`."""
        try:
            vm.prefault(self.address, vm.round_up(max(nbytes, 1)))
        except OSError as error:
            require_resources(error)
            raise SegmentError(
                f"pages of segment inode {self.ref.inode} cannot be read: {error}. The update is "
                "lost: publish again."
            ) from error


class ViewCache:
    """A consumer's mapped segments: mapped once, kept while their publisher keeps them."""

    def __init__(self, directory: Path | None = None) -> None:
        """Start empty; `directory` is where named segments are looked for."""
        self._directory = directory
        self._views: dict[tuple[int, int], LeasedView] = {}

    def get(self, ref: SegmentRef) -> SegmentView:
        """Find or map a segment; raises what `LeasedView` raises."""
        return self.find(ref, ref, lambda: SegmentView(ref, self._directory))

    def find(self, ref: SegmentRef, where: Hashable, make: Callable[[], _View]) -> _View:
        """Find or make the view of the slot whose segment is `ref`, reached by `where`."""
        key = (ref.device, ref.inode)
        known: Any = self._views.get(key)
        if known is not None and known.where == where:
            return known  # type: ignore[no-any-return]  # the same `where` is the same kind
        self.sweep()
        view = self._views[key] = make()
        if known is not None:
            known.retire()  # the same file by another way: it would not be found again
        return view

    def sweep(self) -> None:
        """Release segments that their publisher gave back: they would only hold memory."""
        for key, view in list(self._views.items()):
            view.settle()
            if not view.is_pinned and not still_there(view.ref, directory=self._directory):
                view.retire()
                del self._views[key]

    def close(self) -> None:
        """Release everything that no tensor needs; the rest goes with its last tensor."""
        for view in self._views.values():
            view.retire()
        self._views.clear()

    def __len__(self) -> int:
        return len(self._views)


class ImportedTensors(Mapping[str, torch.Tensor]):
    """An imported update: name -> tensor, each made when it is asked for.

    Tied names give the same tensor. The mapping and every tensor from it keep the version's bytes
    alive, also after ``release``; writing to a tensor changes this process's copy only.
    """

    def __init__(self, table: TensorTable, pin: Pin | None) -> None:
        """Look at a pinned arena through its layout; None: it is not pinned yet."""
        self.table = table
        self.manifest: WeightUpdateManifest | None = None
        """The assembled tensors' own manifest; None if the update has one part."""
        self.held = pin
        self.device = (CPU_PLACE if pin is None else pin.place).device
        self._made: dict[int, torch.Tensor] = {}

    @property
    def pin(self) -> Pin:
        """The memory behind it."""
        if self.held is None:
            raise WeightUpdateRejectedError(
                "these are the tensors of an update that was refused or undone: they are gone."
            )
        return self.held

    def forget(self) -> None:
        """Release the memory, although the mapping may be held: by a kept exception, for instance.

        Tensors that were taken from it keep their bytes.
        """
        self.held = None
        self._made = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        table = self.table
        row = table.rows[name]
        tensor = self._made.get(row)
        if tensor is None:
            place = table.offsets[row], table.nbytes[row], table.dtypes[row], table.shapes[row]
            tensor = self._made.setdefault(row, tensor_in(self.pin, *place))
        return tensor

    def __contains__(self, name: object) -> bool:
        """Look at the names only."""
        return name in self.table.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.rows)

    def __len__(self) -> int:
        return len(self.table.rows)

    def __repr__(self) -> str:
        """Say how many there are rather than printing weights."""
        return f"<{len(self)} imported tensors, {self.table.total_nbytes} bytes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{len(self)} imported tensors cannot be pickled or copied as they are: they lie in "
            "memory of a publisher. Copy the tensors, {name: t.clone() for name, t in ...items()}, "
            "or send the manifest and import it in the other process."
        )

    @property
    def addresses(self) -> Addresses:
        """Address of each stored tensor's bytes, uint64, in layout order."""
        return self.table.offset_column + np.uint64(self.pin.address)


class Attachment:
    """An update's bytes, readable in this process."""

    def __init__(
        self,
        table: TensorTable,
        pin: Pin | None,
        plan: Pass | None = None,
        *,
        num_threads: int | None = None,
        is_part: bool = False,
    ) -> None:
        """Attach to a pinned arena; `plan` digests it.

        `num_threads` threads do; None takes the usable cores, at most 8. With `is_part`, the arena
        holds only the ranges that were asked for. If none were, it may lack the room for the
        others, and `pin` may be None: there is no arena then.
        """
        self.tensors = ImportedTensors(table, pin)
        self.is_part = is_part
        self.num_threads = num_threads
        self._plan = plan
        self._arrived: bytes | None = None

    @property
    def is_digested(self) -> bool:
        """Whether this side digested the whole arena while it wrote it, and nobody asked yet."""
        return self._arrived is not None

    def digested(self, arrived: bytes | None) -> None:
        """Note what this side itself digested when it wrote the arena; None where it did not."""
        self._arrived = arrived

    def digests(self) -> bytes:
        """Digest the bytes through the very mapping that will be installed: 16 bytes per tensor.

        What was noted by `digested` is taken the first time, if that is what the mapping shows: no
        page of it was written to in this process.
        """
        arrived, self._arrived = self._arrived, None  # the next look is at the bytes
        if arrived is not None:
            pin = self.tensors.pin
            if pin.place.private_ranges(pin.address, vm.round_up(pin.nbytes)) == []:
                return arrived
        return self._digest_all()

    def _digest_all(self) -> bytes:
        assert self._plan is not None
        return self._plan.digest(self.tensors.addresses, num_threads=self.num_threads)

    def refresh(self, expected: bytes, found: bytes) -> bytes:
        """Read again those tensors that differ, after dropping this process's own stale pages.

        Pages that a consumer wrote to while it held an earlier version of the slot still show that
        version. Dropping them costs nothing in the common case, where nothing differs.

        Returns:
            The digests, with those of the differing tensors computed anew.

        """
        view = self.tensors.pin.view
        if view is None:
            return found
        table = self.tensors.table
        rows = np.flatnonzero(digests_differ(expected, found))
        addresses = self.tensors.addresses[rows]
        sizes = table.nbytes_column[rows]
        # All are dropped before any is read: several tensors may share a page.
        places = zip(addresses.tolist(), sizes.tolist(), strict=True)
        dropped = [view.refresh(address, nbytes) for address, nbytes in places]
        if not any(dropped):
            return found
        plan = self.tensors.pin.place.plan(sizes)
        again = bytearray(found)
        digest_rows(again)[rows] = digest_rows(plan.digest(addresses, num_threads=self.num_threads))
        return bytes(again)
