"""Connections to publishers, and reading the parts of a version from all of them at once.

A `ControlClient` is one connection. A `Source` is what a consumer keeps of one publisher between
updates: the connection, the slots, and prepared reads. A `Job` is one part of one attempt. A
`Fetch` runs jobs side by side.

The end of a lease may wait for the next message to the same publisher (`send_deferred`), since each
message wakes a process there.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import MalformedManifest, TransferTimeout, WeightBridgeError
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.arrival_digest import ArrivalDigest
from rl_bridge.memory.slots import STAMP_NBYTES, Slot
from rl_bridge.memory.views import Attachment
from rl_bridge.transports.base import Landing, PartRequest
from rl_bridge.transports.nixl.agent import Agent, AgentError, Made, Region
from rl_bridge.transports.nixl.arenas import SlotRegistration, SlotRegistry
from rl_bridge.transports.nixl.messages import (
    PROTOCOL,
    STALL_PART,
    AskCatalog,
    Catalog,
    Entry,
    Help,
    Join,
    Lapsed,
    Lease,
    Leased,
    NIXLEndpoint,
    NIXLHandle,
    Renew,
    Unlease,
    Welcome,
)
from rl_bridge.transports.nixl.reading import (
    STEP_NBYTES,
    Prepared,
    Reading,
    Steps,
    plan_steps,
)
from rl_bridge.transports.wire.arenas import Arenas, Arrival, Arrivals
from rl_bridge.transports.wire.channel import Gone, error_of
from rl_bridge.transports.wire.client import Connector, HungUp, PeerClient
from rl_bridge.transports.wire.ends import Options

_NAME = "the publisher's NIXL server"
_MAX_PREPARED = 32  # pairs of slots, for each kind of request
_STALL_S = 0.003  # after so long without a byte the publisher is asked to make progress
# Reading so few bytes takes no longer than the message that is saved.
_SOON_NBYTES = 4 << 20


# ---- one connection -----------------------------------------------------------------------------


class ControlClient(PeerClient[Welcome]):
    """One publisher, as a reader sees it. Under the consumer's lock, except `report`."""

    def __init__(
        self,
        endpoint: NIXLEndpoint,
        token: bytes,
        agent: Callable[[], Agent],
        join: Join,
        options: Options,
        *,
        within_s: float | None = None,
    ) -> None:
        """Connect, prove that the token is known, and join, within the shorter of the two times."""
        self.endpoint = endpoint
        self.needs_help = True
        """Whether the publisher must make progress while this side reads."""
        self.is_fresh = True
        """Whether nothing was read yet: a connection that is being made always needs help."""
        self.epoch = 0
        """Grows when the peer is made anew: reads that were prepared before are void."""
        self.known_slots: dict[int, Leased] = {}
        self._deferred: list[bytes] = []
        self._timeout_s = options.timeout_s
        connector = Connector(
            f"{_NAME} {endpoint.server_name}",
            endpoint.address,
            endpoint.port,
            PROTOCOL,
            timeout_s=options.timeout_s,
            within_s=within_s,
            tls=options.tls,
            has_tls=endpoint.has_tls,
        )
        super().__init__(connector, token, endpoint.identity, join)
        try:
            self.lease_s = self.welcome.timeout_s
            self._conn = bytes.fromhex(self.welcome.metadata)
            self._remote_epoch = self.welcome.epoch
            self._agent = agent()
            self.peer = self._agent.add_peer(self._conn, is_new=True)
        except BaseException:
            self.hang_up()
            raise

    # ---- sending --------------------------------------------------------------------------------

    def send_text(self, text: bytes) -> None:
        """Send the text of a message behind the deferred ones, in one go."""
        deferred, self._deferred = self._deferred, []
        self._channel.send_bytes(*deferred, text)

    def send_deferred(self) -> None:
        """Send the deferred messages that no other message took along."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            self._channel.send_bytes(*deferred)

    # ---- leases ---------------------------------------------------------------------------------

    def ask_for_lease(self, update_id: str, *, generation: int, arena_nbytes: int) -> None:
        """Ask for a lease; `wait_for_lease` waits for the answer."""
        self.send(
            Lease(
                update_id=update_id,
                generation=generation,
                arena_nbytes=arena_nbytes,
                known=tuple(self.known_slots),
                needs_help=self.needs_help,
                epoch=self._remote_epoch,
            )
        )

    def wait_for_lease(self, update_id: str) -> Leased:
        """Wait for the answer to `ask_for_lease`, and note how to read there.

        Raises:
            StaleUpdate: the publisher released it.
            SegmentError: it is not what was asked for.
            WeightBridgeUnavailableError: the publisher is short of something to serve it.
            AgentError: the connection ended; the publisher may still live.
            TransferTimeout: the publisher does not answer in time.

        """
        try:
            message: Leased | Gone = self.wait_for(
                (Leased, Gone),
                within_s=self._timeout_s,
                is_answer=lambda answer: answer.update_id == update_id,
            )
        except HungUp as error:
            raise AgentError(
                f"update {update_id}: the connection to its publisher ended."
            ) from error
        if isinstance(message, Gone):
            raise error_of(message)
        if not len(message.addresses) == len(message.starts) == len(message.nbytes):
            raise MalformedManifest(
                f"{self.where} describes update {update_id} with lists of different lengths. "
                "Use one release on both sides."
            )
        self._learn(message)
        return message

    def _learn(self, leased: Leased) -> None:
        if leased.moved:
            self._conn = bytes.fromhex(leased.moved)
            self._remote_epoch = leased.epoch
            self.needs_help = True  # as the publisher assumes
            self._reconnect_peer()
        if leased.metadata:
            if any(_overlaps(leased, at) for at in self.known_slots.values()):
                # The same memory under a new registration: the library must forget the old one.
                self._reconnect_peer()
            for metadata in leased.metadata:
                self._agent.add_peer(bytes.fromhex(metadata))
        elif leased.slot not in self.known_slots:
            raise MalformedManifest(
                f"{self.where} did not say how to reach slot {leased.slot}. Use one release."
            )
        self.known_slots[leased.slot] = leased

    def _reconnect_peer(self) -> None:
        self._agent.remove_peer(self.peer)
        self.peer = self._agent.add_peer(self._conn, is_new=True)
        self.known_slots.clear()
        self.is_fresh = True
        self.epoch += 1

    def has_lapsed(self, update_id: str) -> bool:
        """Whether the publisher reported by now that a lease is over; skips its other messages.

        A report about an earlier lease of the same update came before the answer to this lease.
        """
        while (text := self._channel.take()) is not None:
            message = PROTOCOL.parse_publisher(text)
            if isinstance(message, Lapsed) and message.update_id == update_id:
                return True
        return False

    def renew(self, update_id: str) -> None:
        """Report that this side is still reading."""
        self.send(Renew(update_id=update_id))

    def help(self, *, is_needed: bool) -> None:
        """Ask the publisher to make progress, or to stop; asked again, it sees to who serves."""
        self.needs_help = is_needed
        self.send(Help(is_needed=is_needed))

    def unlease(self, update_id: str, *, with_next: bool = False) -> None:
        """Report that this side is done: now, or together with the next message."""
        message = Unlease(update_id=update_id)
        if with_next:
            self._deferred.append(message.model_dump_json().encode())
        else:
            self.send(message)

    def catalog(self) -> tuple[Entry, ...]:
        """Ask for the versions that the publisher holds."""
        return self.ask(AskCatalog(), Catalog, within_s=self._timeout_s).entries

    # ---- the end --------------------------------------------------------------------------------

    def close(self, *, keeps_peer: bool = False) -> None:
        """Leave, and forget the peer. Idempotent; nothing may be read from the peer meanwhile.

        Args:
            keeps_peer: another connection goes on with the peer.

        """
        self.leave()
        if not keeps_peer and not self._agent.is_closed:
            self._agent.remove_peer(self.peer)


def _overlaps(one: Leased, other: Leased) -> bool:
    if one.slot == other.slot:
        return False
    mine, theirs = _bounds(one), _bounds(other)
    order = np.argsort(theirs[0])
    starts, ends = theirs[0][order], theirs[1][order]
    # Among the ranges that begin before mine ends, only the last can reach into mine.
    last = np.searchsorted(starts, mine[1], side="left") - 1
    return bool(((last >= 0) & (ends[last] > mine[0])).any())


def _bounds(leased: Leased) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    starts = np.array([*leased.addresses, leased.stamp], np.uint64)
    return starts, starts + np.array([*leased.nbytes, 1], np.uint64)


# ---- reading ------------------------------------------------------------------------------------


class Source:
    """One publisher, as a consumer knows it."""

    def __init__(self, client: ControlClient, arenas: Arenas, agent: Agent) -> None:
        """Start with a connection that was made."""
        self.client = client
        self._agent = agent
        self._registry = SlotRegistry(agent, arenas.place.device)
        label = f"rlb-{client.endpoint.publisher_id[:12]}-in"
        self.arrivals = Arrivals(arenas, label, self._registry.add)
        self._page: torch.Tensor
        """Where the publisher's stamps arrive."""
        self._page_region: Region | None = None
        self._prepared: dict[Hashable, tuple[Prepared, PartRequest]] = {}
        self._far: dict[Hashable, tuple[Steps, Made | None, PartRequest]] = {}
        """Plans and far descriptors, shared by reads of the same ranges into different slots."""
        self._stamps: dict[Hashable, tuple[Made, Made, Made]] = {}
        """The read of each slot's stamp, and the two lists that it was made of."""
        self._register_page()

    def _register_page(self) -> None:
        # A new page for each agent: a read of an earlier agent may still land in the old page.
        self._page = torch.zeros(STAMP_NBYTES, dtype=torch.uint8, device="cpu")
        self._page_region = self._agent.register([(self._page.data_ptr(), STAMP_NBYTES)], "DRAM")

    def reconnect(self, client: ControlClient) -> None:
        """Go on over a new connection to the same publisher."""
        self._release_reads()  # those of the old connection must not be used on this one
        client.take_over(self.client)
        old, self.client = self.client, client
        old.close(keeps_peer=old.peer == client.peer)

    def forget_reads(self) -> None:
        """Forget the reads that were prepared with an agent that is about to be closed."""
        self._prepared.clear()
        self._far.clear()
        self._stamps.clear()

    def move_to(self, agent: Agent) -> None:
        """Go on with a new agent, after the last one was closed."""
        self.forget_reads()
        self._agent = agent
        self._registry.move_to(agent)
        self._register_page()

    def reading(
        self,
        request: PartRequest,
        leased: Leased,
        slot: Slot,
        expected: tuple[str, int],
        *,
        digest: ArrivalDigest | None = None,
        landing: tuple[SlotRegistration, Callable[[int], None]] | None = None,
    ) -> Reading:
        """Prepare to read a version into a slot; its stamp must show update and generation.

        A `landing` is a slot that is not one of this source: its registration, and a function that
        is called with the number of bytes that have arrived. Without `digest`, nothing is digested.
        """
        mine, on_arrival = (self._registry[slot], None) if landing is None else landing
        prepared = self._prepare(request, leased, slot, mine)
        return Reading(
            self._agent,
            prepared,
            self._page,
            slot=slot,
            digest=digest,
            on_arrival=on_arrival,
            expected=expected,
            arena_nbytes=request.manifest.table.arena_nbytes,
        )

    def digest_of(self, table: TensorTable, slot: Slot) -> ArrivalDigest | None:
        """Begin to digest a whole version while it arrives in a slot."""
        self.arrivals.learn(table)
        return self.arrivals.digest_of(table.digest, STEP_NBYTES, slot, table.arena_nbytes)

    def _prepare(
        self, request: PartRequest, leased: Leased, slot: Slot, mine: SlotRegistration
    ) -> Prepared:
        # By identity: a consumer that plans once asks with the same arrays each time. The request
        # is kept with the reads, so that no other array can get the same id.
        ranges = None if request.starts is None else id(request.starts)
        what = (ranges, request.manifest.table.arena_nbytes)
        remote = (self.client.peer, self.client.epoch, leased.slot, leased.addresses, *what)
        key = (remote, mine.number)
        known = self._prepared.get(key)
        if known is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._release_reads()
            steps, far = self._remote(request, leased, remote)
            places = steps.places.astype(np.uint64) + np.uint64(slot.address)
            rows = _rows(places, steps.nbytes, mine.device)
            near = self._agent.prepare(None, rows, mine.memory) if len(rows) else None
            reads = tuple(
                self._agent.make_read(near, far, low, high)
                for low, high in zip(steps.cuts, steps.cuts[1:], strict=False)
                if near is not None and far is not None
            )
            known = Prepared(steps, reads, self._stamp_read(leased), near), request
            self._prepared[key] = known
        return known[0]

    def _remote(
        self, request: PartRequest, leased: Leased, key: Hashable
    ) -> tuple[Steps, Made | None]:
        found = self._far.get(key)
        if found is None:
            nbytes = request.manifest.table.arena_nbytes
            steps = plan_steps(
                leased,
                nbytes,
                request.starts,
                request.nbytes,
                targets=request.targets,
                is_local=ip_address(self.client.endpoint.address).is_loopback,
            )
            rows = _rows(steps.addresses, steps.nbytes, leased.device)
            made = None
            if len(rows):
                made = self._agent.prepare(self.client.peer, rows, leased.memory)
            found = self._far[key] = steps, made, request
        return found[:2]

    def _stamp_read(self, leased: Leased) -> Made:
        key = self.client.peer, self.client.epoch, leased.slot
        found = self._stamps.get(key)
        if found is None:
            nbytes = np.array([STAMP_NBYTES])
            far = _rows(np.array([leased.stamp], np.uint64), nbytes, 0)
            near = _rows(np.array([self._page.data_ptr()], np.uint64), nbytes, 0)
            lists = (
                self._agent.prepare(None, near, "DRAM"),
                self._agent.prepare(self.client.peer, far, "DRAM"),
            )
            found = self._stamps[key] = self._agent.make_read(*lists, 0, 1), *lists
        return found[0]

    def _release_reads(self) -> None:
        prepared = [one for one, _ in self._prepared.values()]
        made = [made for one in prepared for made in (*one.reads, one.near)]
        made += [far for _, far, _ in self._far.values()]
        made += [one for stamp in self._stamps.values() for one in stamp]
        self.forget_reads()
        self._agent.release(*(one for one in made if one is not None))

    def close(self) -> None:
        """Release everything that no tensor needs."""
        self._release_reads()
        self.client.close()
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


