"""Slots that are registered with an agent: once, when they are made, until they are closed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Pin
from rl_bridge.transports.nixl.agent import AgentError, Host, Kind, Region
from rl_bridge.transports.wire.arenas import Arenas

_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class SlotRegistration:
    """The registration of a slot with an agent.

    Attributes:
        number: unique among the slots of one process.
        regions: one region that begins with the arena and has the stamp, or one for each.
        memory: the kind of the arena's memory.
        device: the device's number.
        stamp_offset: first byte of the stamp in the last region.

    """

    number: int
    regions: tuple[Region, ...]
    memory: Kind
    device: int
    stamp_offset: int

    @property
    def address(self) -> int:
        """The arena's address, as readers use it."""
        return self.regions[0].address

    @property
    def stamp(self) -> int:
        """The stamp's address, as readers use it."""
        return self.regions[-1].address + self.stamp_offset


class SlotRegistry:
    """Slots that are registered with one agent, for as long as they live."""

    def __init__(self, agent: Host, device: torch.device) -> None:
        """Start empty; `device` is where the arenas lie."""
        self._agent = agent
        self._device = device
        self._known: dict[Slot, SlotRegistration] = {}

    def add(self, slot: Slot, *, before_end: Callable[[], None] | None = None) -> SlotRegistration:
        """Register a slot that is not known yet, until it is closed: then first `before_end`.

        Raises:
            SegmentError: the library refuses its memory.

        """
        known = self._known.get(slot)
        if known is not None:
            return known

        def forget() -> None:
            if before_end is not None:
                before_end()
            slot.stamp(None, 0)  # so a late reader sees that it is no longer a version
            ended = self._known.pop(slot, None)
            for region in () if ended is None else ended.regions:
                self._agent.deregister(region)

        try:
            known = self._known[slot] = self._register(slot)
        except AgentError as error:
            raise _refused(slot, error) from error
        slot.before_close = forget
        return known

    def require_served(self, slot: Slot) -> None:
        """Have the memory of a known slot registered once more if that was refused meanwhile.

        Raises:
            SegmentError: the library refuses it again.

        """
        try:
            for region in self._known[slot].regions:
                if region.refusal:
                    self._agent.register_again(region)
        except AgentError as error:
            raise _refused(slot, error) from error

    def _register(self, slot: Slot) -> SlotRegistration:
        number = next(_NUMBERS)
        stamp_offset = slot.stamp_address - slot.segment.address
        if slot.arena is None:
            whole = self._agent.register_segment(slot.segment)
            return SlotRegistration(number, (whole,), "DRAM", 0, stamp_offset)
        device = self._device.index or 0
        kind: Kind = "DRAM" if self._device.type == "cpu" else "VRAM"
        arena = self._agent.register([(slot.arena.address, slot.arena.nbytes)], kind, device)
        try:
            stamp = self._agent.register([(slot.segment.address, slot.segment.nbytes)], "DRAM")
        except BaseException:
            self._agent.deregister(arena)
            raise
        return SlotRegistration(number, (arena, stamp), kind, device, stamp_offset)

    def move_to(self, agent: Host) -> None:
        """Register all slots with a new agent, after the last one was closed.

        Raises:
            AgentError: the library refuses.

        """
        self._agent = agent
        for slot in self._known:
            self._known[slot] = self._register(slot)

    def __getitem__(self, slot: Slot) -> SlotRegistration:
        """Return the registration of a slot."""
        return self._known[slot]


class RegisteredArenas(Arenas):
    """Arenas of any kind, whose slots are registered with one agent."""

    def __init__(self, inner: Arenas, agent: Host) -> None:
        """Let `inner` make the slots."""
        self.place = inner.place
        self._inner = inner
        self._known = SlotRegistry(agent, inner.place.device)

    def make_slot(self, name: str, arena_nbytes: int) -> Slot:
        """Make a slot and register it.

        Raises:
            SegmentError: there is no memory, or the library refuses it.

        """
        slot = self._inner.make_slot(name, arena_nbytes)
        try:
            self._known.add(slot)
        except BaseException:
            slot.close()
            raise
        return slot

    def move_to(self, agent: Host) -> None:
        """Register all slots with a new agent.

        Raises:
            AgentError: the library refuses.

        """
        self._known.move_to(agent)

    def known(self, slot: Slot) -> SlotRegistration:
        """Return the registration of a slot."""
        return self._known[slot]

    def require_served(self, slot: Slot) -> None:
        """See `SlotRegistry.require_served`."""
        self._known.require_served(slot)

    def pin(self, slot: Slot, update_id: str, arena_nbytes: int) -> Pin:
        """Lease the version in a slot."""
        return self._inner.pin(slot, update_id, arena_nbytes)

    def sweep(self) -> None:
        """Release the views of slots that were closed."""
        self._inner.sweep()

    def close(self) -> None:
        """Release everything that no tensor needs."""
        self._inner.close()


def _refused(slot: Slot, error: AgentError) -> SegmentError:
    return SegmentError(
        f"a slot of {slot.nbytes} bytes cannot be registered: {error} Raise the limit of locked "
        "memory (ulimit -l), or lower max_slots."
    )
