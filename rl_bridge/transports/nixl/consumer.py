"""The engine's end: leases versions at their publishers, and reads them into slots of its own."""

import logging
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar

import torch

from rl_bridge.errors import (
    SlotsExhausted,
    StaleUpdate,
    TransferTimeout,
    TransportUnavailable,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.slots import ARRIVING, Slot
from rl_bridge.transports.base import Attachment, ConsumerEnd, Landed, Landing, PartRequest
from rl_bridge.transports.nixl.agent import Agent, AgentError, Counters, MemoryRefused
from rl_bridge.transports.nixl.arenas import KnownSlots
from rl_bridge.transports.nixl.fetch import Fetch, Job, Room, Source, Torn
from rl_bridge.transports.nixl.link import Link
from rl_bridge.transports.nixl.messages import Entry, NIXLEndpoint, NIXLHandle
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import read_handle

__all__ = [
    "Held",
    "NIXLConsumer",
    "end",
    "tried",
]

# ---- What a consumer's end holds: its agent, its connections, and reads that were given up.

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


# ---- Trying again where that may help: a version that was written to, a connection that broke.

_LOG = logging.getLogger(__name__)
_PAUSE_MS = 5
_LONGEST_PAUSE_MS = 500
_Made = TypeVar("_Made")


def _pauses() -> Iterator[None]:
    """Each one is made before it is given, and longer than the last."""
    pause_ms = _PAUSE_MS
    while True:
        select.poll().poll(pause_ms)
        yield
        pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)


def tried(
    update_id: str, once: Callable[[], _Made], *, timeout_s: float, reconnect: Callable[[], None]
) -> _Made:
    """Try until it works or the deadline is over, at least twice where a connection broke.

    Args:
        update_id: what is read, for messages.
        once: one attempt.
        timeout_s: for how long to try.
        reconnect: have the next attempt begin with new connections.

    Raises:
        StaleUpdate: the publisher wrote to it, again and again.
        WeightBridgeUnavailableError: reads fail, which says nothing against the update.

    """
    until = time.monotonic() + timeout_s
    num_broken = 0
    pauses = _pauses()
    while True:
        try:
            return once()
        except Torn as error:
            # Its publisher wrote meanwhile: this side's lease was lost, or never counted.
            if time.monotonic() >= until:
                raise StaleUpdate(str(error)) from error
            next(pauses)  # whoever writes wants the memory
        except AgentError as error:
            # The connection broke, which may mean no more than that: again, on a new one. The
            # process that serves there may die under one reader after the other.
            num_broken += 1
            is_hopeless = isinstance(error, MemoryRefused) or time.monotonic() >= until
            if num_broken > 1 and is_hopeless:
                reason = str(error).removesuffix(".")
                remedy = "See that its publisher runs and can be reached"
                if isinstance(error, MemoryRefused):
                    remedy = "See how much memory this process may lock and register"
                msg = (
                    f"update {update_id} cannot be read: {reason}. {remedy}, then import it again."
                )
                raise WeightBridgeUnavailableError(msg) from error
            reconnect()
            _LOG.warning("%s Again, on a new connection.", error)
            if num_broken > 1:
                next(pauses)


# ---- the rest builds on the parts above

# Of all attempts of one import to reach publishers of which nothing is needed.
_MEET_S = 2.0
# How long one that could not be reached is left alone.
_REST_S = 60.0


