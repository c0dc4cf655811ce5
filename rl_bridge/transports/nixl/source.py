"""What a consumer keeps of one publisher between updates: connection, slots, prepared reads."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.arrival_digest import ArrivalDigest
from rl_bridge.memory.slots import STAMP_NBYTES, Slot
from rl_bridge.transports._wire.arenas import Arenas
from rl_bridge.transports._wire.arrivals import Arrivals
from rl_bridge.transports.base import PartRequest
from rl_bridge.transports.nixl.agent import Agent, Kind, Region
from rl_bridge.transports.nixl.arenas import Registered, RegisteredArenas
from rl_bridge.transports.nixl.link import Link
from rl_bridge.transports.nixl.messages import Leased
from rl_bridge.transports.nixl.plan import STEP_NBYTES, Steps, plan_steps
from rl_bridge.transports.nixl.reading import Prepared, Reading, StampPage

__all__ = ["Source"]

# Pairs of slots, for each request that takes turns.
_KEPT = 32


class Source:
    """One publisher, as a consumer keeps it."""

    def __init__(self, link: Link, arenas: Arenas, agent: Agent) -> None:
        """Start with a connection that was made."""
        self.link = link
        self._agent = agent
        self.arenas = RegisteredArenas(arenas, agent)
        self.arrivals = Arrivals(self.arenas, f"rlb-{link.endpoint.publisher_id[:12]}-in")
        self._page: StampPage
        self._page_region: Region | None = None
        self._lists: OrderedDict[Any, tuple[Any, PartRequest | None]] = OrderedDict()
        self._prepared: OrderedDict[Any, tuple[Prepared, PartRequest]] = OrderedDict()
        self._register_page()

    def _register_page(self) -> None:
        # For each agent another one: what an earlier one waits for still may land in its own.
        raw = torch.zeros(STAMP_NBYTES, dtype=torch.uint8, device="cpu")
        self._page = StampPage(raw.data_ptr(), raw)
        self._page_region = self._agent.register([(self._page.address, STAMP_NBYTES)], "DRAM")

    def reconnect(self, link: Link) -> None:
        """Go on over a new connection to the same publisher."""
        self._forget_reads()  # first: those of another connection must not be taken for this one's
        link.take_over(self.link)
        old, self.link = self.link, link
        old.close(keeps_peer=old.peer == link.peer)

    def let_go(self) -> None:
        """Hold nothing of an agent that is about to be closed."""
        self._lists.clear()
        self._prepared.clear()

    def move_to(self, agent: Agent) -> None:
        """Go on with another agent, in place of one that was closed.

        Raises:
            AgentError: the library refuses the memory.

        """
        self.let_go()  # of the other one, if an interrupt kept anybody from it
        self._agent = agent
        self.arenas.move_to(agent)
        self._register_page()

    def reading(
        self,
        request: PartRequest,
        leased: Leased,
        slot: Slot,
        expected: tuple[str, int],
        *,
        digest: ArrivalDigest | None = None,
        landing: tuple[Registered, Callable[[int], None]] | None = None,
    ) -> Reading:
        """Make ready to read a version into a slot.

        Args:
            request: what.
            leased: where it lies.
            slot: where it goes.
            expected: update and generation that its stamp must show.
            digest: of what arrives; None to digest nothing.
            landing: what the agent knows of the slot where it is none of this source's, and who is
                told what arrived.

        Raises:
            AgentError: the library refuses.
            MalformedManifest: what the publisher said cannot be.

        """
        mine, told = (self.arenas.known(slot), None) if landing is None else landing
        prepared = self._prepare(request, leased, slot, mine)
        return Reading(
            self._agent,
            prepared,
            self._page,
            slot=slot,
            digest=digest,
            told=told,
            expected=expected,
            arena_nbytes=request.manifest.table.arena_nbytes,
        )

    def digest_of(self, table: TensorTable, slot: Slot) -> ArrivalDigest | None:
        """What digests a whole version while it arrives in a slot."""
        self.arrivals.learn(table)
        return self.arrivals.digest_of(table.digest, STEP_NBYTES, slot, table.arena_nbytes)

    def _prepare(
        self, request: PartRequest, leased: Leased, slot: Slot, mine: Registered
    ) -> Prepared:
        # By identity: whoever plans once asks with the same arrays each time. They are kept here,
        # so that no other array can come to have theirs.
        ranges = None if request.starts is None else id(request.starts)
        what = (ranges, request.manifest.table.arena_nbytes)
        remote = (self.link.peer, self.link.epoch, leased.slot, leased.addresses, *what)
        key = (remote, mine.number)
        known = self._prepared.get(key)
        if known is None:
            if len(self._prepared) >= _KEPT:
                self._forget_reads()
            steps, far = self._remote(request, leased, remote)
            near = self._local(steps, slot, mine, key, request)
            reads = tuple(
                self._agent.make_read(near, far, low, high)
                for low, high in zip(steps.cuts, steps.cuts[1:], strict=False)
            )
            stamp = self._stamp_read(leased)
            known = self._prepared[key] = Prepared(steps, reads, stamp, (near, far)), request
        self._prepared.move_to_end(key)
        return known[0]

    def _remote(self, request: PartRequest, leased: Leased, key: Any) -> tuple[Steps, Any]:
        found = self._lists.get(("far", key))
        if found is None:
            nbytes = request.manifest.table.arena_nbytes
            steps = plan_steps(
                leased, nbytes, request.starts, request.nbytes, targets=request.targets
            )
            rows = _rows(steps.addresses, steps.nbytes, leased.device)
            made = None
            if len(rows):
                made = self._agent.prepare(self.link.peer, rows, leased.memory)
            found = self._keep(("far", key), (steps, made), request)
        steps, made = found[0]
        return steps, made

    def _local(
        self, steps: Steps, slot: Slot, mine: Registered, key: Any, request: PartRequest
    ) -> Any:
        found = self._lists.get(("near", key))
        if found is None:
            rows = _rows(
                steps.places.astype(np.uint64) + np.uint64(slot.address), steps.nbytes, mine.device
            )
            made = self._agent.prepare(None, rows, mine.memory) if len(rows) else None
            found = self._keep(("near", key), made, request)
        return found[0]

    def _stamp_read(self, leased: Leased) -> Any:
        key = ("stamp", self.link.peer, self.link.epoch, leased.slot)
        found = self._lists.get(key)
        if found is None:
            nbytes = np.array([STAMP_NBYTES])
            kind: Kind = "DRAM"
            far = _rows(np.array([leased.stamp], np.uint64), nbytes, 0)
            near = _rows(np.array([self._page.address], np.uint64), nbytes, 0)
            lists = (
                self._agent.prepare(None, near, kind),
                self._agent.prepare(self.link.peer, far, kind),
            )
            made = self._agent.make_read(*lists, 0, 1)
            found = self._keep(key, (made, lists), None)
        return found[0]

    def _keep(
        self, key: Any, made: Any, request: PartRequest | None
    ) -> tuple[Any, PartRequest | None]:
        found = self._lists[key] = (made, request)
        return found

    def _forget_reads(self) -> None:
        reads = [read for prepared, _ in self._prepared.values() for read in prepared.reads]
        lists = list(self._lists.items())
        self.let_go()  # first: what an interrupt leaves, the agent releases at its end
        self._agent.release(*reads)
        for key, (made, _) in lists:
            if key[0] == "stamp":
                self._agent.release(made[0], *made[1])
            elif (made := made[1] if key[0] == "far" else made) is not None:
                self._agent.release(made)

    def close(self) -> None:
        """Let go of everything that no tensor needs."""
        self._forget_reads()
        self.link.close()
        self.arrivals.close()
        if self._page_region is not None:
            self._agent.deregister(self._page_region)


def _rows(
    addresses: np.ndarray[Any, np.dtype[np.uint64]], nbytes: np.ndarray[Any, Any], device: int
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = nbytes
    rows[:, 2] = device
    return rows
