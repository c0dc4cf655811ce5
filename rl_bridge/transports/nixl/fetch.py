"""Reading versions from all their publishers at once."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rl_bridge.errors import TransferTimeout, WeightBridgeError
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.arrival_digest import ArrivalDigest
from rl_bridge.memory.slots import STAMP_NBYTES, Slot
from rl_bridge.transports.base import Attachment, Landing, PartRequest
from rl_bridge.transports.nixl.agent import Agent, AgentError, Kind, Region
from rl_bridge.transports.nixl.arenas import Registered, RegisteredArenas
from rl_bridge.transports.nixl.link import Link
from rl_bridge.transports.nixl.messages import Leased, NIXLHandle
from rl_bridge.transports.nixl.reading import (
    STEP_NBYTES,
    Prepared,
    Reading,
    StampPage,
    Steps,
    plan_steps,
)
from rl_bridge.transports.wire.arenas import Arenas, Arrival, Arrivals

__all__ = [
    "Fetch",
    "Job",
    "Room",
    "Source",
    "Torn",
]

# ---- What a consumer keeps of one publisher between updates: connection, slots, prepared reads.

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


# ---- the rest builds on the parts above

# So long without a byte, and the publisher is asked to help its network along.
_STALL_S = 0.003
# Looking at that much takes no longer than the messages that are saved.
_SOON_NBYTES = 4 << 20


class Torn(WeightBridgeError):
    """The publisher wrote while this side read; the attempt is repeated, or ends in StaleUpdate."""


@dataclass(slots=True, eq=False)
class Room:
    """A slot that all parts of a version are read into, for one attempt."""

    landing: Landing
    slot: Slot | None
    known: Registered | None = None

    def give_back(self) -> None:
        """Let the slot be used again: nothing can land there any more. Idempotent."""
        if self.slot is not None:
            self.landing.abandon(self.slot)
            self.slot = None  # behind it: an interrupt must not lose it


@dataclass(slots=True, eq=False)
class Job:
    """One part, and what has become of it."""

    index: int
    request: PartRequest
    handle: NIXLHandle
    source: Source
    room: Room | None = None
    slot: Slot | None = None
    digest: ArrivalDigest | None = None
    reading: Reading | None = None
    is_leased: bool = False
    renewed: float = 0.0

    @property
    def update_id(self) -> str:
        """Of which update it is a part."""
        return self.request.manifest.update_id

    @property
    def _place(self) -> Slot:
        """Where it is read to."""
        slot = self.slot if self.room is None else self.room.slot
        assert slot is not None
        return slot

    def _hold(self, slot: Slot) -> None:
        self.slot = slot

    def ask(self) -> None:
        """Ask for the lease."""
        self.is_leased = True
        self.source.link.ask(
            self.update_id,
            generation=self.handle.generation,
            arena_nbytes=self.request.manifest.table.arena_nbytes,
        )

    def prepare(self) -> None:
        """What takes no answer, while the publisher answers: room, and what is compared later.

        Of a part it is the whole group's header that is compared, not its own.
        """
        manifest = self.request.manifest
        if self.room is None:
            self.source.arrivals.reserve(manifest.table.arena_nbytes, self._hold)
        if self.request.starts is None:
            self.digest = self.source.digest_of(manifest.table, self._place)
            manifest.header_digest  # noqa: B018 - kept there for whoever compares it

    def begin(self) -> None:
        """Wait for the lease, and make ready to read."""
        leased = self.source.link.wait(self.update_id)
        self.renewed = time.monotonic()
        expected = self.update_id, self.handle.generation
        room = self.room
        landing = None
        if room is not None:
            assert room.known is not None
            landing = room.known, partial(room.landing.arrived, self.index)
        self.reading = self.source.reading(
            self.request, leased, self._place, expected, digest=self.digest, landing=landing
        )

    def attach(self, num_threads: int | None) -> Attachment:
        """Lease what arrived, on this side."""
        manifest, reading, slot = self.request.manifest, self.reading, self.slot
        assert reading is not None
        assert slot is not None
        assert reading.stamp is not None
        table, header = manifest.table, reading.stamp.header
        arrivals = self.source.arrivals
        digests = reading.finish()
        if self.handle.in_place and digests is not None and digests != bytes(manifest.digests):
            raise Torn(
                f"update {manifest.update_id} is gone: its trainer wrote to its tensors without "
                "releasing it (in_place). Release before the weights change, and publish again."
            )
        if self.request.starts is not None:
            made = arrivals.attach_part(slot, manifest.update_id, table, header=header)
            self.slot = None
            return made
        arrival = Arrival(
            manifest.update_id,
            self.handle.generation,
            table.arena_nbytes,
            table.digest,
            slot,
            digests,
            header,
        )
        arrivals.commit(arrival)
        self.slot = None  # behind it: what an interrupt cuts off is given back
        attachment = arrivals.attach(
            manifest.update_id,
            table,
            generation=self.handle.generation,
            num_threads=num_threads,
        )
        assert attachment is not None
        return attachment

    @property
    def header(self) -> bytes | None:
        """What was sealed beside the bytes that landed."""
        assert self.reading is not None
        assert self.reading.stamp is not None
        return self.reading.stamp.header

    def give_back(self) -> None:
        """Let the slot be used again: nothing can land there any more. Idempotent."""
        if self.slot is not None:
            self.source.arrivals.abandon(self.slot)
            self.slot = None  # behind it: an interrupt must not lose it


class Fetch:
    """Reads several parts side by side."""

    def __init__(self, jobs: Sequence[Job], *, timeout_s: float) -> None:
        """Begin; nothing is asked for yet."""
        self._jobs = jobs
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Have all parts here.

        Raises:
            Torn: a publisher wrote to what was being read.
            AgentError: a read failed.
            WeightBridgeError: a version is gone, or its publisher; or nothing arrived in time.

        """
        self._begin()
        last = time.monotonic()
        while not self._is_over():
            is_moving = False
            for job in self._jobs:
                is_moving |= self._step(job, idle_s=time.monotonic() - last)
            now = time.monotonic()
            if is_moving:
                last = now
            elif now - last > self._timeout_s:
                raise self._late()
            if not is_moving:
                time.sleep(0)  # whoever makes progress in this very process wants the interpreter
        for job in self._jobs:
            if job.reading is not None and job.reading.is_torn:
                raise Torn(
                    f"update {job.update_id} is gone: its publisher wrote to it while it was read "
                    f"(stamp {job.reading.stamp}). Import the publisher's latest manifest."
                )

    def _begin(self) -> None:
        """Lease all parts: each step for all of them, before there is anything to wait for."""
        for job in self._jobs:
            job.ask()
        for job in self._jobs:
            job.prepare()
        for job in self._jobs:
            job.begin()

    def _is_over(self) -> bool:
        return all(job.reading is None or job.reading.is_done for job in self._jobs)

    def _step(self, job: Job, *, idle_s: float) -> bool:
        reading, link = job.reading, job.source.link
        if reading is None or reading.is_done:
            return False
        is_moving = reading.step()
        if is_moving and link.is_fresh and reading.has_begun:
            # Connected. Whether the network reads by itself from here on is about to be seen.
            link.is_fresh = False
            link.help(is_needed=False)
        elif not is_moving and idle_s > _STALL_S:
            if link.is_lost:
                # Sooner than the library notices, if it does.
                raise AgentError(f"update {job.update_id}: the connection to its publisher ended.")
            if link.has_lapsed(job.update_id):
                raise AgentError(f"update {job.update_id}: its lease was not renewed in time.")
            if not link.needs_help:
                link.help(is_needed=True)
        now = time.monotonic()
        if now - job.renewed > link.lease_s / 4:
            job.renewed = now
            link.renew(job.update_id)
        return is_moving

    def _late(self) -> TransferTimeout:
        late = [job for job in self._jobs if job.reading is not None and not job.reading.is_done]
        names = ", ".join(job.handle.endpoint.server_name for job in late)
        return TransferTimeout(
            f"update {late[0].update_id}: nothing of it arrived for {self._timeout_s} s from "
            f"{names}. See that the publisher runs and can be reached, then import again, or raise "
            "timeout_s."
        )

    def close(self, *, with_next: bool = False) -> bool:
        """End the leases; returns whether reads are still under way, which nobody can call off.

        Args:
            with_next: whoever calls has more to tell the publishers at once. Where it is little
                that was read, the two go together.

        """
        in_flight = False
        for job in self._jobs:
            if job.reading is not None:
                job.reading.stop()
                in_flight |= job.reading.in_flight
        for job in self._jobs:
            if job.is_leased and not job.source.link.is_lost:
                is_soon = job.request.manifest.table.arena_nbytes < _SOON_NBYTES
                job.source.link.unlease(job.update_id, with_next=with_next and is_soon)
            if not in_flight:
                job.give_back()
        return in_flight
