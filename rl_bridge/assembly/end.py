"""`GroupEnd`: the consumer's end for versions of several parts, whatever their transports.

The parts that a reader needs are attached over their own transports, the leaves that cover the
needed bytes are verified, and the wanted tensors are assembled here, in a ring of sealed slots of
this process, like a shared-memory publisher's. A slot is free as soon as its last tensor is gone,
so a version that an engine still holds stays for an undo.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple

from rl_bridge.assembly.assemble import (
    ArenaLanding,
    Assembly,
    AssemblyPlan,
    LandingPlan,
    require_sealed,
)
from rl_bridge.assembly.plan import ReshardPlan, make_plan
from rl_bridge.assembly.wanted import Wanted, WantedLayout, everything
from rl_bridge.errors import TransportUnavailable
from rl_bridge.manifest.group import GROUP, GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.passes import checked_count, checked_threads
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Attachment
from rl_bridge.transports.base import (
    Availability,
    Carried,
    ConsumerEnd,
    PartRequest,
    PublisherEnd,
    Transport,
)
from rl_bridge.transports.registry import transport_class
from rl_bridge.transports.shared_memory import SharedMemory, SharedPublisher

_LOG = logging.getLogger(__name__)
# Plans of the layouts seen last: one, but for runs that change their layout.
_PLANS = 4


class Recipe(NamedTuple):
    """How one layout's wanted tensors are made."""

    assembly: Assembly
    landing: LandingPlan | None
    """Into a slot without a copy between; None if that is not worth it."""


class GroupTransport(Transport):
    """A consumer's way to versions whose parts travel by several transports."""

    name: ClassVar[str] = GROUP
    crosses_processes: bool = True
    zero_copy_import: bool = False
    binds_header: bool = True

    def __init__(
        self,
        *,
        transports: Mapping[str, Mapping[str, object]] | None = None,
        wanted: Wanted | WantedLayout | None = None,
        max_slots: int = 4,
        num_threads: int | None = None,
    ) -> None:
        """Take the options of a `GroupBridge`; nothing is opened yet."""
        self._transports = {
            name: transport_class(name).create(**options)
            for name, options in (transports or {}).items()
        }
        self._wanted = wanted
        self._max_slots = checked_count("max_slots", max_slots)
        self._num_threads = checked_threads(num_threads)

    @classmethod
    def probe(cls) -> Availability:
        """Assembled versions lie in shared memory."""
        found = SharedMemory.probe()
        return Availability(cls.name, found.status, found.cause, found.remedy)

    def publisher_end(self, publisher_id: str) -> PublisherEnd:  # noqa: ARG002 - whoever asks
        """Refuse: a group is published by its ranks."""
        raise TransportUnavailable(
            GROUP,
            "this bridge only imports what a group's ranks published",
            "Publish with GroupPublisher, through a bridge of each rank.",
        )

    def consumer_end(self, worker: str, rank: int) -> "GroupEnd":
        """Open the engine's end."""

        def open_end(name: str) -> tuple[ConsumerEnd, bool]:
            transport = self._transports.get(name) or transport_class(name).create()
            return transport.consumer_end(worker, rank), transport.binds_header

        return GroupEnd(
            open_end, wanted=self._wanted, max_slots=self._max_slots, num_threads=self._num_threads
        )


