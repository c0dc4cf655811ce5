"""What a consumer's end holds: its agent, its connections, and reads that were given up."""

import os
from collections.abc import Sequence

from rl_bridge.memory.slots import Slot
from rl_bridge.transports.nixl.agent import Agent
from rl_bridge.transports.nixl.arenas import KnownSlots
from rl_bridge.transports.nixl.fetch import Job
from rl_bridge.transports.nixl.source import Source

__all__ = ["Held", "end"]

# Agents that are kept for reads that did not end; each costs a slot, memory and descriptors.
_MAX_PARKED = 2


class Held:
    """What outlives a consumer's end that is dropped: closed by its finalizer."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.sources: dict[str, Source] = {}
        self.parked: list[tuple[Agent, Sequence[Job]]] = []
        """Agents that were given up, with reads that may not have ended."""
        self.under_way: tuple[Agent, Sequence[Job]] | None = None
        """What is read now, or was as an interrupt cut off even its end."""
        self.landings: KnownSlots | None = None
        """Slots of others' that were read into."""
        self.num_open = 0
        """How many are gathering what publishers are told."""

    def __enter__(self) -> None:
        """Gather what publishers are told."""
        self.num_open += 1

    def sweep(self) -> None:
        """Close agents whose reads ended meanwhile, and give their slots back.

        Of a publisher that hangs they may never end: all but the last few end with their agents.
        """
        num_kept = 0
        for agent, jobs in reversed(list(self.parked)):
            is_over = agent.is_closed or all(
                job.reading is None or job.reading.settle() for job in jobs
            )
            if not is_over and num_kept < _MAX_PARKED:
                num_kept += 1
                continue
            agent.close()
            for job in jobs:
                job.give_back()
                if job.room is not None:
                    job.room.give_back()
            self.parked.remove((agent, jobs))

    def end_reads_into(self, slot: Slot) -> None:
        """Close agents that may still write to a slot, whose memory is about to go."""
        for agent, jobs in list(self.parked):
            rooms = [job.room for job in jobs if job.room is not None and job.room.slot is slot]
            if rooms:
                agent.close()
                self.parked.remove((agent, jobs))
                for room in rooms:
                    room.slot = None

    def end_landings(self) -> bool:
        """Close agents that may still write to slots of others'; returns whether there were any."""
        ended = [(agent, jobs) for agent, jobs in self.parked if any(job.room for job in jobs)]
        for agent, jobs in ended:
            agent.close()
            for job in jobs:
                if job.room is not None:
                    job.room.give_back()
            self.parked.remove((agent, jobs))
        return bool(ended)

    def __exit__(self, *_: object) -> None:
        """Tell them."""
        self.num_open -= 1
        if not self.num_open:
            for source in self.sources.values():
                source.link.send_held_back()


def end(pid: int, held: Held) -> None:
    """Say goodbye everywhere; in another process than `pid` nothing is done. Idempotent."""
    if os.getpid() != pid:
        return
    for source in held.sources.values():
        source.let_go()
    # First of all: nothing can land any more, and publishers that hear of the end can see it.
    under_way = None if held.under_way is None else held.under_way[0]
    for agent in (held.agent, under_way, *(agent for agent, _ in held.parked)):
        if agent is not None:
            agent.close()
    given_up = [*held.parked, *([] if held.under_way is None else [held.under_way])]
    for room in {job.room for _, jobs in given_up for job in jobs if job.room is not None}:
        room.give_back()
    held.parked.clear()
    held.under_way = None
    for publisher_id, source in list(held.sources.items()):
        source.close()
        held.sources.pop(publisher_id, None)  # behind it: an interrupt must not lose it
