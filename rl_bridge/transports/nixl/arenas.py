"""Slots that are registered with an agent: once, when they are made, until they are closed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.slots import Slot
from rl_bridge.transports.nixl.agent import AgentError, Host, Kind, Region

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
            raise SegmentError(
                f"a slot of {slot.nbytes} bytes cannot be registered: {error} Raise the limit of "
                "locked memory (ulimit -l), or lower max_slots."
            ) from error
        slot.before_close = forget
        return known

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
        """Register all slots with a new agent, after the last one was closed."""
        self._agent = agent
        for slot in self._known:
            self._known[slot] = self._register(slot)

    def items(self) -> list[tuple[Slot, SlotRegistration]]:
        """List all slots and their registrations."""
        return list(self._known.items())

    def __getitem__(self, slot: Slot) -> SlotRegistration:
        """Return the registration of a slot."""
        return self._known[slot]
