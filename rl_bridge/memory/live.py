"""A live range: fixed addresses under which an engine's versions are exchanged, of either kind."""

from typing import Protocol

from rl_bridge.memory.flip import LiveRange
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.vmm.live import DeviceRange
from rl_bridge.memory.vmm.view import DeviceView

__all__ = ["Live", "live_range"]


class Live(Protocol):
    """What a flip needs: see `flip.LiveRange`, which does it with memory of the CPU."""

    pin: Pin

    @property
    def content(self) -> Pin | None:
        """The version that lies there now."""

    @property
    def address(self) -> int:
        """First byte; never changes."""

    def flip(self, new: Pin) -> Pin | None:
        """Put `new` there; returns what was there before. To undo, flip that one."""

    def empty(self) -> None:
        """Take the content out, so that only a reservation is left."""

    def shows(self, pin: Pin) -> bool:
        """Whether the memory of `pin` really lies here."""


def live_range(pin: Pin, arena_nbytes: int) -> Live:
    """Reserve addresses for versions like `pin`'s.

    Raises:
        WeightBridgeUnavailableError: no address space left.

    """
    if isinstance(pin.view, DeviceView):
        return DeviceRange(pin.view)
    return LiveRange(arena_nbytes)