class NIXLConsumer(ConsumerEnd):
    """See `rl_bridge.transports.base.ConsumerEnd`."""

    lands: ClassVar[bool] = True

    def __init__(
        self,
        worker: str,
        rank: int,
        *,
        make_agent: Callable[[], Agent],
        make_arenas: Callable[[], Arenas],
        backend: str,
        token: bytes | None,
        num_threads: int | None,
        timeout_s: float,
    ) -> None:
        """Open nothing yet."""
        self._worker = worker
        self._rank = rank
        self._reader = secrets.token_hex(16)
        self._make_agent = make_agent
        self._make_arenas = make_arenas
        self._backend = backend
        self._token = token
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._meet_s = min(_MEET_S, timeout_s)
        self._held = Held()
        self._past = Counters()
        self._unreachable: dict[str, float] = {}
        """Publisher -> until when it is left alone."""
        # A bridge that is dropped instead of closed must not keep its memory and connections.
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, end, self._pid, self._held)

    # ---- what can be looked at ------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What was made so far; in steady state nothing of it grows."""
        agent = self._held.agent
        return self._past + (Counters() if agent is None else agent.made)

    @property
    def num_registered(self) -> int:
        """Ranges of memory that are registered now."""
        return 0 if self._held.agent is None else self._held.agent.num_registered

    def catalog(self, manifest: WeightUpdateManifest) -> tuple[Entry, ...]:
        """What the publisher of a manifest holds.

        Raises:
            SegmentError: it is gone.
            WeightBridgeUnavailableError: it has no room for this side, or there is no way to it.
            TransferTimeout: it does not answer in time.

        """

        def ask() -> tuple[Entry, ...]:
            return self._source(self._handle(manifest).endpoint, is_observer=True).link.catalog()

        return self._tried(manifest.update_id, ask)

    # ---- attaching ------------------------------------------------------------------------------

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Read a version, or take the one that is here, and lease it."""
        return self._attach([PartRequest(manifest=manifest)], is_observer=False)[0]

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        """Read what is asked for from all publishers at once, and lease it."""
        publishers = {part.manifest.publisher_id for part in parts}
        if len(publishers) < len(parts):
            return super().attach_parts(parts)  # one publisher, one reading at a time
        return self._attach(parts, is_observer=False)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        """The same as `attach`, without a record."""
        return self._attach([PartRequest(manifest=manifest)], is_observer=True)[0]

    def read_into(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        """Read ranges of parts into an arena of the caller's, from all publishers at once."""
        return self._tried(parts[0].manifest.update_id, lambda: self._land_once(parts, landing))

    def _attach(self, parts: Sequence[PartRequest], *, is_observer: bool) -> list[Attachment]:
        return self._tried(
            parts[0].manifest.update_id, lambda: self._attach_once(parts, is_observer=is_observer)
        )

    def _tried(self, update_id: str, once: Callable[[], _Made]) -> _Made:
        """Try again where that may help, until the deadline."""
        self._sweep()
        # A new agent, too: the library looks for ways to peers when one is made, and never again.
        return tried(
            update_id,
            once,
            timeout_s=self._timeout_s,
            reconnect=lambda: self._renew_agent(()),
        )

    def _attach_once(self, parts: Sequence[PartRequest], *, is_observer: bool) -> list[Attachment]:
        handles = [self._handle(part.manifest) for part in parts]
        attached = [self._here(*one) for one in zip(parts, handles, strict=True)]
        jobs: list[Job] = []
        for index, (part, handle) in enumerate(zip(parts, handles, strict=True)):
            if attached[index] is None:
                source = self._source(handle.endpoint, is_observer=is_observer)
                jobs.append(Job(index, part, handle, source))
        fetch = Fetch(jobs, timeout_s=self._timeout_s)
        is_here = False
        try:
            if jobs:
                self._held.under_way = self._agent(), jobs
            fetch.run()
            for job in jobs:
                attached[job.index] = job.attach(self._num_threads)
            is_here = True
        except BaseException:
            for one in attached:
                if one is not None:
                    one.tensors.forget()
            raise
        finally:
            in_flight = True  # unless it is known that nothing is
            try:
                in_flight = fetch.close(with_next=is_here and self._held.num_open > 0)
            finally:
                if in_flight:
                    self._renew_agent(jobs)  # and give their slots back
                self._held.under_way = None  # behind it: what an interrupt cuts off, `_sweep` ends
        return [one for one in attached if one is not None]

    def _land_once(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        held = self._held
        agent = self._agent()
        if held.landings is None:
            held.landings = KnownSlots(agent, torch.device("cpu"))
        try:
            slot = landing.reserve()
        except SlotsExhausted:
            if not held.end_landings():  # of a publisher that hangs, reads may never end
                raise
            slot = landing.reserve()
        jobs: list[Job] = []
        fetch = Fetch(jobs, timeout_s=self._timeout_s)
        room = Room(landing, slot)
        is_here = False
        try:
            room.known = held.landings.add(slot, before_end=lambda: held.end_reads_into(slot))
            for index, part in enumerate(parts):
                handle = self._handle(part.manifest)
                source = self._source(handle.endpoint, is_observer=False)
                jobs.append(Job(index, part, handle, source, room=room))
            # From here on bytes may land in it, and `_sweep` sees to its end if nothing else does.
            held.under_way = agent, jobs
            slot.update_id = ARRIVING
            fetch.run()
            made = Landed(slot, [job.header for job in jobs])
            is_here = True
        finally:
            in_flight = True  # unless it is known that nothing is
            try:
                in_flight = fetch.close(with_next=is_here and held.num_open > 0)
            finally:
                if in_flight:
                    self._renew_agent(jobs)  # the slot is given back when they ended
                elif is_here:
                    room.slot = slot.update_id = None  # the caller's, and nobody's if it fails
                else:
                    room.give_back()
                held.under_way = None
        return made

    def _here(self, part: PartRequest, handle: NIXLHandle) -> Attachment | None:
        """A version that was read already, if it is still here."""
        manifest = part.manifest
        source = self._held.sources.get(manifest.publisher_id)
        if source is None or part.starts is not None:
            return None
        return source.arrivals.attach(
            manifest.update_id,
            manifest.table,
            generation=handle.generation,
            num_threads=self._num_threads,
        )

    def _handle(self, manifest: WeightUpdateManifest) -> NIXLHandle:
        handle = read_handle(NIXLHandle, manifest)
        if handle.endpoint.backend != self._backend:
            raise TransportUnavailable(
                "nixl",
                f"the publisher offers its memory over {handle.endpoint.backend} and this side was "
                f"made for {self._backend}",
                "Give both sides the same backend=.",
            )
        return handle

    # ---- connections ----------------------------------------------------------------------------

    def _agent(self) -> Agent:
        """This side's agent; what was registered with an earlier one is registered with it."""
        held = self._held
        if held.agent is None:
            agent = self._make_agent()
            try:
                for source in held.sources.values():
                    source.move_to(agent)
                if held.landings is not None:
                    held.landings.move_to(agent)
            except BaseException:
                agent.close()  # the next one takes all of them, or fails as a whole
                raise
            held.agent = agent
        return held.agent

    def _token_of(self, endpoint: NIXLEndpoint) -> bytes:
        if endpoint.token is not None:
            return bytes.fromhex(endpoint.token)
        if self._token is None:
            raise TransportUnavailable(
                "nixl",
                f"the manifests of {endpoint.server_name} carry no token and this side has none",
                "Give both sides the same token=.",
            )
        return self._token

    def _source(
        self, endpoint: NIXLEndpoint, *, is_observer: bool, within_s: float | None = None
    ) -> Source:
        """Find or make the connection to a publisher, within that time if it is short."""
        known = self._held.sources.get(endpoint.publisher_id)
        if known is not None and not known.link.is_lost and known.link.endpoint == endpoint:
            if not is_observer:
                known.link.follow()
            return known
        link = Link(
            endpoint,
            self._token_of(endpoint),
            # Not before the publisher answered: an agent knows only the interfaces that are up.
            self._agent,
            worker=self._worker,
            rank=self._rank,
            # Who left a record keeps it, whatever it comes again for.
            is_observer=is_observer and (known is None or known.link.is_observer),
            timeout_s=self._timeout_s,
            reader=self._reader,
            within_s=within_s,
        )
        if known is None:
            source = Source(link, self._make_arenas(), self._agent())
            self._held.sources[endpoint.publisher_id] = source
            return source
        known.reconnect(link)
        return known

    def _renew_agent(self, jobs: Sequence[Job]) -> None:
        """Go on with a new agent, which the next import makes.

        Reads that did not end may still write to this side's memory: nothing that the library
        offers calls them off. Until they end, or their agent does, their slots are not used.
        """
        held, old = self._held, self._held.agent
        if old is None:
            return
        held.under_way = old, jobs  # first: what an interrupt cuts off, `_sweep` does again
        _LOG.warning("a read failed or did not end: this side's connections are made anew")
        for source in held.sources.values():
            source.let_go()
            source.link.hang_up()
        held.agent = None
        self._past += old.made
        held.parked.append((old, jobs))
        held.under_way = None
        self._sweep()

    def _sweep(self) -> None:
        """Close agents whose reads ended meanwhile, and use their slots again."""
        held = self._held
        if held.under_way is not None:  # an interrupt cut off its end
            agent, jobs = held.under_way
            if agent is held.agent:
                self._renew_agent(jobs)
                return
            held.parked.append((agent, jobs))
            held.under_way = None
        held.sweep()

    # ---- the rest -------------------------------------------------------------------------------

    def meet(self, manifests: Sequence[WeightUpdateManifest]) -> None:
        """Connect to these publishers, within a short time for all; later ones have their turn."""
        until = time.monotonic() + self._meet_s
        for manifest in manifests:
            try:
                endpoint = self._handle(manifest).endpoint
            except WeightBridgeError as error:
                _LOG.warning("it will not hear of this update: %s", error)
            else:
                self._reach(endpoint, until, is_observer=False)

    def _reach(self, endpoint: NIXLEndpoint, until: float, *, is_observer: bool) -> None:
        """Connect, if there is time, to a publisher that could be reached lately."""
        name, now = endpoint.publisher_id, time.monotonic()
        if now >= until or now < self._unreachable.get(name, 0.0):
            return
        try:
            self._source(endpoint, is_observer=is_observer, within_s=until - now)
        except WeightBridgeError as error:
            if isinstance(error, TransferTimeout) and until - now < self._meet_s / 2:
                _LOG.warning("it will not hear of this update: %s", error)
                return  # others took its time: it did not have the chance to answer
            now = time.monotonic()
            # Of those that are gone for good nobody asks again.
            rests = {one: end_at for one, end_at in self._unreachable.items() if end_at > now}
            self._unreachable = rests | {name: now + _REST_S}
            _LOG.warning("it will not hear of updates for %s s: %s", _REST_S, error)
        else:
            self._unreachable.pop(name, None)

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Tell the publisher, if this side is connected to it."""
        known = self._held.sources.get(manifest.publisher_id)
        if known is None:
            _LOG.info("the publisher will not hear of %s: not connected to it", report.update_id)
        else:
            known.link.report(report)

    def in_one_go(self) -> AbstractContextManager[None]:
        """The end of a lease waits for the report that it goes with."""
        return self._held

    def settle(self) -> None:
        """Let go of versions that were imported, and of publishers that are gone.

        Where a connection ended and the publisher is not gone, it hears what it missed.
        """
        self._sweep()
        until = time.monotonic() + self._meet_s
        for link in [source.link for source in self._held.sources.values()]:
            if link.is_lost and link.reports:
                self._reach(link.endpoint, until, is_observer=link.is_observer)
        busy = {job.source for _, jobs in self._held.parked for job in jobs}
        for publisher_id, source in list(self._held.sources.items()):
            source.arrivals.sweep()
            if source.link.is_lost and not source.arrivals.is_needed and source not in busy:
                del self._held.sources[publisher_id]
                source.close()

    def close(self) -> None:
        """Say goodbye everywhere; tensors keep what they look at. Idempotent."""
        end(self._pid, self._held)
        self._finalizer.detach()  # behind it: what an interrupt cuts off, the next call ends
