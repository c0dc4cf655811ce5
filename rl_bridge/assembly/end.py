"""`GroupEnd`: the consumer's end for versions of several parts.

The parts that a reader needs are attached over their transports, the leaves that cover the needed
bytes are verified, and the wanted tensors are assembled in a ring of sealed slots of this process.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from rl_bridge.assembly.assemble import (
    ArenaLanding,
    Assembly,
    AssemblyPlan,
    LandingPlan,
    require_sealed,
)
from rl_bridge.assembly.plan import ReshardPlan
from rl_bridge.errors import TransportUnavailable
from rl_bridge.lifecycle import State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GROUP, GroupManifest
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
# Each record holds its manifest: some megabytes if there are many tensors and ranks.
REMEMBERED = 8
_OVER = frozenset({str(State.REJECTED), str(State.RELEASED)})


class GroupTransport(Transport):
    """How assembled versions get from a group's parts to an engine: within one process."""

    name: ClassVar[str] = GROUP
    crosses_processes: bool = True
    zero_copy_import: bool = False

    def __init__(
        self,
        *,
        transports: Mapping[str, Mapping[str, object]] | None = None,
        max_slots: int = 4,
        num_threads: int | None = None,
    ) -> None:
        """Take the options of a `GroupBridge`; nothing is opened yet."""
        self._options = transports or {}
        self.max_slots = checked_count("max_slots", max_slots)
        self.num_threads = checked_threads(num_threads)
        for name in self._options:
            self.part_transport(name)

    @classmethod
    def probe(cls) -> Availability:
        """Assembled versions lie in shared memory."""
        found = SharedMemory.probe()
        return Availability(cls.name, found.status, found.cause, found.remedy)

    def part_transport(self, name: str) -> Transport:
        """The transport of a part, with the options that were given for it."""
        return transport_class(name).create(**self._options.get(name, {}))

    def publisher_end(self, publisher_id: str) -> PublisherEnd:  # noqa: ARG002 - whoever asks
        """Refuse: a group is published by its ranks.

        Raises:
            TransportUnavailable: always.

        """
        raise TransportUnavailable(
            GROUP,
            "this bridge only imports what a group's ranks published",
            "Publish with GroupPublisher, through a bridge of each rank.",
        )

    def consumer_end(self, worker: str, rank: int) -> "GroupEnd":
        """Open the engine's end."""
        return GroupEnd(self, worker, rank)


