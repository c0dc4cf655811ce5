"""Flip: exchange what lies under an engine's fixed addresses, by moving page tables.

The engine's tensors are views of one reserved range, the *live* range. A new version is mapped and
verified at its own address while the engine still runs; then two moves exchange it with the old.
Addresses stay, nothing is copied, and the cost does not depend on the number of bytes. Undo is the
flip back. Between the moves the live range shows the old version: no hole ever opens.
"""

import weakref
from contextlib import suppress

from rl_bridge.errors import SegmentError, TornEngine, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.segment import require_resources
from rl_bridge.memory.views import Pin, SegmentView


class LiveRange:
    """A reserved range of addresses and the version that lies there now."""

    def __init__(self, arena_nbytes: int) -> None:
        """Reserve room for an arena of `arena_nbytes`; nothing lies there yet."""
        self.nbytes = vm.round_up(max(arena_nbytes, 1))
        try:
            address = vm.reserve(self.nbytes)
        except OSError as error:
            raise WeightBridgeUnavailableError(
                f"no {self.nbytes} bytes of addresses are left for the engine's weights: {error}. "
                "Raise the limit on address space (ulimit -v), or use mode='copy'."
            ) from error
        self.pin = Pin(address, self.nbytes)
        self.content: Pin | None = None
        """The version that lies there now; None also while that is not known."""
        # The range stays mapped, and its content leased, until the last tensor of the engine that
        # looks at it dies: even if this object is long gone.
        self._leased: list[Pin] = []
        weakref.finalize(self.pin.buffer, _end, address, self.nbytes, self._leased).atexit = False

    @property
    def address(self) -> int:
        """First byte; never changes."""
        return self.pin.address

    def flip(self, new: Pin) -> Pin | None:
        """Put `new` under the live range; returns what was there before.

        The engine must not run meanwhile (its caller quiesces it). To undo, flip the returned pin.

        Raises:
            SegmentError: `new` is no mapped segment, or the kernel refuses; nothing changed.
            WeightBridgeUnavailableError: no address space at this moment; nothing changed.
            TornEngine: the kernel refused half-way and again on the way back.

        """
        target, old = self._view(new), self.content
        away: SegmentView | None = None
        if old is not None and old.view is new.view:
            # Leased, so it is the same version, and live already: its own pages replace it, and
            # what was written over it goes. They are at the live range, not here. If they cannot
            # be had at once they fault in when they are read, and are the same.
            with suppress(SegmentError, WeightBridgeUnavailableError):
                target.prefault(self.nbytes)
        elif old is not None:
            # The old version's pages go back to their own address, where the next verification of
            # that slot finds them mapped.
            away = self._view(old)
            self._move(self.address, away.address)
        self.content = None
        try:
            self._move(target.address, self.address)
        except (SegmentError, WeightBridgeUnavailableError) as error:
            if away is not None:
                self._move_back(away, error)
            self.content = old
            raise
        self.content, self._leased[:] = new, [new]
        return old

    def _move_back(self, old: SegmentView, cause: Exception) -> None:
        try:
            self._move(old.address, self.address)
        except (SegmentError, WeightBridgeUnavailableError) as second:
            # The old version's pages wait at their own address for another try.
            raise TornEngine(
                f"the flip failed ({cause}) and so did the way back ({second}). Call recover() "
                "of the executor, or install a later version in full."
            ) from cause

    def empty(self) -> None:
        """Take the content out, so that only a reservation is left (undo of the first flip)."""
        old, self.content = self.content, None
        if old is not None:
            self._move(self.address, self._view(old).address)
        self._leased.clear()

    def shows(self, pin: Pin) -> bool:
        """Whether the kernel says that `pin`'s segment, from its first byte, lies here in full.

        Raises:
            WeightBridgeUnavailableError: this process is short of descriptors or memory.
            SegmentError: the kernel does not say.

        """
        view = self._view(pin)
        done = 0
        while done < self.nbytes:
            try:
                found = vm.mapped_file(self.address + done)
            except OSError as error:
                require_resources(error)
                raise SegmentError(
                    f"the kernel does not show what a flip mapped: {error}. Use mode='copy'."
                ) from error
            if (
                found is None
                or (found.device, found.inode) != (view.ref.device, view.ref.inode)
                or found.offset != done
            ):
                return False
            done += found.nbytes
        return True

    def _view(self, pin: Pin) -> SegmentView:
        if not isinstance(pin.view, SegmentView) or pin.view.nbytes < self.nbytes:
            raise SegmentError(
                "a flip needs the mapped segment of a shared-memory update; this one was copied "
                "in. Use mode='copy' or 'alias' with this transport."
            )
        return pin.view

    def _move(self, source: int, target: int) -> None:
        try:
            vm.move(source, self.nbytes, target)
        except OSError as error:
            require_resources(error)
            raise SegmentError(
                f"the kernel does not move mappings ({error}); flips need Linux 5.13. Use "
                "mode='copy'."
            ) from error


def _end(address: int, nbytes: int, leased: list[Pin]) -> None:
    vm.unmap(address, nbytes)
    leased.clear()
