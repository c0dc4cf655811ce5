"""Reading parts of a version straight into the arena that is made of them.

Else a part is read into memory of the transport's, and copied from there. `ConsumerEnd.read_into`
says which transports can do without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_bridge.memory.slots import Slot

__all__ = ["Landed", "Landing"]


class Landing(Protocol):
    """An arena of this side's own, which several parts are read into, without a copy between."""

    def reserve(self) -> Slot:
        """Find room, for each attempt anew; it comes back by `abandon`, or in what landed.

        Its `update_id` is `ARRIVING` from before the first byte may land until none can any more.

        Raises:
            WeightBridgeError: there is none.

        """

    def arrived(self, place: int, mark: int) -> None:
        """Of the part at that place of the request, the first `mark` bytes of its arena are there.

        (Those that were asked for.) Called with rising marks, in one thread; returns at once.
        """

    def abandon(self, slot: Slot) -> None:
        """Take a slot back: nothing can land there any more."""


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of a `Landing`.

    Attributes:
        slot: where the ranges are.
        headers: of each part, what its publisher sealed beside its bytes: see `seal_header`.

    """

    slot: Slot
    headers: Sequence[bytes | None]
