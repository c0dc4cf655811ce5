"""`GroupBridge`: the engine's side of an update group; a consumer's bridge like any other.

`RolloutExecutor` takes it as its bridge, and then a `GroupManifest` where it takes a manifest. The
parts that this consumer needs are imported, the leaves that cover what it needs are verified,
and what it asked for is assembled: from there on it is one ordinary update with one life cycle,
whose end every publishing rank gets to know.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.arguments import UpdateRef
from rl_bridge.bridge.consumer import Consumer
from rl_bridge.bridge.group_assembly import Assembly
from rl_bridge.bridge.group_end import GROUP, GroupEnd, GroupTransport
from rl_bridge.bridge.group_landing import LandingPlan
from rl_bridge.bridge.guards import as_manifest
from rl_bridge.bridge.records import is_shortage
from rl_bridge.bridge.resharding import Wanted, WantedLayout, everything
from rl_bridge.bridge.resharding_plan import ReshardPlan, make_plan
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    MalformedManifest,
    SlotsExhausted,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle.machine import Observer
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.transports.base import Transport
from rl_bridge.transports.nixl.agent import Counters

if TYPE_CHECKING:
    from rl_bridge.transports.nixl.consumer import NIXLConsumer

__all__ = ["GroupBridge", "GroupRef"]

GroupRef = UpdateRef | GroupManifest
"""What names a group's update: its id, its manifest, or the manifest's JSON text."""

# Plans of the layouts seen last: one, but for runs that change their layout.
_PLANS = 4


class GroupBridge(TensorBridge):
    """Imports a group's versions in the layout that its engine wants.

    Wherever a `TensorBridge` takes a manifest or an id, this takes a `GroupManifest` or its text
    too. It publishes nothing.
    """

    transport: ClassVar[str] = GROUP

    def __init__(
        self,
        wanted: Wanted | WantedLayout | None = None,
        *,
        source_worker: str = "rollout",
        source_rank: int = 0,
        observer: Observer | None = None,
        transports: Mapping[str, Mapping[str, object]] | None = None,
        max_slots: int = 4,
        num_threads: int | None = None,
    ) -> None:
        """Configure; nothing is opened yet.

        Args:
            wanted: what the engine holds: see `rl_bridge.bridge.resharding`. None: every tensor,
                whole.
            source_worker: this worker's name.
            source_rank: its rank.
            observer: called with every lifecycle transition.
            transports: name of a transport -> its options, for parts whose transport needs some.
            max_slots: most assembled versions held in memory at a time.
            num_threads: threads that verify, copy and digest; None takes the usable cores.

        Raises:
            TypeError: an option of the wrong type, or one that a part's transport does not have.
            ValueError: an option out of its range.

        """
        super().__init__(
            source_worker=source_worker,
            source_rank=source_rank,
            observer=observer,
            transports=transports,
            max_slots=max_slots,
            num_threads=num_threads,
        )
        given: object = wanted
        if not (given is None or isinstance(given, WantedLayout) or callable(given)):
            msg = f"wanted={given!r}: expected what `parallel` or `everything` give, or a layout."
            raise TypeError(msg)
        self._wanted: Wanted | WantedLayout = everything() if wanted is None else wanted
        self._ways: OrderedDict[str, tuple[Assembly, LandingPlan | None]] = OrderedDict()

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        return GroupTransport.create(**options)

    # ---- importing ------------------------------------------------------------------------------

    def plan(self, layout: GroupLayout) -> ReshardPlan:
        """How this consumer's tensors are made of a group with that layout; made once, then kept.

        Raises:
            IncompatibleUpdate: something is wanted that the group does not hold.

        """
        return self._way(layout)[0].plan

    def resolve_update(self, given: GroupRef) -> WeightUpdateManifest:
        """Assemble a group's version here; returns the manifest of what was assembled.

        What an executor calls with what it is given. A manifest of an assembled version is returned
        as it is, and a group's version that is assembled already is not assembled again.

        Raises:
            BridgeClosed: it was closed.
            WeightBridgeError: nothing is held, and the engine was not touched; unless it is this
                side's fault, the update is rejected, and every publishing rank told.

        """
        group = _as_group(given)
        if group is None:
            return as_manifest(given, caller="resolve_update")
        consumer = self._consumer_end()
        end = _end_of(consumer)
        with consumer._lock:  # noqa: SLF001 - the bridge's other half
            consumer._check_open()  # noqa: SLF001 - before anything is read
            made = end.made(group.update_id)
            if made is not None:
                if end.group(group.update_id) != group:
                    msg = (
                        f"update {group.update_id} is assembled already, from another manifest. "
                        "Import the one that its publishers sent, or release the update first."
                    )
                    raise WeightUpdateRejectedError(msg)
                return made
            # It has what the order looks at: who published it, which version, which update.
            like = cast("WeightUpdateManifest", group)
            try:
                consumer._order.check(like, reason=self.rejection_reason(group.update_id))  # noqa: SLF001
            except WeightBridgeError as error:
                if not consumer.knows(group.update_id):  # else they were told what it is
                    self._tell_refused(group, describe(error))
                raise
            end.forget_unless(consumer.knows)
            end.remember(group, {"group_root": group.root})
            try:
                assembly, landing = self._way(group.layout)
                evidence = {"group_root": group.root, "wanted": assembly.plan.wanted_digest}
                end.remember(group, evidence)
                return end.assemble(group, assembly, landing)
            except BaseException as error:
                # What this side lacks is no fault of the update's: it may come again.
                if not (is_shortage(error) or isinstance(error, SlotsExhausted)):
                    is_of_a_copy = not end.is_as_published(group)
                    self._refuse(group, describe(error), is_of_a_copy=is_of_a_copy)
                raise

    @property
    def nixl_counters(self) -> Counters:
        """What reading parts over ``nixl`` made so far: see `NIXLTensorBridge.counters`.

        Zeros where no part came that way yet. What a rank holds, and who reads it, any
        `NIXLTensorBridge` tells: its `catalog` takes a group's ``parts``.
        """
        end = None if self._consumer is None else _end_of(self._consumer).end_of("nixl")
        return Counters() if end is None else cast("NIXLConsumer", end).counters

    def import_update(
        self, manifest: WeightUpdateManifest | GroupManifest | str
    ) -> Mapping[str, torch.Tensor]:
        """Assemble a group's version and import it. See `TensorBridge.import_update`."""
        # Held over both: another thread's update must not take the memory in between.
        consumer = self._consumer_end()
        with consumer._lock, consumer._end.in_one_go():  # noqa: SLF001 - the bridge's other half
            return super().import_update(self.resolve_update(manifest))

    def acknowledge(
        self,
        update_id: GroupRef,
        *,
        proof: Mapping[str, JSONValue] | None = None,
        timings_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Say that an update is installed; every publishing rank is told."""
        super().acknowledge(_plain(update_id), proof=proof, timings_ms=timings_ms)

    def reject(self, update_id: GroupRef, reason: str) -> None:
        """Refuse an update, imported or not; every publishing rank is told."""
        group = _as_group(update_id)
        if group is not None and not self._consumer_end().knows(group.update_id):
            _end_of(self._consumer_end()).remember(group, {"group_root": group.root})
            self._refuse(group, reason)
            return
        super().reject(_plain(update_id), reason)

    def release(self, update_id: GroupRef) -> None:
        """Let go of an update; every publishing rank is told. Idempotent."""
        super().release(_plain(update_id))

    def release_imported(self, update_id: GroupRef) -> None:
        """Let go of an imported update: the same as `release`."""
        super().release_imported(_plain(update_id))

    def update_state(self, update_id: GroupRef) -> State:
        """Fine state of an update here. See `TensorBridge.update_state`."""
        return super().update_state(_plain(update_id))

    def update_status(self, update_id: GroupRef) -> str:
        """One of the words of an update's status. See `TensorBridge.update_status`."""
        return super().update_status(_plain(update_id))

    def timings(self, update_id: GroupRef) -> dict[str, float]:
        """Phase -> milliseconds; ``assemble`` holds all that comes before the import."""
        update = _plain(update_id)
        found = super().timings(update)
        name = update if isinstance(update, str) else update.update_id
        if self._consumer is not None and self._pid == os.getpid():
            ms = _end_of(self._consumer).timings_ms.get(name)
            found |= {} if ms is None else {"assemble": ms}
        return found

    # ---- inside ---------------------------------------------------------------------------------

    def _way(self, layout: GroupLayout) -> tuple[Assembly, LandingPlan | None]:
        way = self._ways.get(layout.digest)
        if way is None:
            wanted = self._wanted
            chosen = wanted if isinstance(wanted, WantedLayout) else wanted(layout.wholes)
            transport = cast("GroupTransport", self._transport)
            assembly = Assembly(make_plan(layout, chosen), num_threads=transport.num_threads)
            way = self._ways[layout.digest] = assembly, LandingPlan.make(assembly, layout)
            while len(self._ways) > _PLANS:
                self._ways.popitem(last=False)
        return way

    def _refuse(self, group: GroupManifest, reason: str, *, is_of_a_copy: bool = False) -> None:
        """Never take this update again, and tell its publishers.

        Args:
            group: the update.
            reason: what they are told.
            is_of_a_copy: never take this very manifest, which may have been changed on its way; the
                one that was published may come.

        """
        consumer = self._consumer_end()
        is_known = consumer.knows(group.update_id)
        if is_of_a_copy:
            like = cast("WeightUpdateManifest", group)
            consumer._order.rejected_copy(like)  # noqa: SLF001 - the bridge's other half
            if is_known:
                return  # what they were told of the update itself stands
        elif not is_known:
            consumer.reject(group.update_id, reason)
        self._tell_refused(group, reason)

    def _tell_refused(self, group: GroupManifest, reason: str) -> None:
        report = UpdateReport(
            update_id=group.update_id,
            weight_version=group.weight_version,
            state=str(State.REJECTED),
            reason=reason,
        )
        _end_of(self._consumer_end()).tell(group, report, None)


def _end_of(consumer: Consumer) -> GroupEnd:
    return cast("GroupEnd", consumer._end)  # noqa: SLF001 - the bridge's other half


def _as_group(given: object) -> GroupManifest | None:
    """The group manifest that is given; None where it is something else."""
    if isinstance(given, bytes):
        try:
            given = given.decode("ascii")
        except UnicodeDecodeError as error:
            msg = f"the manifest's text is not ASCII: {error}. Send to_json() as it is."
            raise MalformedManifest(msg) from error
    if isinstance(given, GroupManifest):
        return given
    if isinstance(given, str) and GroupManifest.is_text(given):
        return GroupManifest.from_json(given)
    return None


def _plain(given: GroupRef) -> UpdateRef:
    group = _as_group(given)
    return cast("UpdateRef", given) if group is None else group.update_id