class TornRead(WeightBridgeError):
    """The publisher wrote during a read; the read is tried again, or ends in StaleUpdate."""


@dataclass(slots=True, eq=False)
class SharedSlot:
    """One slot that all parts of a version are read into, for one attempt."""

    landing: Landing
    slot: Slot | None
    known: SlotRegistration | None = None

    def release(self) -> None:
        """Let the slot be used again: no byte can land there any longer. Idempotent."""
        if self.slot is not None:
            self.landing.abandon(self.slot)
            self.slot = None


@dataclass(slots=True, eq=False)
class Job:
    """One part of a version, and how far it has come."""

    index: int
    request: PartRequest
    handle: NIXLHandle
    source: Source
    shared: SharedSlot | None = None
    slot: Slot | None = None
    digest: ArrivalDigest | None = None
    reading: Reading | None = None
    is_leased: bool = False
    renewed: float = 0.0
    stall_reported: float = 0.0

    @property
    def update_id(self) -> str:
        """The update that it is a part of."""
        return self.request.manifest.update_id

    @property
    def _place(self) -> Slot:
        """The slot that it is read into."""
        slot = self.slot if self.shared is None else self.shared.slot
        assert slot is not None
        return slot

    def ask_for_lease(self) -> None:
        """Ask for the lease."""
        self.is_leased = True
        self.source.client.ask_for_lease(
            self.update_id,
            generation=self.handle.generation,
            arena_nbytes=self.request.manifest.table.arena_nbytes,
        )

    def prepare(self) -> None:
        """Do everything that needs no answer, while the publisher answers.

        A part's own header is not compared later, only the header of its group.
        """
        manifest = self.request.manifest
        if self.shared is None:
            self.slot = self.source.arrivals.reserve(self.request.room_nbytes)
        if self.request.starts is None:
            self.digest = self.source.digest_of(manifest.table, self._place)
            manifest.header_digest  # noqa: B018 - the manifest keeps it for the comparison

    def begin(self) -> None:
        """Wait for the lease, and prepare to read."""
        leased = self.source.client.wait_for_lease(self.update_id)
        self.renewed = time.monotonic()
        expected = self.update_id, self.handle.generation
        shared = self.shared
        landing = None
        if shared is not None:
            assert shared.known is not None
            landing = shared.known, partial(shared.landing.arrived, self.index)
        self.reading = self.source.reading(
            self.request, leased, self._place, expected, digest=self.digest, landing=landing
        )

    def attach(self, num_threads: int | None) -> Attachment:
        """Lease the version that arrived, in this process."""
        manifest, reading, slot = self.request.manifest, self.reading, self.slot
        assert reading is not None
        assert slot is not None
        assert reading.stamp is not None
        table, header = manifest.table, reading.stamp.header
        arrivals = self.source.arrivals
        digests = reading.finish()
        if self.handle.in_place and digests is not None and digests != bytes(manifest.digests):
            raise TornRead(
                f"update {manifest.update_id} is gone: its trainer wrote to its tensors without "
                "releasing it (in_place). Release before the weights change, and publish again."
            )
        if self.request.starts is not None:
            made = arrivals.attach_part(
                slot,
                manifest.update_id,
                table,
                header=header,
                num_threads=num_threads,
                room_nbytes=self.request.room_nbytes,
            )
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
        self.slot = None
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
        """The header's digest that was sealed beside the bytes."""
        assert self.reading is not None
        assert self.reading.stamp is not None
        return self.reading.stamp.header

    def release(self) -> None:
        """Let the slot be used again: no byte can land there any longer. Idempotent."""
        if self.shared is not None:
            self.shared.release()
        if self.slot is not None:
            self.source.arrivals.abandon(self.slot)
            self.slot = None


