"""`ModelInstaller`: installs updates into the model of one rank of an engine, all or nothing.

The next version is made beside the serving one (`rl_bridge.engines.staging`), and the install
exchanges them. Where there is no memory for that, it is written through: until the install an
update is only read, in the host's memory, and then written layer by layer into the parameters that
serve. The way back is to write the version before it once more, from its own imported tensors,
which stay leased for that as long as they are what the engine holds. Where nobody has these (the
weights that an engine was started with, or that somebody else loaded) the model is copied to the
host first. Where the engine's own loader brings the bytes, the model is copied aside, too, byte for
byte, and after any failure the copy is put back and compared. An engine supplies what is its own:
see `EngineCompat` and the overridable steps.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from rl_bridge.assembly.wanted import ReadScope
from rl_bridge.engines.evidence import Evidence, Places, Untouched, tensors_of
from rl_bridge.engines.load_checks import (
    are_finite,
    as_it_lies,
    asks_for_bytes,
    check_casts,
    check_dtypes,
    check_finite,
    check_same,
    check_taken,
)
from rl_bridge.engines.load_plan import Kinds, LoadPlan, kinds_of, learn
from rl_bridge.engines.rank import RankInstaller
from rl_bridge.engines.shards import (
    GroupShare,
    Shard,
    check_covered,
    needs_of,
    shards_of,
    share_of,
)
from rl_bridge.engines.skeleton import EngineCompat, Target
from rl_bridge.engines.staging import (
    BESIDE,
    COPYING,
    LEARNING,
    THROUGH,
    Exchange,
    Need,
    SpareMemory,
    Staged,
    Staging,
    TensorChange,
    assemble,
    check_budget,
    checked_budget,
    checked_staging,
    is_alone,
)
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.snapshot import Snapshot, every_engine_tensor
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.parts import PartNeeds, Scope
from rl_bridge.memory.passes import checked_threads
from rl_bridge.memory.tensors import tensor_key
from rl_bridge.memory.views import ImportedTensors, Pin

_LOG = logging.getLogger(__name__)
_PLANS = 4

Tensors = Mapping[str, torch.Tensor]

Layer = Sequence[Sequence[int]]
"""Positions of a layer's targets; those that an engine processes together are one group."""


def groups_of(plan: LoadPlan) -> list[list[int]]:
    """Positions of targets: all parameters of one module, and of those that share one with it."""
    modules: dict[int, list[int]] = {}
    for index in plan.steps:
        for user in plan.targets[index].users:
            modules.setdefault(id(user.module), []).append(index)
    done: set[int] = set()
    groups = []
    for index in plan.steps:
        if index in done:
            continue
        done.add(index)
        group = [index]
        for i in group:  # which grows meanwhile
            for user in plan.targets[i].users:
                near = [one for one in modules.pop(id(user.module), ()) if one not in done]
                done.update(near)
                group += near
        groups.append(group)
    return groups


def layers_of(plan: LoadPlan) -> Mapping[str, Layer]:
    """Name -> groups of a layer: what is below a number in the model's tree, or one module."""
    layers: dict[str, list[Sequence[int]]] = {}
    for group in groups_of(plan):
        path = plan.targets[group[0]].users[0].path.split(".")
        end = next((i for i, part in enumerate(path, 1) if part.isdigit()), len(path))
        layers.setdefault(".".join(path[:end]), []).append(group)
    return layers


@dataclass(slots=True, eq=False)
class Written:
    """A version that is written into the memory that serves, and what writes it again."""

    manifest: WeightUpdateManifest
    plan: LoadPlan
    tensors: Mapping[str, torch.Tensor]  # those that go anywhere here
    evidence: Evidence
    # The lease of their memory; None if the caller owns that, and so may write to it.
    pin: Pin | None
    # Name of a layer -> what was written there.
    layers: dict[str, Staged] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        manifest: WeightUpdateManifest,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        evidence: Evidence,
    ) -> "Written":
        """A version that is about to be written; its tensors keep their lease for as long."""
        sources = {route.source for route in plan.routes}
        used = {name: tensors[name] for name in tensors if name in sources}
        pin = tensors.pin if isinstance(tensors, ImportedTensors) else None
        return cls(manifest, plan, used, evidence, pin)

    def staged(self) -> Staged:
        """All that was written."""
        every = Staged()
        for layer in self.layers.values():
            every.extend(layer)
        return every

    def check(self) -> InstallProof:
        """Read what the engine holds of it, and what was packed right out of its tensors.

        Raises:
            ProofFailed: either is not what was published.

        """
        proof = self.evidence.check(self.staged())
        self.evidence.check_lent(self.tensors)
        return proof

    def refresh(self) -> None:
        """Drop what somebody in this process wrote into his view of its tensors."""
        if self.pin is not None and self.pin.view is not None:
            self.pin.view.refresh(self.pin.address, self.pin.nbytes)


