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

__all__ = ["LiveRange"]


class LiveRange:
    """A reserved range of addresses and the version that lies there now."""

    def __init__(self, arena_nbytes: int) -> None:
        """Reserve room for an arena of `arena_nbytes`; nothing lies there yet.

        Raises:
            WeightBridgeUnavailableError: no address space left.

        """
        self.nbytes = vm.round_up(max(arena_nbytes, 1))
        try:
            address = vm.reserve(self.nbytes)
        except OSError as error:
            msg = (
                f"no {self.nbytes} bytes of addresses are left for the engine's weights: {error}. "
                "Raise the limit on address space (ulimit -v), or use mode='copy'."
            )
            raise WeightBridgeUnavailableError(msg) from error
        self.pin = Pin(address, self.nbytes)
        # The range stays mapped, and its content leased, until the last tensor of the engine that
        # looks at it dies: even if this object is long gone.
        self._held: list[Pin | None] = [None]
        # The flip under way: new version; how many moves it takes; one entry for each move that
        # the kernel made, and one for the move that takes a flip back.
        self._flip: tuple[Pin, int, list[int], list[int]] | None = None
        weakref.finalize(self.pin.buffer, _let_go, address, self.nbytes, self._held).atexit = False

    @property
    def content(self) -> Pin | None:
        """The version that lies there now."""
        self._settle()
        return self._held[0]

    def _settle(self) -> None:
        """End a flip that an interrupt cut off: before its last move, it did not happen."""
        if self._flip is None:
            return
        new, needed, moves, back = self._flip
        old = self._held[0]
        if len(moves) == needed:
            self._held[0] = new
        elif old is not None and moves and not back:
            self._move(self._view(old).address, self.address, back)
        self._flip = None

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
        target = self._view(new)
        old = self.content
        # Leased, so it is the same version, and live already: its own pages replace it, and what
        # was written over it since goes, as it would if another version came in between.
        is_itself = old is not None and old.view is new.view
        if is_itself:
            # Its pages are at the live range, not here. If they cannot be had at once they fault in
            # when they are read, and are the same.
            with suppress(SegmentError, WeightBridgeUnavailableError):
                target.prefault(self.nbytes)
        moves: list[int] = []
        self._flip = (new, 1 if old is None or is_itself else 2, moves, [])
        try:
            if old is not None and not is_itself:
                # The old version's pages go back to their own address, where the next verification
                # of that slot finds them mapped.
                self._move(self.address, self._view(old).address, moves)
            self._move(target.address, self.address, moves)
        except (SegmentError, WeightBridgeUnavailableError) as error:
            try:
                self._settle()
            except (SegmentError, WeightBridgeUnavailableError) as second:
                # The old version's pages wait at their own address for another try.
                self._held[0] = self._flip = None
                msg = (
                    f"the flip failed ({error}) and so did the way back ({second}). Call recover() "
                    "of the executor, or install a later version in full."
                )
                raise TornEngine(msg) from error
            raise
        self._settle()
        return old

    def empty(self) -> None:
        """Take the content out, so that only a reservation is left (undo of the first flip)."""
        old, self._held[0] = self.content, None
        if old is not None:
            self._move(self.address, self._view(old).address, [])

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
                msg = f"nobody can tell what a flip mapped: {error}. Use mode='copy'."
                raise SegmentError(msg) from error
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
            msg = (
                "a flip needs the mapped segment of a shared-memory update; this one was copied "
                "in. Use mode='copy' or 'alias' with this transport."
            )
            raise SegmentError(msg)
        return pin.view

    def _move(self, source: int, target: int, done: list[int]) -> None:
        try:
            vm.move(source, self.nbytes, target, done)
        except OSError as error:
            require_resources(error)
            msg = (
                f"the kernel does not move mappings ({error}); flips need Linux 5.13. Use "
                "mode='copy'."
            )
            raise SegmentError(msg) from error


def _let_go(address: int, nbytes: int, held: list[Pin | None]) -> None:
    vm.unmap(address, nbytes)
    held.clear()