class Fetch:
    """Reads several parts side by side."""

    def __init__(self, jobs: Sequence[Job], *, timeout_s: float) -> None:
        """Begin; `run` asks for the leases."""
        self._jobs = jobs
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Read all parts.

        Raises:
            TornRead: a publisher wrote to what was being read.
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
                time.sleep(0)  # the thread that makes progress may be in this process
        for job in self._jobs:
            if job.reading is not None and job.reading.is_torn:
                raise TornRead(
                    f"update {job.update_id} is gone: its publisher wrote to it while it was read "
                    f"(stamp {job.reading.stamp}). Import the publisher's latest manifest."
                )

    def _begin(self) -> None:
        """Lease all parts; each step is done for all of them before the first wait."""
        for job in self._jobs:
            job.ask_for_lease()
        for job in self._jobs:
            job.prepare()
        for job in self._jobs:
            job.begin()

    def _is_over(self) -> bool:
        return all(job.reading is None or job.reading.is_done for job in self._jobs)

    def _step(self, job: Job, *, idle_s: float) -> bool:
        reading, client = job.reading, job.source.client
        if reading is None or reading.is_done:
            return False
        is_moving = reading.step()
        if is_moving and client.is_fresh and reading.has_begun:
            # Connected. Stop the help, to find out whether the network reads by itself.
            client.is_fresh = False
            client.help(is_needed=False)
        elif not is_moving and idle_s > _STALL_S:
            if client.is_lost:
                # The library notices it later, if at all.
                raise AgentError(f"update {job.update_id}: the connection to its publisher ended.")
            if client.has_lapsed(job.update_id):
                raise AgentError(f"update {job.update_id}: its lease was not renewed in time.")
            if not client.needs_help:
                client.help(is_needed=True)
        now = time.monotonic()
        stall_s = self._timeout_s * STALL_PART
        if not is_moving and idle_s > stall_s and now - job.stall_reported > stall_s:
            job.stall_reported = now
            client.help(is_needed=True)
        if now - job.renewed > client.lease_s / 4:
            job.renewed = now
            client.renew(job.update_id)
        return is_moving

    def _late(self) -> TransferTimeout:
        late = [job for job in self._jobs if job.reading is not None and not job.reading.is_done]
        names = ", ".join(job.handle.endpoint.server_name for job in late)
        return TransferTimeout(
            f"update {late[0].update_id}: nothing of it arrived for {self._timeout_s} s from "
            f"{names}. Check that the publisher runs and can be reached, then import again, or "
            "raise timeout_s."
        )

    def close(self, *, with_next: bool = False) -> bool:
        """End the leases; returns whether reads are still under way, which cannot be called off.

        Args:
            with_next: a report to the publishers follows soon. If little was read, the end of the
                lease is sent together with it.

        """
        in_flight = False
        for job in self._jobs:
            if job.reading is not None:
                job.reading.stop()
                in_flight |= job.reading.in_flight
        for job in self._jobs:
            if job.is_leased and not job.source.client.is_lost:
                is_soon = job.request.room_nbytes < _SOON_NBYTES
                job.source.client.unlease(job.update_id, with_next=with_next and is_soon)
            if not in_flight:
                job.release()
        return in_flight