def is_as_loaded(target: Target, live: torch.Tensor) -> bool:
    """Whether a serving parameter lies in memory as the loader fills it."""
    return (live.dtype, live.stride()) == (target.meta.dtype, target.meta.stride())


def write_parameters(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    indexes: Iterable[int],
    *,
    num_threads: int | None,
) -> list[TensorChange]:
    """Write parameters that an engine keeps as they are loaded, or in another dtype."""
    changes = []
    memory: dict[int, torch.Tensor] = {}
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in indexes:
        target = plan.targets[index]
        parameter = target.serving()
        memory[index] = live = parameter.data
        # The parameter itself, and no view of it: torch would count that as one more user of the
        # memory.
        changes.append(TensorChange(target.name, parameter, parameter, index))
        if not is_as_loaded(target, live):
            memory[index] = target.empty()
            others.append((live, memory[index]))
    with writable(change.live for change in changes):
        assemble(plan, tensors, memory, num_threads=num_threads)
        for live, loaded in others:
            live.copy_(loaded)
    return changes


def writable(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """A context in which torch lets us write to tensors, also to those of inference mode."""
    return torch.inference_mode(mode=any(tensor.is_inference() for tensor in tensors))


class ModelInstaller(RankInstaller):
    """Installs updates into one rank's model. Call it between two steps of the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, sliced, tied, padded) is learned once from the engine's own loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compat: EngineCompat,
        *,
        cast: bool = False,
        staging: Staging | None = None,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Configure; the model is only looked at.

        With ``staging="beside"`` the budget is for the next version, and a copy of each parameter
        that is written in place; with ``"through"`` for one layer, and for a copy of the model
        where no version of ours is in it. None takes ``"beside"`` where the budget allows it.
        Of a model that is spread over several ranks, whoever asks them all checks that together
        they take every element: see `shards`.
        """
        if not isinstance(cast, bool):
            raise TypeError(f"cast={cast!r}: expected True or False.")
        self._model = model
        self._compat = compat
        self._cast = cast
        self._chosen = checked_staging(staging)
        self._budget = checked_budget(memory_budget_nbytes)
        self._num_threads = checked_threads(num_threads)
        self._num_ranks = num_ranks
        self._plans: OrderedDict[str, LoadPlan] = OrderedDict()
        # The last layout's plan, and what is read by it.
        self._scope: tuple[LoadPlan, Scope | PartNeeds | GroupShare] | None = None
        # The last group's update, and what is read of it. Such a plan holds for nothing else: whole
        # tensors of another update may have the shapes of these boxes.
        self._share: tuple[str, GroupShare] | None = None
        self._spares = SpareMemory()
        self._room: Pin | None = None  # where the last copy of the model was
        # The update that is prepared:
        self._plan: LoadPlan | None = None
        self._evidence: Evidence | None = None
        self._staged: Staged | None = None
        self._written: Written | None = None  # if it is written through
        # State for an undo, from the first install since the last commit:
        self._has_begun = False
        self._exchange = Exchange()
        self._places: Places | None = None
        self._snapshot: Snapshot | None = None
        self._untouched: Untouched | None = None
        self._active: Written | None = None  # what serves, as far as that was written through
        self._begun: dict[str, None] = {}  # layers that may not hold it any more

    # ---- what an engine may have of its own -----------------------------------------------------

    def _check_model(self) -> None:
        """Refuse a model that would go on computing with something of the version before."""

    def _learned(self, kinds: Kinds, admit: Callable[[LoadPlan, int], None]) -> LoadPlan:
        """What the engine's loader does with tensors of these dtypes and shapes: see `learn`."""
        for name, layer in self._model.named_modules():
            reason = self._compat.unsupported(layer)
            if reason is not None:
                raise IncompatibleUpdate(
                    f"layer {name!r}: {reason}. Install it by {self._compat.elsewhere}."
                )
        return learn(self._model, kinds, self._compat, admit=admit)

    def _why_not_exchange(self, plan: LoadPlan) -> str | None:
        """Why parameters cannot be exchanged for other memory, or None if they can."""
        del plan
        return None

    def _staging_nbytes(self, plan: LoadPlan) -> int:
        """What the next version takes while it is made."""
        return sum(plan.targets[index].nbytes for index in plan.steps)

    def _stage(
        self, plan: LoadPlan, tensors: Tensors, staged: Staged, evidence: Evidence
    ) -> AbstractSet[str]:
        """Make the next version; the model is only read.

        Returns:
            Tensors whose numbers this has shown to be finite.

        """
        del evidence
        targets = {index: plan.targets[index] for index in plan.steps}
        staged.memory = self._spares.take(targets)
        staged.tensors = [
            TensorChange(target.name, target.serving(), staged.memory[index], index)
            for index, target in targets.items()
            if target.meta.numel()
        ]
        assemble(plan, tensors, staged.memory, num_threads=self._num_threads)
        # Tens of thousands of small tensors are looked at in some calls where they came.
        looked_at = as_it_lies(tensors) or staged.memory.values()
        is_fine = are_finite(looked_at, num_threads=self._num_threads)
        return plan.taken if is_fine else frozenset()

    def _through_nbytes(self, plan: LoadPlan) -> int:
        """Bytes that it takes to write a version through, beside the imported tensors."""
        most = 0
        for layer in layers_of(plan).values():
            targets = (plan.targets[index] for group in layer for index in group)
            most = max(most, sum(t.nbytes for t in targets if not is_as_loaded(t, t.serving())))
        return most

    def _rehearse(self, written: Written) -> None:
        """Refuse what the engine would not make of a version; nothing is kept of it."""

    def _write(self, written: Written, layer: Layer) -> Staged:
        """Write one layer into the memory that serves.

        The snapshot, if there is one, is the way back; else the version before is written again.
        """
        indexes = [index for group in layer for index in group]
        threads = self._num_threads
        changes = write_parameters(written.plan, written.tensors, indexes, num_threads=threads)
        return Staged(tensors=changes)

    def _keep_attributes(self, freed: Sequence[tuple[torch.nn.Module, object]]) -> None:
        """Keep what layers computed with before, if the next version can use its memory."""

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Make the next version, or the copy that an undo needs; nothing that serves is written.

        Args:
            manifest: the update's.
            tensors: the imported update; empty where the engine's own routes bring it.

        Raises:
            IncompatibleUpdate: names, shapes, dtypes, numbers that are not finite, memory, a model
                that holds what no update reaches; or an install is half-way, whose undo would not
                bring back what this update writes to.
            ProofFailed: what was made is not what the update says.

        """
        self.abandon()
        self._check_model()
        if tensors:
            self._forget_replaced()
        plan = self._plan_of(manifest, is_here=bool(tensors))
        check_taken(plan, manifest)
        check_same(plan, manifest)
        way, nbytes = self._way(plan, manifest, is_here=bool(tensors))
        version = manifest.weight_version
        _LOG.info("version %d: %s takes %d bytes more", version, way, nbytes)
        self.staging = {BESIDE: "beside", THROUGH: "through"}.get(way, "")
        evidence = Evidence(manifest, plan, num_threads=self._num_threads)
        unread: AbstractSet[str] = frozenset()
        if tensors:
            evidence.expect_of(tensors)
            unread = self._make(plan, tensors, evidence, is_beside=way == BESIDE)
        if way == THROUGH:
            self._spares.clear()
            self._written = Written.of(manifest, plan, tensors, evidence)
            self._rehearse(self._written)
        evidence.seal(tensors, self._staged, unread)
        if way != BESIDE and not self._has_way_back(is_here=bool(tensors)):
            room, self._room = self._room, None
            self._snapshot = Snapshot(
                self._model, num_threads=self._num_threads, room=room, is_on_host=way == THROUGH
            )
        self._plan, self._evidence = plan, evidence

    def scope_of(self, manifest: WeightUpdateManifest) -> ReadScope:
        """The ranges, or the boxes of a group's tensors, that the loader's plan takes."""
        plan = self._plan_of(manifest, is_here=True)
        if isinstance(manifest, GroupManifest):
            if asks_for_bytes(plan, manifest):
                return Scope.ALL
            check_taken(plan, manifest)
        if self._scope is None or self._scope[0] is not plan:
            self._scope = plan, self._planned(plan, manifest)
        scope = self._scope[1]
        if not isinstance(scope, GroupShare):
            return scope
        self._share = manifest.update_id, scope
        return scope.wanted

    def _planned(
        self, plan: LoadPlan, manifest: WeightUpdateManifest
    ) -> Scope | PartNeeds | GroupShare:
        if not isinstance(manifest, GroupManifest):
            return needs_of(plan, manifest)
        share = share_of(plan, manifest)
        return Scope.ALL if share.table.digest == manifest.table.digest else share

    def shards(self, manifest: WeightUpdateManifest) -> list[Shard]:
        """The parts of an update's tensors that this model takes."""
        return shards_of(self._plan_of(manifest, is_here=True), manifest)

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note what `shards` must hold, where the update was not imported here."""
        if self._evidence is None:
            raise ProofFailed(
                "nothing was prepared whose parts could be expected. Call prepare first."
            )
        self._evidence.expect(parts)

    def begin(self) -> None:
        """The model is written from now on: `undo` brings it back."""
        assert self._plan is not None
        users = (u for index in self._plan.steps for u in self._plan.targets[index].users)
        written = [live for user in users if (live := user.live) is not None]
        written += [] if self._staged is None else [c.live for c in self._staged.tensors]
        every = dict(tensors_of(self._model))
        if not self._has_begun:
            self._places = Places(self._model, every)
        self._has_begun = True
        self._untouched = Untouched(every, written, num_threads=self._num_threads)

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Exchange, or write it layer by layer. Prepares by itself where it must."""
        if self._evidence is None:
            self.prepare(manifest, tensors)
        self.begin()
        if self._staged is not None:
            self._exchange.apply(self._staged)
        elif self._written is not None:
            for name, layer in layers_of(self._written.plan).items():
                self._begun[name] = None
                if self._active is not None:
                    self._active.layers.pop(name, None)  # with what it computed with
                self._written.layers[name] = self._write(self._written, layer)

    def prove(self) -> InstallProof:
        """Read what the engine holds."""
        if self._evidence is None or self._untouched is None:
            raise ProofFailed("nothing was installed that could be proven. Call install first.")
        written = self._written
        proof = self._evidence.check(self._staged) if written is None else written.check()
        self._untouched.check()
        self._check_model()  # a step of the model may have made a copy since
        return replace(proof, staging=self.staging)

    def undo(self) -> None:
        """Exchange back, put back what was copied, or write the version before: all is as it was.

        Raises:
            TornEngine: it is not.

        """
        if self._has_begun:
            self._exchange.undo()
            if self._snapshot is not None:
                self._snapshot.restore()
            elif self._active is not None and self._begun:
                self._write_back(self._active)
            self._begun = {}
            if self._places is not None:
                self._places.check()
            self._has_begun = False
        self.abandon()

    def abandon(self) -> None:
        """Forget what was prepared; what the undo of a begun install needs stays."""
        staged, self._staged = self._staged, None
        self._plan = self._evidence = self._written = None
        if self._has_begun:
            return
        if staged is not None:
            memory = list(staged.memory.items())
            del staged  # whose changes look at the memory, too
            self._spares.keep(memory)
        if self._snapshot is not None:
            self._room = self._snapshot.give_room()
        self._snapshot = self._untouched = self._places = None

    def commit(self) -> None:
        """The memory of the version before is the next one's."""
        if self._has_begun:
            # A version without a pin is no way back: its tensors are their giver's to write to.
            is_kept = self._written is not None and self._written.pin is not None
            self._active, self._begun = self._written if is_kept else None, {}
        self._has_begun = False
        staged, self._staged = self._staged, None
        memory, attributes = self._exchange.forget()
        del staged
        self.abandon()
        if self._active is None:
            self._keep_attributes(attributes)
            self._spares.keep(memory)
        else:
            self._room = None  # no copy is made any more

    def release(self, update_id: str) -> None:
        """Give back what was kept of a version that was written through, for the undo of the next.

        That undo then needs a copy of the model.
        """
        if self._active is not None and self._active.manifest.update_id == update_id:
            self._active = None

    # ---- inside ---------------------------------------------------------------------------------

    def _make(
        self, plan: LoadPlan, tensors: Tensors, evidence: Evidence, *, is_beside: bool
    ) -> AbstractSet[str]:
        """Look at the numbers of an update that is imported here, and make it if it is to be.

        Returns:
            Tensors that staging has shown to be finite, by what was made of them: nobody has looked
            at their imported numbers for that.

        """
        finite: AbstractSet[str] = frozenset()
        if is_beside:
            self._staged = Staged()  # noted first: what fails half-way is let go of
            try:
                finite = self._stage(plan, tensors, self._staged, evidence)
            except IncompatibleUpdate:
                # The engine names a layer, these the tensor.
                check_finite(tensors, plan.taken, plan=plan)
                check_casts(plan, tensors)
                raise
        check_finite(tensors, plan.taken - finite, plan=plan, num_threads=self._num_threads)
        check_casts(plan, tensors)
        return finite

    def _plan_of(self, manifest: WeightUpdateManifest, *, is_here: bool) -> LoadPlan:
        digest = manifest.table.digest
        if self._share is not None and not isinstance(manifest, GroupManifest):
            update_id, share = self._share
            if (manifest.update_id, digest) == (update_id, share.table.digest):
                return share.plan
        if digest not in self._plans:
            kinds = kinds_of(manifest)

            def admit(noted: LoadPlan, nbytes: int) -> None:
                self._way(noted, manifest, is_here=is_here)
                check_budget([(LEARNING, Need(nbytes))], self._budget, manifest.weight_version)

            plan = self._learned(kinds, admit)
            if self._num_ranks == 1:
                check_covered(manifest, [shards_of(plan, manifest)])
            if not self._cast:
                check_dtypes(plan, kinds, self._compat.cast_remedy)
            self._plans[digest] = plan
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(digest)
        return self._plans[digest]

    def _way(
        self, plan: LoadPlan, manifest: WeightUpdateManifest, *, is_here: bool
    ) -> tuple[str, int]:
        """How the update gets in, and what that takes; refused if there is no room for any way.

        Raises:
            IncompatibleUpdate: an undo would not bring back what this update writes to.

        """
        reason = self._why_not_exchange(plan) if is_here else "the engine's own loader brings it"

        def ways() -> Iterator[tuple[str, Need]]:
            if reason is None and self._chosen != "through":
                yield BESIDE, self._beside_need(plan)
            if is_here and (reason is not None or self._chosen != "beside"):
                yield THROUGH, self._through_need(plan)
            if not is_here:
                yield COPYING, Need(0 if self._snapshot is not None else self._copy_nbytes(plan))

        way, nbytes = check_budget(ways(), self._budget, manifest.weight_version)
        has_copy = self._snapshot is not None
        if way != BESIDE and (
            self._exchange.is_begun or (self._begun and not is_here and not has_copy)
        ):
            raise IncompatibleUpdate(
                f"version {manifest.weight_version} would be written into the memory that serves, "
                "and an install is neither undone nor committed, whose undo has no copy of what "
                "that writes to. Call undo first."
            )
        if reason is not None:
            _LOG.debug("nothing is staged beside what serves: %s", reason)
        return way, nbytes

    def _beside_need(self, plan: LoadPlan) -> Need:
        lives = [plan.targets[index].live for index in plan.steps]
        # An install copies aside what it writes in place.
        aside = sum(live.nbytes for live in lives if live is not None and not is_alone(live))
        return Need(self._staging_nbytes(plan) + aside, self._device)

    def _through_need(self, plan: LoadPlan) -> Need:
        layer = self._through_nbytes(plan)
        if self._has_way_back(is_here=True):
            return Need(layer, self._device)
        return Need(layer + self._copy_nbytes(plan))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters(), torch.empty(0, device="cpu")).device

    def _copy_nbytes(self, plan: LoadPlan) -> int:
        """Bytes of a copy of the model; a tensor with two names counts once."""
        del plan
        every = {tensor_key(one): one for one in every_engine_tensor(self._model).values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in every.values())

    def _forget_replaced(self) -> None:
        """Forget the version that serves if somebody else loaded the engine since.

        It is no way back then. All that serves is read for this: once for each update.
        """
        if self._active is None or self._begun:  # which was read before it was begun
            return
        try:
            self._active.evidence.check(self._active.staged())
        except ProofFailed as error:
            _LOG.info("the engine was loaded by somebody else meanwhile: %s", error)
            self._active = None

    def _has_way_back(self, *, is_here: bool) -> bool:
        """Whether an undo needs no copy of the model that is still to be made."""
        return self._snapshot is not None or (is_here and self._active is not None)

    def _write_back(self, before: Written) -> None:
        if self._written is not None:
            self._written.layers.clear()  # with what they compute with
        before.refresh()
        for name, layer in layers_of(before.plan).items():
            if name in self._begun:
                before.layers[name] = self._write(before, layer)
        try:
            before.check()
        except ProofFailed as error:
            version = before.manifest.weight_version
            raise TornEngine(
                f"undo failed, although version {version} was written once more: {error} Call "
                "recover(), or start a fresh engine."
            ) from error
