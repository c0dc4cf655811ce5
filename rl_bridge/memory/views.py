"""The consumer's side of a slot: map it once, lease it per version, hand out tensors.

A mapping is private: reading shares the publisher's pages, writing makes a copy of the page that is
this process's own, so a consumer can neither change a published version nor crash by writing to it.
The mapping stays for as long as the publisher keeps the slot; what comes and goes per version is a
*pin*: it holds the lease, and every tensor holds the pin. The lease ends when the last tensor dies.
"""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from rl_bridge.errors import SegmentError
from rl_bridge.memory import vm
from rl_bridge.memory.leased import LeasedView
from rl_bridge.memory.segment import SegmentRef, require_resources, still_there

__all__ = ["SegmentView", "ViewCache"]

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
            msg = (
                f"segment inode {self.ref.inode} of {self.nbytes} bytes cannot be mapped: {error}. "
                "Publish again, or use local-clone in one process."
            )
            raise SegmentError(msg) from error
        return address

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
        self._views: dict[tuple[int, int], LeasedView] = {}

    def get(self, ref: SegmentRef) -> SegmentView:
        """Find or map a segment.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        return self.find(ref, ref, lambda: SegmentView(ref, self._directory))

    def find(self, ref: SegmentRef, where: Hashable, make: Callable[[], _View]) -> _View:
        """Find or make the view of the slot whose segment is `ref`, reached by `where`.

        Raises:
            SegmentError: it is gone, or not what `ref` says.
            WeightBridgeUnavailableError: this process is short of memory or descriptors.

        """
        key = (ref.device, ref.inode)
        view: Any = self._views.get(key)
        if view is None or view.where != where:
            self.sweep()
            known, view = view, make()
            self._views[key] = view
            if known is not None:
                known.retire()  # the same file by another way: nobody would find it again
        return view  # type: ignore[no-any-return]  # the same `where` is the same kind

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
