"""The engine's end: leases versions at their publishers, and reads them into slots of its own.

The library cannot call off a read, and a read that did not end may still write to this side's
memory. So if a read fails or does not end, the consumer *parks* its agent and makes a new one for
the next import. The slots of a parked agent are not used before its reads ended, or the agent did.
"""

import logging
import os
import select
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
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
from rl_bridge.memory.slots import ARRIVING, Slot
from rl_bridge.memory.views import Attachment
from rl_bridge.transports.base import Landed, Landing, PartRequest
from rl_bridge.transports.nixl.agent import Agent, AgentError, Counters, MemoryRefused
from rl_bridge.transports.nixl.arenas import SlotRegistry
from rl_bridge.transports.nixl.fetch import ControlClient, Fetch, Job, SharedSlot, Source, TornRead
from rl_bridge.transports.nixl.messages import Entry, Join, NIXLEndpoint, NIXLHandle
from rl_bridge.transports.wire.arenas import Arenas
from rl_bridge.transports.wire.channel import read_handle
from rl_bridge.transports.wire.ends import Options, PeerConsumer

_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")

_NO_RANGES = np.empty(0, np.int64)  # one: what is read is kept by the identity of its ranges
_PAUSE_MS = 5
_LONGEST_PAUSE_MS = 500
_MAX_PARKED = 2  # each costs a slot, memory and descriptors
_MEET_S = 2.0  # for all connections of one import that only a report needs
_REST_S = 60.0  # for so long a publisher that could not be reached is left alone


class _Parked(NamedTuple):
    """An agent that was given up, with reads that may not have ended."""

    agent: Agent
    jobs: Sequence[Job]

    @property
    def is_over(self) -> bool:
        """Whether no byte can arrive any longer."""
        return self.agent.is_closed or all(
            job.reading is None or job.reading.drain() for job in self.jobs
        )


class _Resources:
    """The things that a consumer's end has to close, or its finalizer if it is dropped instead."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.sources: dict[str, Source] = {}
        self.parked: list[_Parked] = []
        self.landings: SlotRegistry | None = None
        """Slots of callers that were read into."""

    def end(self, ended: Sequence[_Parked]) -> bool:
        """Close parked agents, and release the slots that they read into."""
        for one in ended:
            one.agent.close()
            for job in one.jobs:
                job.release()
            self.parked.remove(one)
        return bool(ended)

    def sweep(self) -> None:
        """Close parked agents whose reads ended meanwhile.

        Reads at a publisher that hangs may never end: all but the last few agents are closed.
        """
        going_on = [one for one in self.parked if not one.is_over]
        kept = going_on[-_MAX_PARKED:]
        self.end([one for one in self.parked if one not in kept])

    def end_reads_into(self, slot: Slot) -> None:
        """Close agents that may still write to a slot, whose memory is about to go."""
        for one in list(self.parked):
            targets = [job.shared for job in one.jobs if job.shared and job.shared.slot is slot]
            for shared in targets:
                shared.slot = None
            self.end([one] if targets else [])

    def end_landings(self) -> bool:
        """Close agents that may still write to callers' slots; returns whether there were any."""
        return self.end([one for one in self.parked if any(job.shared for job in one.jobs)])


def _close(pid: int, resources: _Resources) -> None:
    """Close everything; does nothing in another process than `pid`. Idempotent."""
    if os.getpid() != pid:
        return
    for source in resources.sources.values():
        source.forget_reads()
    # Agents before connections: when a publisher sees the end, no byte can arrive any longer.
    if resources.agent is not None:
        resources.agent.close()
    resources.end(list(resources.parked))
    for source in resources.sources.values():
        source.close()
    resources.sources.clear()


