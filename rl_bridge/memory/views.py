"""The consumer's side of a slot: map it once, lease it per version, hand out tensors.

A mapping is private: reading shares the publisher's pages, writing makes a copy of the page that is
this process's own, so a consumer can neither change a published version nor crash by writing to it.
The mapping stays for as long as the publisher keeps the slot; what comes and goes per version is a
*pin*: it holds the lease, and every tensor holds the pin. The lease ends when the last tensor dies.
"""

import ctypes
import os
import threading
import weakref
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rl_bridge.errors import SegmentError, StaleUpdate, WeightBridgeUnavailableError
from rl_bridge.memory import leases, vm
from rl_bridge.memory.segment import (
    SegmentRef,
    close_fd,
    open_segment,
    require_resources,
    still_there,
)
from rl_bridge.memory.slots import read_stamp

__all__ = ["Pin", "SegmentView", "ViewCache", "anonymous_pin", "tensor_in"]


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
        view: the segment behind it; None for anonymous memory.

    """

    def __init__(self, address: int, nbytes: int, view: "SegmentView | None" = None) -> None:
        """Describe a range; `buffer` is what keeps it alive."""
        self.buffer: ctypes.Array[ctypes.c_char] = _range_type(nbytes).from_address(address)
        self.address = address
        self.nbytes = nbytes
        self.view = view


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
            return torch.empty(0, dtype=torch.uint8, device="cpu").view(kind).view(shape)
        flat = torch.frombuffer(
            pin.buffer, dtype=kind, count=nbytes // kind.itemsize, offset=offset
        )
        return flat if len(shape) == 1 else flat.view(shape)


def anonymous_pin(nbytes: int) -> Pin:
    """Fresh zero-filled memory of this process, given back when its last tensor dies.

    Raises:
        WeightBridgeUnavailableError: no memory.

    """
    nbytes = vm.round_up(max(nbytes, 1))
    try:
        address = vm.map_anonymous(nbytes)
    except OSError as error:
        msg = f"no {nbytes} bytes of memory for a copy of an update: {error}. Free some, try again."
        raise WeightBridgeUnavailableError(msg) from error
    pin = Pin(address, nbytes)
    weakref.finalize(pin.buffer, vm.unmap, address, nbytes).atexit = False
    return pin


class SegmentView:
    """A publisher's segment, mapped here; `pin` leases the version that it holds now."""

    def __init__(self, ref: SegmentRef, directory: Path | None) -> None:
        """Open, check and map the segment.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        self.ref = ref
        self.directory = directory
        self.nbytes = ref.nbytes
        self.fd = open_segment(ref, directory=directory)
        try:
            self.address = vm.reserve(self.nbytes)
            try:
                vm.map_fixed(self.address, self.nbytes, self.fd)
            except OSError:
                vm.unmap(self.address, self.nbytes)
                raise
        except OSError as error:
            close_fd(self.fd)
            require_resources(error)
            msg = (
                f"segment inode {ref.inode} of {self.nbytes} bytes cannot be mapped: {error}. "
                "Publish again, or use local-clone in one process."
            )
            raise SegmentError(msg) from error
        # Reentrant: a pin's finalizer may run inside any allocation, also under this lock.
        self._lock = threading.RLock()
        # Whose lives count is asked, not kept in a counter: an interrupt in the middle of a
        # finalizer would leave a counter wrong for good.
        self._pins: list[weakref.ref[object]] = []
        self._retired = False
        self._is_unmapped = False
        self._pid = os.getpid()

    @property
    def is_pinned(self) -> bool:
        """Whether any tensor of this segment lives."""
        with self._lock:
            # It only looks, and at a copy: a tensor that dies meanwhile asks too, in this very
            # thread. If both wrote, the outer one would strike out what the inner one had moved.
            return any(pin() is not None for pin in list(self._pins))

    def pin(self, update_id: str, generation: int, arena_nbytes: int) -> Pin:
        """Lease the version that the segment holds.

        Raises:
            StaleUpdate: the slot holds another version by now, or is being written.
            SegmentError: the segment shrank.

        """
        if arena_nbytes > self.nbytes - vm.PAGE:
            raise SegmentError(self._another_size(update_id, self.nbytes - vm.PAGE, arena_nbytes))
        with self._lock:
            # Noted as living before the lease is taken and the stamp is read: a finalizer of an
            # older pin, which may run in between, then does not give the lease back.
            pin = self._make_pin(max(arena_nbytes, 1))
            try:
                self._lease(update_id)
                self._check_stamp(update_id, generation, arena_nbytes)
            except BaseException:
                del pin
                self.settle()
                raise
            return pin

    def _lease(self, update_id: str) -> None:
        if not leases.try_shared(self.fd):
            raise StaleUpdate(self._overwritten(update_id, "is being overwritten"))

    def _make_pin(self, nbytes: int) -> Pin:
        self._prune()
        pin = Pin(self.address, nbytes, self)
        life: weakref.ref[object] = weakref.ref(pin.buffer)
        self._pins.append(life)
        weakref.finalize(pin.buffer, self.settle).atexit = False
        return pin

    def _prune(self) -> None:
        """Forget the pins that are dead, one at a time: a collection may come in anywhere."""
        for life in list(self._pins):
            if life() is None:
                self._pins.remove(life)

    def _check_stamp(self, update_id: str, generation: int, arena_nbytes: int) -> None:
        stamp = read_stamp(self.fd, self.ref)
        if (stamp.update_id, stamp.generation) != (update_id, generation):
            raise StaleUpdate(self._overwritten(update_id, f"holds update {stamp.update_id}"))
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
            if self.is_pinned or self._is_unmapped:
                return
            leases.unlock(self.fd)
            if self._retired:
                self._close()

    def retire(self) -> None:
        """Unmap as soon as no tensor needs it any more."""
        with self._lock:
            self._retired = True
            if not (self.is_pinned or self._is_unmapped):
                self._close()

    def _close(self) -> None:
        self._is_unmapped = True
        vm.unmap(self.address, self.nbytes)
        close_fd(self.fd)

    def refresh(self, address: int, nbytes: int) -> bool:
        """Drop this process's own copies of pages, which date from an earlier version.

        Returns:
            Whether there could be any: the caller then reads again.

        """
        low = address // vm.PAGE * vm.PAGE
        high = vm.round_up(address + nbytes)
        own = vm.private_ranges(low, high - low)
        if own is None:
            own = [(low, high - low)]
        for start, size in own:
            vm.drop_pages(start, size)
        return bool(own)

    def prefault(self, nbytes: int) -> None:
        """Have the pages of the first `nbytes` present at the segment's own address.

        Raises:
            WeightBridgeUnavailableError: this process is short of memory.
            SegmentError: a page cannot be read.

        """
        try:
            vm.prefault(self.address, vm.round_up(max(nbytes, 1)))
        except OSError as error:
            require_resources(error)
            msg = (
                f"pages of segment inode {self.ref.inode} cannot be read: {error}. The update is "
                "lost: publish again."
            )
            raise SegmentError(msg) from error


class ViewCache:
    """A consumer's mapped segments: mapped once, kept while their publisher keeps them."""

    def __init__(self, directory: Path | None = None) -> None:
        """Start empty; `directory` is where named segments are looked for."""
        self._directory = directory
        self._views: dict[tuple[int, int], SegmentView] = {}

    def get(self, ref: SegmentRef) -> SegmentView:
        """Find or map a segment.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        key = (ref.device, ref.inode)
        view = self._views.get(key)
        if view is None or view.ref != ref:
            self.sweep()
            known, view = view, SegmentView(ref, self._directory)
            self._views[key] = view
            if known is not None:
                known.retire()  # the same file by another way: nobody would find it again
        return view

    def sweep(self) -> None:
        """Let go of segments that their publisher gave back: they would only hold memory."""
        for key, view in list(self._views.items()):
            view.settle()
            if not view.is_pinned and not still_there(view.ref, directory=self._directory):
                view.retire()
                del self._views[key]

    def close(self) -> None:
        """Let go of everything that no tensor needs; the rest goes with its last tensor."""
        for view in self._views.values():
            view.retire()
        self._views.clear()

    def __len__(self) -> int:
        """Count the mapped segments."""
        return len(self._views)
