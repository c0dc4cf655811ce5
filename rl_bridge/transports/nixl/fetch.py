"""Reading versions from all their publishers at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rl_bridge.errors import TransferTimeout, WeightBridgeError
from rl_bridge.memory.arrival_digest import ArrivalDigest
from rl_bridge.memory.slots import Slot
from rl_bridge.transports._landing import Landing
from rl_bridge.transports._wire.arrivals import Arrival
from rl_bridge.transports.base import Attachment, PartRequest
from rl_bridge.transports.nixl.agent import AgentError
from rl_bridge.transports.nixl.arenas import Registered
from rl_bridge.transports.nixl.endpoint import NIXLHandle
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.source import Source

__all__ = ["Fetch", "Job", "Room", "Torn"]

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