class GroupEnd(ConsumerEnd):
    """Holds the ends of the parts' transports, and the ring of assembled versions."""

    def __init__(self, transport: GroupTransport, worker: str, rank: int) -> None:
        """Open nothing yet."""
        self._transport = transport
        self._worker = worker
        self._rank = rank
        self._memory = SharedMemory(
            max_slots=transport.max_slots, max_consumers=1, num_threads=transport.num_threads
        )
        self._reader = self._memory.consumer_end(worker, rank)
        self._ring: tuple[str, SharedPublisher] | None = None
        self._ends: dict[str, ConsumerEnd] = {}
        # Names of their transports that keep the digest of a header beside the bytes.
        self._bound: set[str] = set()
        self._sound: GroupManifest | None = None
        self._groups: OrderedDict[str, tuple[GroupManifest, Mapping[str, JSONValue]]] = (
            OrderedDict()
        )
        self._made: dict[str, WeightUpdateManifest] = {}
        self._lent: set[str] = set()
        self.timings_ms: dict[str, float] = {}
        """Update -> milliseconds that its assembly took."""

    # ---- assembling -----------------------------------------------------------------------------

    def made(self, update_id: str) -> WeightUpdateManifest | None:
        """The manifest of an assembled version that is still here."""
        return self._made.get(update_id)

    def group(self, update_id: str) -> GroupManifest | None:
        """The group manifest of one of the last updates."""
        known = self._groups.get(update_id)
        return None if known is None else known[0]

    def remember(self, group: GroupManifest, evidence: Mapping[str, JSONValue]) -> None:
        """Remember to whom to report about an update, and the evidence beside its proof."""
        self._groups.pop(group.update_id, None)
        self._groups[group.update_id] = (group, evidence)
        # A version that is assembled, or imported by ranks, is remembered until it is released.
        held = {*self._made, *self._lent, group.update_id}
        over = [one for one in self._groups if one not in held]
        for update_id in over[: max(0, len(self._groups) - REMEMBERED)]:
            del self._groups[update_id]
            self.timings_ms.pop(update_id, None)

    def wanted(self, update_id: str) -> JSONValue:
        """Digest of the layout in which an update was assembled; None if it was not."""
        known = self._groups.get(update_id)
        return None if known is None else known[1].get("wanted")

    def lend(self, group: GroupManifest) -> None:
        """Begin with an update that an engine's ranks import: its publishers get its reports."""
        self._lent.add(group.update_id)
        self.remember(group, {"group_root": group.root})
        self.meet(group.parts)

    def is_lent(self, group: GroupManifest) -> bool:
        """Whether an engine's ranks import it."""
        return group.update_id in self._lent

    def end_of(self, name: str) -> ConsumerEnd | None:
        """The end of a transport that parts came by."""
        return self._ends.get(name)

    def is_as_published(self, group: GroupManifest) -> bool:
        """Whether the last assembly found this manifest to be the one that the ranks sealed."""
        return self._sound is group

    def forget_unless(self, is_known: Callable[[str], bool]) -> None:
        """Release versions that were assembled and never imported."""
        for update_id in [one for one in self._made if not is_known(one)]:
            self._release(update_id)

    def assemble(
        self, group: GroupManifest, assembly: Assembly, landing: LandingPlan | None = None
    ) -> WeightUpdateManifest:
        """Import the parts that are needed, assemble them, and release them.

        Raises:
            DigestMismatch: the manifest is not the one that was published.
            WeightBridgeError: of a part's transport, or of the assembly; nothing is held.

        """
        start = time.perf_counter()
        self._sound = None
        try:
            end = None if landing is None else self._end_that_lands(group, assembly.plan)
            if landing is None or end is None:
                carried = self._copied(group, assembly)
            else:
                carried = self._landed(group, landing, end)
            manifest = self._manifest(group, carried, assembly.plan)
            self.timings_ms[group.update_id] = (time.perf_counter() - start) * 1e3
            self._made[group.update_id] = manifest
            needed = {needs.part for needs in assembly.plan.parts}
            self.meet([part for rank, part in enumerate(group.parts) if rank not in needed])
        except BaseException:
            self._made.pop(group.update_id, None)
            if self._ring is not None:
                self._ring[1].release(group.update_id)
            raise
        finally:
            for one in self._ends.values():
                one.settle()
        return manifest

    def _copied(self, group: GroupManifest, assembly: Assembly) -> Carried:
        """Copy from the transports' memory into a slot."""
        attachments: dict[int, Attachment] = {}
        try:
            for end, ranks, requests in self._requests(group, assembly.plan):
                attachments.update(zip(ranks, end.attach_parts(requests), strict=True))
            headers = {rank: one.tensors.pin.header for rank, one in attachments.items()}
            require_sealed(group, headers, self._bound)
            self._sound = group
            plan = AssemblyPlan(assembly, group, attachments)
            return self._ring_of(group.group_id).carry(plan, {}, group.update_id)
        finally:
            # An exception that somebody keeps must not keep the publishers' slots.
            for attachment in attachments.values():
                attachment.tensors.forget()
            attachments.clear()

    def _landed(self, group: GroupManifest, plan: LandingPlan, end: ConsumerEnd) -> Carried:
        """Read straight into a slot."""
        ring = self._ring_of(group.group_id)
        landing = ArenaLanding(plan, ring, self._transport.num_threads)
        slot: Slot | None = None
        try:
            landed = end.read_into(plan.requests(group), landing)
            slot = landed.slot
            ranks = [one.part for one in plan.ranges]
            require_sealed(group, dict(zip(ranks, landed.headers, strict=True)), self._bound)
            self._sound = group
            digests = landing.finish(group, slot)
            handle = ring.commit(slot, group.update_id, plan.table)
            return Carried(digests=digests, handle=handle)
        except BaseException:
            landing.stop()
            if slot is not None:
                landing.abandon(slot)
            raise

    def _end_that_lands(self, group: GroupManifest, plan: ReshardPlan) -> ConsumerEnd | None:
        """The one end that reads all the needed parts without a copy, if there is one."""
        parts = [group.parts[needs.part] for needs in plan.parts]
        transports = {part.transport for part in parts}
        publishers = {part.publisher_id for part in parts}
        if len(transports) != 1 or len(publishers) < len(parts):
            return None
        end = self._end_of(parts[0])
        return end if end.lands else None

    def _requests(
        self, group: GroupManifest, plan: ReshardPlan
    ) -> list[tuple[ConsumerEnd, list[int], list[PartRequest]]]:
        """For each transport's end, the needed parts, to be read in one call."""
        asked: dict[str, tuple[ConsumerEnd, list[int], list[PartRequest]]] = {}
        for needs in plan.parts:
            part = group.parts[needs.part]
            request = PartRequest(manifest=part, starts=needs.read_starts, nbytes=needs.read_nbytes)
            _, ranks, requests = asked.setdefault(part.transport, (self._end_of(part), [], []))
            ranks.append(needs.part)
            requests.append(request)
        return list(asked.values())

    @staticmethod
    def _manifest(
        group: GroupManifest, carried: Carried, plan: ReshardPlan
    ) -> WeightUpdateManifest:
        """The assembled version, as an update of the group's stream of versions."""
        return WeightUpdateManifest(
            update_id=group.update_id,
            publisher_id=group.group_id,
            source_worker=group.parts[0].source_worker,
            source_rank=0,
            weight_version=group.weight_version,
            transport=GROUP,
            created_at=group.created_at,
            metadata={**group.metadata, "group_root": group.root},
            handle=dict(carried.handle),
            digests=carried.digests,
            table=plan.table,
        )

    def _ring_of(self, group_id: str) -> SharedPublisher:
        if self._ring is not None and self._ring[0] != group_id:
            # Another stream of versions. Slots of the old one that an engine reads stay mapped.
            _, ring = self._ring
            self._ring = None
            self._made.clear()
            ring.close()
        if self._ring is None:
            self._ring = (group_id, self._memory.publisher_end(group_id))
        return self._ring[1]

    def _end_of(self, part: WeightUpdateManifest) -> ConsumerEnd:
        end = self._ends.get(part.transport)
        if end is None:
            transport = self._transport.part_transport(part.transport)
            end = self._ends[part.transport] = transport.consumer_end(self._worker, self._rank)
            if transport.binds_header:
                self._bound.add(part.transport)
        return end

    def _release(self, update_id: str) -> None:
        if self._made.pop(update_id, None) is not None and self._ring is not None:
            self._ring[1].release(update_id)

    # ---- a consumer's end -----------------------------------------------------------------------

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Attach a version that was assembled here."""
        found = self._reader.look(manifest)
        made = self._made.get(manifest.update_id)
        # The digests belong to one slot: they do not hold for a manifest with another handle.
        if made is not None and (made.table.digest, made.handle) == (
            manifest.table.digest,
            manifest.handle,
        ):
            found.digested(made.digests)
        return found

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        """Report to every rank that published a part."""
        known = self._groups.get(manifest.update_id)
        if known is not None:
            extra = dict(known[1])
            if not isinstance(manifest, GroupManifest):
                extra["assembled_root"] = manifest.root
            self.report_to_all(
                known[0], report, None if report.proof is None else {**report.proof, **extra}
            )
        if report.state in _OVER:
            self._lent.discard(manifest.update_id)
            self._release(manifest.update_id)

    def report_to_all(
        self, group: GroupManifest, report: UpdateReport, proof: Mapping[str, JSONValue] | None
    ) -> None:
        """Report to every rank that published a part; best effort if one is gone."""
        for part in group.parts:
            # The parts themselves are released as soon as they are assembled.
            changes = {"update_id": part.update_id, "tensors_held": False}
            mine = report.model_copy(update={**changes, "proof": proof and dict(proof)})
            try:
                self._end_of(part).report(part, mine)
            except Exception:  # noqa: BLE001 - logged in full
                _LOG.exception("the publisher of a part did not get the report %s", mine)

    def meet(self, manifests: Sequence[WeightUpdateManifest]) -> None:
        """Connect to ranks of whose parts nothing is attached, so that they get reports too."""
        parts: dict[str, list[WeightUpdateManifest]] = {}
        for part in manifests:
            parts.setdefault(part.transport, []).append(part)
        for found in parts.values():
            self._end_of(found[0]).meet(found)

    def in_one_go(self) -> AbstractContextManager[None]:
        """See `ConsumerEnd`; where parts come by several transports, one by one."""
        ends = list(self._ends.values())
        return ends[0].in_one_go() if len(ends) == 1 else nullcontext()

    def settle(self) -> None:
        """Release memory that nobody needs."""
        self._reader.settle()
        for end in self._ends.values():
            end.settle()

    def close(self) -> None:
        """Release everything that no tensor needs. Idempotent."""
        self._reader.close()
        for end in self._ends.values():
            end.close()
        self._made.clear()
        if self._ring is not None:
            self._ring[1].close()
            self._ring = None