class NIXLConsumer(PeerConsumer):
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
        options: Options,
    ) -> None:
        """Open nothing yet."""
        super().__init__(worker, rank, backend=backend, make_arenas=make_arenas, options=options)
        self._make_agent = make_agent
        self._token = token
        self._timeout_s = options.timeout_s
        self._meet_s = min(_MEET_S, options.timeout_s)
        self._resources = _Resources()
        self._num_gathering = 0
        """How many callers are inside of `in_one_go`."""
        self._past = Counters()
        self._unreachable: dict[str, float] = {}
        """Publisher that could not be reached -> when it may be tried again."""
        # A bridge that is dropped instead of closed must not keep its memory and connections.
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._resources)

    # ---- counters and catalog -------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """How much was made so far; in steady state none of it grows."""
        agent = self._resources.agent
        return self._past + (Counters() if agent is None else agent.made)

    def catalog(self, manifest: WeightUpdateManifest) -> tuple[Entry, ...]:
        """Ask for the versions that the publisher of a manifest holds.

        Raises:
            SegmentError: it is gone.
            WeightBridgeUnavailableError: it has no room for this side, or cannot be reached.
            TransferTimeout: it does not answer in time.

        """

        def ask() -> tuple[Entry, ...]:
            return self._source(self._handle(manifest).endpoint, is_observer=True).client.catalog()

        return self._retried(manifest.update_id, ask)

    # ---- attaching ------------------------------------------------------------------------------

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Read a version, unless it is here already, and lease it."""
        return self._attach([PartRequest(manifest=manifest)], is_observer=False)[0]

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        """Take a version's lease and its header, and read no byte of it."""
        request = PartRequest(manifest=manifest, starts=_NO_RANGES, nbytes=_NO_RANGES)
        return self._attach([request], is_observer=False)[0]

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        """Read parts from all their publishers at once, and lease them."""
        publishers = {part.manifest.publisher_id for part in parts}
        if len(publishers) < len(parts):
            return super().attach_parts(parts)  # a publisher allows one reading at a time
        return self._attach(parts, is_observer=False)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        """Do the same as `attach`, and leave no record."""
        return self._attach([PartRequest(manifest=manifest)], is_observer=True)[0]

    def read_into(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        """Read ranges of parts into an arena of the caller's, from all publishers at once."""
        return self._retried(parts[0].manifest.update_id, lambda: self._land_once(parts, landing))

    def _attach(self, parts: Sequence[PartRequest], *, is_observer: bool) -> list[Attachment]:
        return self._retried(
            parts[0].manifest.update_id, lambda: self._attach_once(parts, is_observer=is_observer)
        )

    def _retried(self, update_id: str, once: Callable[[], _Made]) -> _Made:
        """Try until it works or the deadline is over; at least twice if a connection broke.

        Raises:
            StaleUpdate: the publisher wrote to the version again and again.
            WeightBridgeUnavailableError: reads fail, which says nothing against the update.

        """
        self._resources.sweep()
        until = time.monotonic() + self._timeout_s
        num_broken, pause_ms = 0, _PAUSE_MS
        while True:
            try:
                return once()
            except TornRead as error:
                # The publisher wrote meanwhile: this side's lease was lost.
                if time.monotonic() >= until:
                    raise StaleUpdate(str(error)) from error
            except AgentError as error:
                # Only the connection may be broken: try again, on a new one. The process that
                # serves reads may die more than once.
                num_broken += 1
                is_refused = isinstance(error, MemoryRefused)
                if num_broken > 1 and (is_refused or time.monotonic() >= until):
                    reason = str(error).removesuffix(".")
                    remedy = "Check that its publisher runs and can be reached"
                    if is_refused:
                        remedy = "Check how much memory this process may lock and register"
                    raise WeightBridgeUnavailableError(
                        f"update {update_id} cannot be read: {reason}. {remedy}, then import it "
                        "again."
                    ) from error
                # With a new agent: the library looks for networks only when one is made.
                self._renew_agent(())
                _LOG.warning("%s Trying again, on a new connection.", error)
                if num_broken == 1:
                    continue
            select.poll().poll(pause_ms)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

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
            fetch.run()
            for job in jobs:
                attached[job.index] = job.attach(self._options.num_threads)
            is_here = True
        except BaseException:
            for one in attached:
                if one is not None:
                    one.tensors.forget()
            raise
        finally:
            if fetch.close(with_next=is_here and self._num_gathering > 0):
                self._renew_agent(jobs)
        return [one for one in attached if one is not None]

    def _land_once(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        resources = self._resources
        agent = self._agent()
        if resources.landings is None:
            resources.landings = SlotRegistry(agent, torch.device("cpu"))
        try:
            slot = landing.reserve()
        except SlotsExhausted:
            if not resources.end_landings():  # reads at a publisher that hangs may never end
                raise
            slot = landing.reserve()
        jobs: list[Job] = []
        fetch = Fetch(jobs, timeout_s=self._timeout_s)
        shared = SharedSlot(landing, slot)
        is_here = False
        try:
            shared.known = resources.landings.add(
                slot, before_end=lambda: resources.end_reads_into(slot)
            )
            for index, part in enumerate(parts):
                handle = self._handle(part.manifest)
                source = self._source(handle.endpoint, is_observer=False)
                jobs.append(Job(index, part, handle, source, shared=shared))
            slot.update_id = ARRIVING
            fetch.run()
            made = Landed(slot, [job.header for job in jobs])
            is_here = True
            shared.slot = slot.update_id = None  # it belongs to the caller now
        finally:
            if fetch.close(with_next=is_here and self._num_gathering > 0):
                self._renew_agent(jobs)  # the slot is released when its reads ended
            else:
                shared.release()
        return made

    def _here(self, part: PartRequest, handle: NIXLHandle) -> Attachment | None:
        """Attach a version that was read earlier, if it is still here."""
        manifest = part.manifest
        source = self._resources.sources.get(manifest.publisher_id)
        if source is None or part.starts is not None:
            return None
        return source.arrivals.attach(
            manifest.update_id,
            manifest.table,
            generation=handle.generation,
            num_threads=self._options.num_threads,
        )

    def _handle(self, manifest: WeightUpdateManifest) -> NIXLHandle:
        handle = read_handle(NIXLHandle, manifest)
        handle.endpoint.require_backend("nixl", self._backend)
        return handle

    # ---- connections ----------------------------------------------------------------------------

    def _agent(self) -> Agent:
        """Find or make this side's agent; registers all slots with a new one."""
        resources = self._resources
        if resources.agent is None:
            agent = self._make_agent()
            try:
                for source in resources.sources.values():
                    source.move_to(agent)
                if resources.landings is not None:
                    resources.landings.move_to(agent)
            except BaseException:
                agent.close()  # the next attempt begins anew
                raise
            resources.agent = agent
        return resources.agent

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
        """Find or make the connection to a publisher, within the shorter of the two times."""
        known = self._resources.sources.get(endpoint.publisher_id)
        if known is not None and not known.client.is_lost and known.client.endpoint == endpoint:
            if not is_observer:
                known.client.follow()
            return known
        client = ControlClient(
            endpoint,
            self._token_of(endpoint),
            # Made after the publisher answered: an agent only knows interfaces that were up then.
            self._agent,
            Join(
                # A consumer that left a record keeps it when it reconnects.
                **self._name(
                    is_observer=is_observer and (known is None or known.client.is_observer)
                ),
                timeout_s=self._timeout_s,
            ),
            self._options,
            within_s=within_s,
        )
        if known is None:
            source = Source(client, self._make_arenas(), self._agent())
            self._resources.sources[endpoint.publisher_id] = source
            return source
        known.reconnect(client)
        return known

    def _renew_agent(self, jobs: Sequence[Job]) -> None:
        """Park this agent; the next import makes a new one."""
        resources, old = self._resources, self._resources.agent
        if old is None:
            return
        _LOG.warning("a read failed or did not end: this side's connections are made anew")
        for source in resources.sources.values():
            source.forget_reads()
            source.client.hang_up()
        resources.agent = None
        self._past += old.made
        resources.parked.append(_Parked(old, jobs))
        resources.sweep()

    # ---- reports, and the end -------------------------------------------------------------------

    def meet(self, manifests: Sequence[WeightUpdateManifest]) -> None:
        """Connect to these publishers, within one short time for all of them."""
        until = time.monotonic() + self._meet_s
        for manifest in manifests:
            try:
                endpoint = self._handle(manifest).endpoint
            except WeightBridgeError as error:
                _LOG.warning("a publisher will not hear of this update: %s", error)
            else:
                self._reach(endpoint, until, is_observer=False)

    def _reach(self, endpoint: NIXLEndpoint, until: float, *, is_observer: bool) -> None:
        """Connect, if there is time, unless the publisher could not be reached lately."""
        name, now = endpoint.publisher_id, time.monotonic()
        if now >= until or now < self._unreachable.get(name, 0.0):
            return
        try:
            self._source(endpoint, is_observer=is_observer, within_s=until - now)
        except WeightBridgeError as error:
            if isinstance(error, TransferTimeout) and until - now < self._meet_s / 2:
                _LOG.warning("a publisher will not hear of this update: %s", error)
                return  # the other publishers took the time that it needed to answer
            now = time.monotonic()
            rests = {one: end_at for one, end_at in self._unreachable.items() if end_at > now}
            self._unreachable = rests | {name: now + _REST_S}
            _LOG.warning("a publisher will not hear of updates for %s s: %s", _REST_S, error)
        else:
            self._unreachable.pop(name, None)

    def _client_of(self, publisher_id: str) -> ControlClient | None:
        known = self._resources.sources.get(publisher_id)
        return None if known is None else known.client

    @contextmanager
    def in_one_go(self) -> Iterator[None]:
        """Send the end of a lease together with the report that follows it."""
        self._num_gathering += 1
        try:
            yield
        finally:
            self._num_gathering -= 1
            if not self._num_gathering:
                for source in self._resources.sources.values():
                    source.client.send_deferred()

    def settle(self) -> None:
        """Release versions that were imported, and connections to publishers that are gone.

        A publisher that lives, and whose connection ended, gets the reports that it missed.
        """
        self._resources.sweep()
        until = time.monotonic() + self._meet_s
        for client in [source.client for source in self._resources.sources.values()]:
            if client.is_lost and client.reports:
                self._reach(client.endpoint, until, is_observer=client.is_observer)
        busy = {job.source for _, jobs in self._resources.parked for job in jobs}
        for publisher_id, source in list(self._resources.sources.items()):
            source.arrivals.sweep()
            if source.client.is_lost and not source.arrivals.is_needed and source not in busy:
                del self._resources.sources[publisher_id]
                source.close()

    def close(self) -> None:
        """Close everything; tensors keep the memory that they show. Idempotent."""
        self._finalizer()
