"""`GroupBridge`: the engine's side of an update group; a consumer's bridge like any other.

`RolloutExecutor` takes it as its bridge, and then takes a `GroupManifest` as a manifest. The parts
that this consumer needs are imported, the leaves that cover the needed bytes are verified, and the
wanted tensors are assembled. The result is one ordinary update with one life cycle, whose end is
reported to every publishing rank.

Assembled versions lie in a ring of sealed slots of this process, like a shared-memory publisher's;
`GroupEnd` owns the ring, and the ends of the transports by which parts come. Slots are reused. A
slot that an engine still reads is not, so that the version before is there for an undo.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from rl_bridge.assembly.assemble import (
    Assembly,
    LandingPlan,
)
from rl_bridge.assembly.end import GroupEnd, GroupTransport
from rl_bridge.assembly.plan import ReshardPlan, make_plan
from rl_bridge.assembly.wanted import Wanted, WantedLayout, everything
from rl_bridge.bridge.arguments import UpdateRef, check_options
from rl_bridge.bridge.consumer import Consumer, is_shortage
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    MalformedManifest,
    StaleUpdate,
    WeightBridgeError,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.lifecycle import Observer, State
from rl_bridge.manifest.group import GROUP, GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.parts import NOTHING, PartNeeds
from rl_bridge.memory.views import ImportedTensors, Pin
from rl_bridge.transports.base import (
    Transport,
)
from rl_bridge.transports.registry import NIXL, Counters, canonical_name, transport_class

_LOG = logging.getLogger(__name__)
# Each record holds its manifest: some megabytes if there are many tensors and ranks.
_REMEMBERED = 8
_OVER = frozenset({str(State.REJECTED), str(State.RELEASED)})
_Way = tuple[Assembly, LandingPlan | None]

# Plans of the layouts seen last: one, but for runs that change their layout.
_PLANS = 4


def _checked_transports(given: object) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for name, options in given.items() if isinstance(given, Mapping) else [("", given)]:
        if not isinstance(name, str) or not isinstance(options, Mapping):
            raise TypeError(
                f"transports={given!r}: expected name of a transport -> its options, such as "
                "{'nixl': {'timeout_s': 60.0}}."
            )
        check_options(transport_class(name), options)
        found[canonical_name(name)] = dict(options)
    return found


class GroupConsumer(Consumer):
    """A consumer that makes ordinary updates of a group's versions; all ranks hear of their end."""

    end: GroupEnd

    def __init__(
        self,
        transport: "GroupTransport",
        way: Callable[[GroupLayout, WantedLayout | None], _Way],
        *,
        source_worker: str,
        source_rank: int,
        observer: Observer | None = None,
    ) -> None:
        """Open the transport's end."""
        super().__init__(
            transport, source_worker=source_worker, source_rank=source_rank, observer=observer
        )
        self._way = way

    def resolve_update(
        self,
        given: object,
        *,
        caller: str = "import_update",
        reads: bool = True,
        wanted: WantedLayout | None = None,
    ) -> WeightUpdateManifest:
        """See `GroupBridge.resolve_update`.

        With `wanted`, this is assembled instead. Without `reads`, nothing is: the engine's ranks
        import the group.
        """
        group = _as_group(given)
        if group is None:
            return super().resolve_update(given, caller=caller)
        return self._assembled(group, wanted) if reads else group

    def import_update(
        self,
        manifest: WeightUpdateManifest,
        *,
        needs: PartNeeds | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """See `Consumer`. A group that nobody assembled is imported by the engine's ranks."""
        if not isinstance(manifest, GroupManifest):
            return super().import_update(manifest, needs=needs)
        with self.turn(), self.end.in_one_go():
            self.end.lend(manifest)
            self.note_import(manifest)
            tensors = _LazyGroup(self, manifest)
            if needs is not NOTHING:
                tensors.read()
            return tensors

    def is_lent(self, group: GroupManifest) -> bool:
        """Whether an engine's ranks have imported it, and nothing of it was assembled here."""
        state = self.state(group.update_id)
        return state is not None and state not in _OVER and self.end.is_lent(group)

    def read_whole(self, group: GroupManifest) -> Mapping[str, torch.Tensor]:
        """The whole tensors of a version that ranks have imported."""
        tensors = _LazyGroup(self, group)
        tensors.read()
        return tensors

    def attach_whole(self, group: GroupManifest) -> ImportedTensors:
        """Assemble a group's whole tensors, of a version that ranks import.

        Raises:
            StaleUpdate: it was released here before they were asked for.
            WeightBridgeError: what `GroupBridge.resolve_update` raises.

        """
        with self.turn():
            if self.state(group.update_id) in {None, State.REJECTED, State.RELEASED}:
                msg = (
                    f"version {group.weight_version} (update {group.update_id}) was released here "
                    "before its tensors were asked for: only the engine's ranks have read it. "
                    "Import the publishers' latest manifest."
                )
                raise StaleUpdate(msg)
            wanted = everything()(group.layout.wholes)
            return self.end.attach(self._assembled(group, wanted)).tensors

    def _assembled(self, group: GroupManifest, wanted: WantedLayout | None) -> WeightUpdateManifest:
        end = self.end
        with self.turn():
            self.check_open()  # before anything is read
            made = end.made(group.update_id)
            if made is not None:
                if end.group(group.update_id) != group:
                    msg = (
                        f"update {group.update_id} is assembled already, from another manifest. "
                        "Import the one that its publishers sent, or release the update first."
                    )
                    raise WeightUpdateRejectedError(msg)
                plan = self._way(group.layout, wanted)[0].plan
                if end.wanted(group.update_id) != plan.wanted_digest:
                    msg = (
                        f"update {group.update_id} is assembled already, in another layout than "
                        "what is wanted now. Release the update first, or use another bridge."
                    )
                    raise WeightUpdateRejectedError(msg)
                return made
            try:
                self.order.check(group, reason=self.reason(group.update_id))
            except WeightBridgeError as error:
                if self.state(group.update_id) is None:  # else they have a report
                    self._report_refused(group, describe(error))
                raise
            end.forget_unless(lambda update_id: self.state(update_id) is not None)
            end.remember(group, {"group_root": group.root})
            try:
                assembly, landing = self._way(group.layout, wanted)
                evidence = {"group_root": group.root, "wanted": assembly.plan.wanted_digest}
                end.remember(group, evidence)
                return end.assemble(group, assembly, landing)
            except BaseException as error:
                # A shortage here is no fault of the update, which may come again.
                if not is_shortage(error):
                    is_of_a_copy = not end.is_as_published(group)
                    self._refuse_group(group, describe(error), is_of_a_copy=is_of_a_copy)
                raise

    def reject(self, update: UpdateRef, reason: str) -> None:
        """Refuse an update, imported or not, and report that to every publishing rank."""
        with self.turn():
            if not isinstance(update, GroupManifest):
                super().reject(update, reason)
            elif self.state(update.update_id) is None:
                self.end.remember(update, {"group_root": update.root})
                self._refuse_group(update, reason)
            else:
                super().reject(update.update_id, reason)

    def timings_ms(self, update_id: str) -> dict[str, float]:
        """Phase -> milliseconds; ``assemble`` holds all that comes before the import."""
        ms = self.end.timings_ms.get(update_id)
        found = super().timings_ms(update_id)
        return found if ms is None else {**found, "assemble": ms}

    def _refuse_group(
        self, group: GroupManifest, reason: str, *, is_of_a_copy: bool = False
    ) -> None:
        """Never take this update again, and report that to its publishers.

        Args:
            group: the update.
            reason: for the report.
            is_of_a_copy: never take this very manifest, which may have been changed on its way; the
                published one may come.

        """
        is_known = self.state(group.update_id) is not None
        if is_of_a_copy:
            self.order.rejected_copy(group)
            if is_known:
                return  # the report about the update itself stands
        elif not is_known:
            self.reject(group.update_id, reason)
        self._report_refused(group, reason)

    def _report_refused(self, group: GroupManifest, reason: str) -> None:
        report = UpdateReport(
            update_id=group.update_id,
            weight_version=group.weight_version,
            state=str(State.REJECTED),
            reason=reason,
        )
        self.end.report_to_all(group, report, None)


class _LazyGroup(ImportedTensors):
    """A group's whole tensors, which nobody has assembled here: the engine's ranks import them.

    Whatever first asks for their memory, such as a tensor, has them assembled and verified here.
    """

    def __init__(self, consumer: GroupConsumer, group: GroupManifest) -> None:
        """Assemble nothing yet."""
        super().__init__(group.table, None)
        self._owner: GroupConsumer | None = consumer
        self._group = group

    @property
    def pin(self) -> Pin:
        """The memory behind it.

        Raises:
            WeightBridgeError: of a part's transport, or of the assembly.

        """
        owner = self._owner
        if owner is not None:
            with owner.turn():
                if self._owner is not None:  # else another thread has just done it
                    self.held = owner.attach_whole(self._group).pin
                    self._owner = None
        return super().pin

    def read(self) -> None:
        """Assemble them now."""
        _ = self.pin

    def forget(self) -> None:
        """Give the memory back."""
        super().forget()
        self._owner = None


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
            wanted: what the engine holds: see `rl_bridge.assembly.wanted`. None: every tensor,
                whole.
            source_worker: this worker's name.
            source_rank: its rank.
            observer: called with every lifecycle transition.
            transports: name of a transport -> its options, for parts that need some, such as
                ``{"shared-memory": {"directory": path}}``.
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
        self._ways: OrderedDict[tuple[str, str], _Way] = OrderedDict()

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        self._groups = GroupTransport.create(
            **{**options, "transports": _checked_transports(options["transports"] or {})}
        )
        return self._groups

    def _make_consumer(self) -> GroupConsumer:
        return GroupConsumer(
            self._groups,
            self._way,
            source_worker=self.source_worker,
            source_rank=self.source_rank,
            observer=self._observer,
        )

    @property
    def consumer(self) -> GroupConsumer:
        """The consuming half; opened when it is first asked for."""
        consumer = super().consumer
        assert isinstance(consumer, GroupConsumer)
        return consumer

    # ---- importing ------------------------------------------------------------------------------

    def plan(self, layout: GroupLayout) -> ReshardPlan:
        """How this consumer's tensors are made of a group with that layout; made once per layout.

        Raises:
            IncompatibleUpdate: something is wanted that the group does not hold.

        """
        return self._way(layout, None)[0].plan

    @deferred_interrupts()
    def resolve_update(self, given: UpdateRef) -> WeightUpdateManifest:
        """Assemble a group's version here; returns the manifest of the assembled version.

        An executor calls this with the manifest that it is given. A manifest of an assembled
        version is returned as it is; a version that is assembled already is not assembled again.

        Raises:
            BridgeClosed: it was closed.
            WeightBridgeError: nothing is held, and the engine was not touched; unless the cause is
                a shortage here, the update is rejected, and every publishing rank gets a report.

        """
        return self.consumer.resolve_update(given)

    @property
    def nixl_counters(self) -> Counters:
        """Counts of what reading parts over ``nixl`` made so far: see `NIXLTensorBridge.counters`.

        Zeros if no part came that way yet. `NIXLTensorBridge.catalog` lists what a rank holds, and
        who reads it: it takes a group's ``parts``.
        """
        return NIXL.counters(None if self._consumer is None else self.consumer.end.end_of("nixl"))

    @deferred_interrupts()
    def import_update(self, manifest: WeightUpdateManifest | str) -> Mapping[str, torch.Tensor]:
        """Assemble a group's version and import it. See `TensorBridge.import_update`."""
        # Held over both: another thread's update must not take the memory in between.
        consumer = self.consumer
        with consumer.turn(), consumer.end.in_one_go():
            group = _as_group(manifest)
            if group is not None and consumer.is_lent(group):
                return consumer.read_whole(group)  # what its executor did with it stands
            return consumer.import_update(consumer.resolve_update(manifest))

    # ---- inside ---------------------------------------------------------------------------------

    def _way(self, layout: GroupLayout, wanted: WantedLayout | None) -> _Way:
        key = layout.digest, "" if wanted is None else wanted.digest
        way = self._ways.get(key)
        if way is None:
            chosen = self._wanted if wanted is None else wanted
            if not isinstance(chosen, WantedLayout):
                chosen = chosen(layout.wholes)
            plan = make_plan(layout, chosen)
            assembly = Assembly(plan, num_threads=self._groups.num_threads)
            way = self._ways[key] = assembly, LandingPlan.make(assembly, layout)
            while len(self._ways) > _PLANS:
                self._ways.popitem(last=False)
        return way


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