class GroupEnd(ConsumerEnd):
    """Holds the ends of the parts' transports, the plans, and the ring of assembled versions."""

    def __init__(
        self,
        open_end: Callable[[str], tuple[ConsumerEnd, bool]],
        *,
        wanted: Wanted | WantedLayout | None = None,
        max_slots: int = 4,
        num_threads: int | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            open_end: opens the end of a part's transport, by its name, and tells whether it binds
                headers.
            wanted: what is assembled; None: every tensor, whole.
            max_slots: most assembled versions held at a time.
            num_threads: threads that verify, copy and digest; None takes the usable cores, at
                most 8.

        """
        self._open_end = open_end
        self._wanted = wanted
        self._num_threads = num_threads
        self._memory = SharedMemory(max_slots=max_slots, max_consumers=1, num_threads=num_threads)
        self._reader = self._memory.consumer_end("", 0)
        self._ring: tuple[str, SharedPublisher] | None = None
        self._by_transport: dict[str, ConsumerEnd] = {}
        # The transports, by name, that seal the digest of a header beside the bytes.
        self._bound: set[str] = set()
        self._recipes: OrderedDict[tuple[str, str], Recipe] = OrderedDict()

    def plan(self, layout: GroupLayout) -> ReshardPlan:
        """How the wanted tensors are made of a group with that layout; made once per layout.

        Raises:
            IncompatibleUpdate: something is wanted that the group does not hold.

        """
        return self._recipe(layout, None).assembly.plan

    def known_end(self, name: str) -> ConsumerEnd | None:
        """The end of a transport that parts came by."""
        return self._by_transport.get(name)

    # ---- assembling -----------------------------------------------------------------------------

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Assemble what is wanted of a version. See `assemble`."""
        return self.assemble(manifest, None)

    def assemble(self, group: WeightUpdateManifest, wanted: WantedLayout | None) -> Attachment:
        """Import the parts that are needed, assemble them, and release them.

        With `wanted`, this is assembled instead of what the end was made for.

        Raises:
            IncompatibleUpdate: something is wanted that the group does not hold.
            DigestMismatch: the manifest is not the one that was published.
            WeightBridgeError: of a part's transport, or of the assembly; nothing is held.

        """
        group = _checked(group)
        assembly, landing = self._recipe(group.layout, wanted)
        try:
            end = None if landing is None else self._landing_end(group, assembly.plan)
            if landing is None or end is None:
                carried = self._copied(group, assembly)
            else:
                carried = self._landed(group, landing, end)
            self._ring_of(group.publisher_id).seal_header(group.update_id, group.header_digest)
            manifest = _assembled(group, carried, assembly.plan)
            found = self._reader.look(manifest)
        finally:
            # The attachment has leased the slot by now.
            if self._ring is not None:
                self._ring[1].release(group.update_id)
            for one in self._by_transport.values():
                one.settle()
        found.digested(carried.digests)
        found.tensors.manifest = manifest
        needed = {needs.part for needs in assembly.plan.parts}
        self.meet([part for rank, part in enumerate(group.parts) if rank not in needed])
        return found

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        """Begin with a version that an engine's ranks import: nothing of it is attached here."""
        group = _checked(manifest)
        table = group.table if self._wanted is None else self.plan(group.layout).table
        self.meet(group.parts)
        return Attachment(table, None, is_part=True)

    def _recipe(self, layout: GroupLayout, wanted: WantedLayout | None) -> Recipe:
        key = layout.digest, "" if wanted is None else wanted.digest
        recipe = self._recipes.get(key)
        if recipe is None:
            chosen = wanted or self._wanted or everything()
            if not isinstance(chosen, WantedLayout):
                chosen = chosen(layout.wholes)
            plan = make_plan(layout, chosen)
            assembly = Assembly(plan, layout, num_threads=self._num_threads)
            recipe = Recipe(assembly, LandingPlan.make(assembly, layout))
            self._recipes[key] = recipe
            while len(self._recipes) > _PLANS:
                self._recipes.popitem(last=False)
        return recipe

    def _copied(self, group: GroupManifest, assembly: Assembly) -> Carried:
        """Copy from the transports' memory into a slot."""
        attachments: dict[int, Attachment] = {}
        try:
            for end, ranks, requests in self._requests(group, assembly.plan):
                attachments.update(zip(ranks, end.attach_parts(requests), strict=True))
            headers = {rank: one.tensors.pin.header for rank, one in attachments.items()}
            require_sealed(group, headers, self._bound)
            plan = AssemblyPlan(assembly, group, attachments)
            return self._ring_of(group.publisher_id).carry(plan, {}, group.update_id)
        finally:
            # An exception that somebody keeps must not keep the publishers' slots.
            for attachment in attachments.values():
                attachment.tensors.forget()
            attachments.clear()

    def _landed(self, group: GroupManifest, plan: LandingPlan, end: ConsumerEnd) -> Carried:
        """Read straight into a slot."""
        ring = self._ring_of(group.publisher_id)
        landing = ArenaLanding(plan, ring, self._num_threads)
        slot: Slot | None = None
        try:
            landed = end.read_into(plan.requests(group), landing)
            slot = landed.slot
            ranks = [one.part for one in plan.ranges]
            require_sealed(group, dict(zip(ranks, landed.headers, strict=True)), self._bound)
            digests = landing.finish(group, slot)
            handle = ring.commit(slot, group.update_id, plan.table)
            return Carried(digests=digests, handle=handle)
        except BaseException:
            landing.stop()
            if slot is not None:
                landing.abandon(slot)
            raise

    def _landing_end(self, group: GroupManifest, plan: ReshardPlan) -> ConsumerEnd | None:
        """The one end that reads all the needed parts without a copy, if there is one."""
        parts = [group.parts[needs.part] for needs in plan.parts]
        transports = {part.transport for part in parts}
        publishers = {part.publisher_id for part in parts}
        if len(transports) != 1 or len(publishers) < len(parts):
            return None
        end = self._end_for(parts[0])
        return end if end.lands else None

    def _requests(
        self, group: GroupManifest, plan: ReshardPlan
    ) -> list[tuple[ConsumerEnd, list[int], list[PartRequest]]]:
        """For each transport's end, the needed parts, to be read in one call."""
        asked: dict[str, tuple[ConsumerEnd, list[int], list[PartRequest]]] = {}
        for needs in plan.parts:
            part = group.parts[needs.part]
            request = PartRequest(manifest=part, starts=needs.read_starts, nbytes=needs.read_nbytes)
            _, ranks, requests = asked.setdefault(part.transport, (self._end_for(part), [], []))
            ranks.append(needs.part)
            requests.append(request)
        return list(asked.values())

    def _ring_of(self, publisher_id: str) -> SharedPublisher:
        if self._ring is not None and self._ring[0] != publisher_id:
            # Another stream of versions. Slots of the old one that an engine reads stay mapped.
            _, ring = self._ring
            self._ring = None
            ring.close()
        if self._ring is None:
            self._ring = (publisher_id, self._memory.publisher_end(publisher_id))
        return self._ring[1]

    def _end_for(self, part: WeightUpdateManifest) -> ConsumerEnd:
        end = self._by_transport.get(part.transport)
        if end is None:
            end, binds_header = self._open_end(part.transport)
            self._by_transport[part.transport] = end
            if binds_header:
                self._bound.add(part.transport)
        return end

    # ---- reports --------------------------------------------------------------------------------

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Report to every rank that published a part; best effort if one is gone."""
        for part in _checked(manifest).parts:
            # The parts themselves are released as soon as they are assembled.
            changes = {"update_id": part.update_id, "tensors_held": False}
            mine = report.model_copy(update=changes)
            try:
                self._end_for(part).report(part, mine)
            except Exception:  # noqa: BLE001 - logged in full
                _LOG.exception("the publisher of a part did not get the report %s", mine)

    def meet(self, manifests: Sequence[WeightUpdateManifest]) -> None:
        """Connect to ranks of whose parts nothing is attached, so that they get reports too."""
        parts: dict[str, list[WeightUpdateManifest]] = {}
        for part in manifests:
            parts.setdefault(part.transport, []).append(part)
        for found in parts.values():
            self._end_for(found[0]).meet(found)

    def in_one_go(self) -> AbstractContextManager[None]:
        """See `ConsumerEnd`; where parts come by several transports, one by one."""
        ends = list(self._by_transport.values())
        return ends[0].in_one_go() if len(ends) == 1 else nullcontext()

    def settle(self) -> None:
        """Release memory that nobody needs."""
        self._reader.settle()
        for end in self._by_transport.values():
            end.settle()

    def close(self) -> None:
        """Release everything that no tensor needs. Idempotent."""
        self._reader.close()
        for end in self._by_transport.values():
            end.close()
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None


def _checked(manifest: WeightUpdateManifest) -> GroupManifest:
    assert isinstance(manifest, GroupManifest)  # the consumer brings others elsewhere
    return manifest


def _assembled(group: GroupManifest, carried: Carried, plan: ReshardPlan) -> WeightUpdateManifest:
    """The manifest of what was assembled, as an update of the group's stream of versions."""
    return WeightUpdateManifest(
        update_id=group.update_id,
        publisher_id=group.publisher_id,
        source_worker=group.parts[0].source_worker,
        source_rank=0,
        weight_version=group.weight_version,
        transport=GROUP,
        created_at=group.created_at,
        metadata={
            **group.metadata,
            "layout": {"kind": group.parts[0].weight_layout.kind},
            "group_root": group.root,
            "wanted": plan.wanted_digest,
        },
        handle=dict(carried.handle),
        digests=carried.digests,
        table=plan.table,
    )
