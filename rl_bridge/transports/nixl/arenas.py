"""Slots whose memory an agent knows: registered once, when they are made."""

import itertools
from dataclasses import dataclass

from rl_bridge.errors import SegmentError
from rl_bridge.memory.pins import Pin
from rl_bridge.memory.slots import Slot
from rl_bridge.transports._wire.arenas import Arenas
from rl_bridge.transports.nixl.agent import AgentError, Kind, Region
from rl_bridge.transports.nixl.host import Host

__all__ = ["Registered", "RegisteredArenas"]


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """What an agent knows of a slot.

    Attributes:
        number: no two slots of one process have the same.
        regions: the arena's with the stamp's, or one each.
        memory: the arena's kind.
        device: its number.
        address: by which readers know the arena.
        stamp: by which they know the stamp.

    """

    number: int
    regions: tuple[Region, ...]
    memory: Kind
    device: int
    address: int
    stamp: int


class RegisteredArenas(Arenas):
    """Arenas of any kind, whose slots are registered with one agent for as long as they live."""

    def __init__(self, inner: Arenas, agent: Host) -> None:
        """Make slots by `inner`."""
        self.place = inner.place
        self._inner = inner
        self._agent = agent
        self._numbers = itertools.count(1)
        self._known: dict[Slot, Registered] = {}

    def make_slot(self, name: str, arena_nbytes: int) -> Slot:
        """Make a slot and register it.

        Raises:
            SegmentError: there is no memory, or the library refuses it.

        """
        slot = self._inner.make_slot(name, arena_nbytes)
        try:
            self._known[slot] = self._register(slot)
        except AgentError as error:
            slot.close()
            msg = (
                f"a slot of {slot.nbytes} bytes cannot be read from elsewhere: {error} Raise the "
                "limit of locked memory (ulimit -l), or lower max_slots."
            )
            raise SegmentError(msg) from error
        except BaseException:
            slot.close()
            raise

        def forget() -> None:
            # What a late reader still sees of these pages is no version any more.
            slot.stamp(None, 0)
            for region in self._known.pop(slot).regions:
                self._agent.deregister(region)

        slot.before_close = forget
        return slot

    def _register(self, slot: Slot) -> Registered:
        number = next(self._numbers)
        if slot.arena is None:
            whole = self._agent.register_segment(slot.segment)
            stamp_at = whole.address + slot.stamp_address - slot.segment.address
            return Registered(number, (whole,), "DRAM", 0, whole.address, stamp_at)
        device = self.place.device.index or 0
        kind: Kind = "DRAM" if self.place.device.type == "cpu" else "VRAM"
        arena = self._agent.register([(slot.arena.address, slot.arena.nbytes)], kind, device)
        try:
            stamp = self._agent.register([(slot.segment.address, slot.segment.nbytes)], "DRAM")
        except BaseException:
            self._agent.deregister(arena)
            raise
        regions = (arena, stamp)
        return Registered(number, regions, kind, device, slot.address, slot.stamp_address)

    def move_to(self, agent: Host) -> None:
        """Register everything anew, with an agent that takes the place of one that was closed.

        Raises:
            AgentError: the library refuses.

        """
        self._agent = agent
        for slot in self._known:
            self._known[slot] = self._register(slot)

    def known(self, slot: Slot) -> Registered:
        """What the agent knows of a slot."""
        return self._known[slot]

    def pin(self, slot: Slot, update_id: str, arena_nbytes: int) -> Pin:
        """Lease the version in a slot."""
        return self._inner.pin(slot, update_id, arena_nbytes)

    def sweep(self) -> None:
        """Let go of views of slots that were given back."""
        self._inner.sweep()

    def close(self) -> None:
        """Let go of everything that no tensor needs."""
        self._inner.close()
