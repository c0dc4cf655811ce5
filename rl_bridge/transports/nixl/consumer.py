"""The engine's end: leases versions at their publishers, and reads them into slots of its own."""

import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar

import torch

from rl_bridge.errors import (
    SlotsExhausted,
    TransferTimeout,
    TransportUnavailable,
    WeightBridgeError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.slots import ARRIVING
from rl_bridge.transports._landing import Landed, Landing
from rl_bridge.transports._wire.arenas import Arenas
from rl_bridge.transports._wire.handles import read_handle, require_publisher
from rl_bridge.transports.base import Attachment, ConsumerEnd, PartRequest
from rl_bridge.transports.nixl.agent import Agent, Counters
from rl_bridge.transports.nixl.arenas import KnownSlots
from rl_bridge.transports.nixl.attempts import tried
from rl_bridge.transports.nixl.endpoint import NIXLEndpoint, NIXLHandle
from rl_bridge.transports.nixl.fetch import Fetch, Job, Room
from rl_bridge.transports.nixl.held import Held, end
from rl_bridge.transports.nixl.link import Link
from rl_bridge.transports.nixl.messages import Entry
from rl_bridge.transports.nixl.source import Source

__all__ = ["NIXLConsumer"]

_LOG = logging.getLogger(__name__)
# Of all attempts of one import to reach publishers of which nothing is needed.
_MEET_S = 2.0
# How long one that could not be reached is left alone.
_REST_S = 60.0
_Made = TypeVar("_Made")


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
        require_publisher(manifest, handle.endpoint.publisher_id)
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
            source.arrivals.settle()
            if source.link.is_lost and not source.arrivals.is_needed and source not in busy:
                del self._held.sources[publisher_id]
                source.close()

    def close(self) -> None:
        """Say goodbye everywhere; tensors keep what they look at. Idempotent."""
        end(self._pid, self._held)
        self._finalizer.detach()  # behind it: what an interrupt cuts off, the next call ends
