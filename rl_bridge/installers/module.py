"""`ModuleInstallAdapter`: installs into a torch module, or a dict of tensors, of this process.

Three ways, one contract:

``copy``   into the engine's own storage. Works with every transport; undo copies the retained
           previous version back.
``alias``  the engine's tensors are pointed at the imported pages. Costs nothing per byte; addresses
           change with every version.
``flip``   the engine's tensors are views of one fixed range, under which versions are exchanged.
           Costs nothing per byte, addresses never change. Needs a mapped segment: a transport
           such as shared-memory or cuda-vmm.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
import torch

from rl_bridge.cuda.live import Live, live_range
from rl_bridge.errors import (
    IncompatibleUpdate,
    ProofFailed,
    SegmentError,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    did_you_mean,
)
from rl_bridge.installers.base import (
    Engine,
    InstallProof,
    Quiesce,
    TransactionalAdapter,
    checked_engine,
    require_owned,
    require_plain,
)
from rl_bridge.installers.engine_memory import Binding, EngineMemory, differs
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable, collector_paused
from rl_bridge.memory import vm
from rl_bridge.memory.packing import dtype_name
from rl_bridge.memory.passes import Addresses, checked_threads
from rl_bridge.memory.views import ImportedTensors, LeasedView, Pin, tensor_in


@dataclass(frozen=True, slots=True)
class _Update:
    """An update that was matched with the engine."""

    manifest: WeightUpdateManifest
    tensors: ImportedTensors
    bound: Binding


class _Mode(ABC):
    """How an update gets into the engine's memory, and out again."""

    rebinds: ClassVar[bool] = False
    """Whether the engine's tensors get other storages, instead of other bytes in theirs."""
    uses_addresses: ClassVar[bool] = True
    """Whether `install` relies on where the engine's tensors were when they were matched."""

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory

    @abstractmethod
    def prepare(self, update: _Update, *, is_first: bool) -> None:
        """Note what `undo` needs; after an install that is not over, the engine is a mixture."""

    @abstractmethod
    def install(self, update: _Update) -> None: ...

    @abstractmethod
    def prove(self, update: _Update) -> InstallProof: ...

    @abstractmethod
    def undo(self, origin: Binding) -> None:
        """Take back what `install` did, complete or not, to how the engine was first matched.

        Raises:
            TornEngine: it cannot be taken back.

        """

    @abstractmethod
    def commit(self, update: _Update) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """No update is under way any more."""

    def release(self, update_id: str, *, is_under_way: bool) -> None:  # noqa: B027 - the engine's tensors may hold it
        """Drop what is kept of a committed update; later, if the undo of another one needs it."""


def _not_installed() -> WeightBridgeError:
    return WeightBridgeError("prove was called before install. Call prepare, install, then prove.")


class _CopyMode(_Mode):
    """Copies; every byte that the engine holds afterwards is read again for the proof.

    The version before is retained: copied back, it is the undo. That takes a sealed segment, since
    users may write to a private copy. Without one, the engine is copied aside.
    """

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(memory)
        self._current: tuple[WeightUpdateManifest, ImportedTensors] | None = None
        self._is_released = False  # the undo still needs the current one
        self._snapshot: Snapshot | None = None

    def prepare(self, update: _Update, *, is_first: bool) -> None:
        can_undo = self._can_undo(update.manifest.table)
        if is_first:
            self._snapshot = None
            if not can_undo:
                self._snapshot = Snapshot(self.memory.engine, num_threads=self.memory.num_threads)
        elif self._snapshot is None and not can_undo:
            # The engine is a mixture now: it is too late for a copy of it.
            raise IncompatibleUpdate(
                f"version {update.manifest.weight_version} has tensors that the retained version "
                "does not have, and the engine is torn: an undo could not bring them back. Call "
                "recover() first."
            )

    def _can_undo(self, newer: TensorTable) -> bool:
        """Whether the retained version has every tensor of a layout, in a published segment."""
        if self._current is None:
            return False
        manifest, tensors = self._current
        if tensors.held is None or tensors.held.view is None:
            return False
        older = manifest.table
        return older.digest == newer.digest or older.rows.keys() >= newer.rows.keys()

    def install(self, update: _Update) -> None:
        self.memory.write(update.bound, update.tensors.addresses)

    def prove(self, update: _Update) -> InstallProof:
        return self.memory.prove(update.bound, update.manifest)

    def undo(self, origin: Binding) -> None:
        if self._snapshot is not None:
            self._snapshot.restore()
        elif self._current is not None:
            self.memory.put_back(origin)
            self.memory.rewrite(*self._current)

    def commit(self, update: _Update) -> None:
        self._current, self._is_released = (update.manifest, update.tensors), False

    def end(self) -> None:
        if self._is_released:
            self._current = None
        self._is_released, self._snapshot = False, None

    def release(self, update_id: str, *, is_under_way: bool) -> None:
        """Drop the retained version; the next update then copies the engine aside first."""
        if self._current is not None and self._current[0].update_id == update_id:
            self._is_released = is_under_way
            if not is_under_way:
                self._current = None


class _RebindingMode(_Mode):
    """The engine's tensors become views of the verified pages."""

    rebinds: ClassVar[bool] = True

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(memory)
        # Each engine tensor that got other memory, with a view of what it had; the last change
        # last.
        self._before_point: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _point(self, owners: Sequence[torch.Tensor], counterparts: Sequence[torch.Tensor]) -> None:
        """Give each engine tensor the storage of its counterpart."""
        # Views made in inference mode would make inference tensors of the engine's: for good.
        with torch.inference_mode(mode=False):
            for owner, tensor in zip(owners, counterparts, strict=True):
                # Noted first: a failure in the middle must find everything that was changed.
                self._before_point.append((owner, owner.detach()))
                owner.data = tensor

    def _point_back(self) -> None:
        with torch.inference_mode(mode=False):
            while self._before_point:
                owner, data = self._before_point[-1]
                owner.data = data
                self._before_point.pop()

    def end(self) -> None:
        self._before_point.clear()

    def _prove_identity(
        self, update: _Update, expected: Addresses, *, base: int, is_verified: bool
    ) -> InstallProof:
        """Show that the engine's tensors are the pages that were verified; digest them if not.

        Args:
            update: what was installed.
            expected: where each of the layout's rows must be.
            base: first byte of the arena that they lie in.
            is_verified: whether `base` shows the very mapping that import verified.

        """
        manifest, bound = update.manifest, update.bound
        table = manifest.table
        self._require_views(manifest, bound, expected)
        extent = vm.round_up(max(table.arena_nbytes, 1))
        own = bound.place.private_ranges(base, extent) if is_verified else None
        if own == []:
            return InstallProof(
                method="identity",
                root=manifest.root,
                identical_nbytes=table.total_nbytes,
                tensors=len(table.rows),
            )
        # Somebody wrote here (or the kernel cannot tell): what was written decides.
        plan = bound.place.plan(table.nbytes_column)
        found = plan.digest(expected, num_threads=self.memory.num_threads)
        if found != manifest.digests:
            raise differs(manifest, table.names, found, manifest.digests)
        return InstallProof(
            method="digest",
            root=manifest.root,
            digested_nbytes=table.total_nbytes,
            tensors=len(table.rows),
        )

    def _require_views(
        self, manifest: WeightUpdateManifest, bound: Binding, expected: Addresses
    ) -> None:
        """Every tensor of the engine lies where its row is expected, whole and contiguous."""
        lost: str | None = None
        if not bound.holds_objects(self.memory.tensors()):
            lost = "one of its tensor objects was replaced"
        elif bound.is_at(expected) and bound.is_as_matched():
            return
        elif not bound.reads_as_stored():
            lost = "one of its tensors is a lazy conjugate or negative"
        else:
            name = _first_elsewhere(manifest.table, bound, expected)
            lost = None if name is None else f"tensor {name!r} is no view of the verified memory"
        if lost is not None:
            raise ProofFailed(
                f"the engine does not hold version {manifest.weight_version}: {lost}. Nothing else "
                "may change the engine's tensors during an update: see quiesce=."
            )


def _first_elsewhere(table: TensorTable, bound: Binding, expected: Addresses) -> str | None:
    tensors = bound.every_tensor
    found = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    rows = bound.every_row
    elsewhere = (found != expected[rows]) & (table.nbytes_column[rows] > 0)
    for index, (tensor, row) in enumerate(zip(tensors, rows.tolist(), strict=True)):
        if (
            elsewhere[index]
            or tensor.shape != table.shapes[row]
            or dtype_name(tensor) != table.dtypes[row]
            or not tensor.is_contiguous()
        ):
            return bound.every_name[index]
    return None


class _AliasMode(_RebindingMode):
    """Points the engine's tensors at the imported pages; addresses change with every version."""

    uses_addresses: ClassVar[bool] = False

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(memory)
        # The slot that the engine's tensors look at since the last commit, and its bytes: weakly,
        # since they end with these tensors.
        self._current: tuple[LeasedView, weakref.ref[object], int, int] | None = None

    def prepare(self, update: _Update, *, is_first: bool) -> None:
        """Nothing else is needed."""

    def install(self, update: _Update) -> None:
        bound, names = update.bound, update.manifest.table.names
        with collector_paused():
            views = [update.tensors[names[row]] for row in bound.rows.tolist()]
            self._point(bound.tensors, views)

    def prove(self, update: _Update) -> InstallProof:
        pin = update.tensors.pin
        places = update.tensors.addresses
        return self._prove_identity(
            update, places, base=pin.address, is_verified=pin.view is not None
        )

    def undo(self, origin: Binding) -> None:
        self._point_back()
        if self._current is not None:  # what the engine wrote over the published bytes goes
            view, buffer, address, nbytes = self._current
            if buffer() is not None:
                view.refresh(address, nbytes)
        self.memory.put_back(origin)

    def commit(self, update: _Update) -> None:
        if self._before_point:
            pin, self._current = update.tensors.pin, None
            if pin.view is not None:
                self._current = (pin.view, weakref.ref(pin.buffer), pin.address, pin.nbytes)
            self.memory.moved(update.bound, update.tensors.addresses)


class _FlipMode(_RebindingMode):
    """Exchanges versions under one fixed range of addresses."""

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(memory)
        self._live: Live | None = None
        self._live_layout = ""
        self._fresh: Live | None = None  # reserved for a layout that is not live yet
        # While an update is under way: what was live before, with its layout and its content.
        self._before: tuple[Live | None, str, Pin | None] | None = None

    def prepare(self, update: _Update, *, is_first: bool) -> None:
        del is_first
        table, pin = update.manifest.table, update.tensors.pin
        if pin.view is None:
            raise IncompatibleUpdate(
                "a flip needs a mapped segment, and this transport copied the update "
                "in. Use mode='copy' or 'alias'."
            )
        if (
            self._live is not None
            and self._live_layout == table.digest
            and not update.bound.is_at(_places(table, self._live))
        ):
            self._live = None  # somebody rebound the engine: bind it anew
        if self._live is None or self._live_layout != table.digest:
            # A shortage of addresses must show here, before anything of the engine changes.
            self._fresh = live_range(pin, table.arena_nbytes)
        # Before the flip, while the engine still runs. Verifying read every page, but through this
        # mapping only if no other engine flipped them away since.
        pin.view.prefault(table.arena_nbytes)

    def install(self, update: _Update) -> None:
        """Flip; the first time, and after a change of layout, bind the engine to the range."""
        is_first = self._before is None
        if is_first:
            content = None if self._live is None else self._live.content
            self._before = (self._live, self._live_layout, content)
        try:
            self._put(update)
        except (SegmentError, WeightBridgeUnavailableError):
            if is_first:
                self._before = None  # nothing changed
            raise

    def _put(self, update: _Update) -> None:
        table, pin, bound = update.manifest.table, update.tensors.pin, update.bound
        if self._live is not None and self._live_layout == table.digest:
            self._live.flip(pin)
            return
        live = self._fresh or live_range(pin, table.arena_nbytes)
        live.flip(pin)
        self._fresh, self._live, self._live_layout = None, live, table.digest
        columns = (table.offsets, table.nbytes, table.dtypes, table.shapes)
        with collector_paused():
            views = [tensor_in(live.pin, *place) for place in zip(*columns, strict=True)]
            self._point(bound.tensors, [views[row] for row in bound.rows.tolist()])

    def prove(self, update: _Update) -> InstallProof:
        """Show that the tensors lie in the range, and that it shows the verified segment."""
        live, pin = self._live, update.tensors.pin
        if live is None:
            raise _not_installed()
        places = _places(update.manifest.table, live)
        is_verified = live.content is pin and live.shows(pin)
        return self._prove_identity(update, places, base=live.address, is_verified=is_verified)

    def undo(self, origin: Binding) -> None:
        """Flip back, or bind back, to the bytes that were published."""
        if self._before is not None:
            live, layout, content = self._before
            if live is not self._live:
                self._point_back()
                if self._live is not None:
                    self._live.empty()
                self._live, self._live_layout = live, layout
            if live is not None and content is not None:
                if live.content is not content:
                    live.flip(content)
                if content.view is not None:  # what the engine wrote over them goes
                    content.view.refresh(live.address, content.nbytes)
        self.memory.put_back(origin)

    def commit(self, update: _Update) -> None:
        if self._live is not None and self._before_point:
            self.memory.moved(update.bound, _places(update.manifest.table, self._live))
        content = None if self._before is None else self._before[2]
        if content is not None and content.view is not None:
            # What the engine wrote over the version before went with it to its own address,
            # where tensors that the user holds would show it.
            content.view.refresh(content.address, content.nbytes)

    def end(self) -> None:
        super().end()
        self._before = self._fresh = None


def _places(table: TensorTable, live: Live) -> Addresses:
    return table.offset_column + np.uint64(live.address)


_MODES: dict[str, type[_Mode]] = {"copy": _CopyMode, "alias": _AliasMode, "flip": _FlipMode}


class ModuleInstallAdapter(TransactionalAdapter):
    """Installs updates into an engine whose weights this process can see.

    All tensors of an update must be the engine's, by name, shape and dtype. Tied tensors stay tied:
    an update may hold one of their names, or several with equal bytes.

    ``alias`` and ``flip`` give the engine's tensors other storages. Whatever else looks at the old
    ones keeps the old weights: an attribute, or a buffer that is not persistent, that is a view of
    a parameter; an optimizer's flat buffer; a numpy array. Make such views anew after each update,
    or use ``copy``.
    """

    imports_itself: bool = False
    phases_ms: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        engine: Engine,
        *,
        mode: Literal["copy", "alias", "flip"] = "copy",
        strict: bool = True,
        quiesce: Quiesce = nullcontext,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the engine is not touched yet.

        Args:
            engine: an ``nn.Module`` (parameters and persistent buffers), or a dict of tensors: the
                very ones that the engine runs on. With ``copy`` they may also be views of these.
            mode: ``copy``, ``alias`` or ``flip``.
            strict: False allows engine tensors that an update does not hold.
            quiesce: gives a context in which the engine does not run; entered around every install,
                and around the undo of what was begun in it.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.

        Raises:
            TypeError: an engine that is neither, or a `quiesce` that is no such function.
            ValueError: unknown mode, less than one thread, or a dict for ``alias`` or ``flip`` with
                tensors whose memory others look at too, such as ``module.state_dict()``.

        """
        if not isinstance(mode, str) or mode not in _MODES:
            hint = did_you_mean(mode, _MODES)
            raise ValueError(f"mode {mode!r}: expected one of {sorted(_MODES)}.{hint}")
        self.mode = mode
        require_plain(quiesce, "quiesce")
        self._quiesce = quiesce
        self._is_dirty = False  # an install has begun, and was neither undone nor committed
        num_threads = checked_threads(num_threads)
        engine = checked_engine(engine)
        rebinds = _MODES[mode].rebinds
        if rebinds and not isinstance(engine, torch.nn.Module):
            require_owned(engine, mode)
        self._memory = EngineMemory(engine, strict=strict, rebinds=rebinds, num_threads=num_threads)
        self._mode = _MODES[mode](self._memory)
        # Prepared last, and neither undone, nor committed, nor abandoned.
        self._update: _Update | None = None
        # The engine as it was matched for the first update since the last end: if an undo failed,
        # the engine is a mixture, and whatever comes next still goes back to that.
        self._origin: Binding | None = None

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find every reason to refuse before a byte of the engine changes.

        Raises:
            IncompatibleUpdate: names, shapes or dtypes do not fit the engine or the mode, the
                update lies on another device, or names that the engine ties differ.

        """
        imported, mode = require_imported(tensors), self._mode
        bound = self._memory.bind_update(manifest)
        here, there = bound.place.device, imported.device
        if here != there and len(bound.tensors):
            raise IncompatibleUpdate(
                f"the update lies on {there} and the engine on {here}. Use a transport that ends "
                "where the engine is: cuda-vmm or cuda-ipc for a GPU, shared-memory for the CPU."
            )
        update = _Update(manifest, imported, bound)
        mode.prepare(update, is_first=self._update is None)
        self._update, self._origin = update, self._origin or bound

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put all tensors into the engine. Prepares by itself where that was not done.

        Raises:
            WeightBridgeError: call `undo`.

        """
        if self._update is None or self._update.manifest.update_id != manifest.update_id:
            self.prepare(manifest, tensors)
        assert self._update is not None
        with self._quiesce():
            if not self._is_dirty and self._mode.uses_addresses:
                self._require_in_place(self._update)
            self._is_dirty = True
            self._mode.install(self._update)

    def _require_in_place(self, update: _Update) -> None:
        """Refuse an engine whose tensors moved since `prepare`: old addresses may be anybody's."""
        if update.bound.facts.hold(update.bound.every_tensor):
            return
        self._end()  # an undo has nothing to take back
        raise WeightBridgeUnavailableError(
            f"the engine's tensors were moved between prepare and install of version "
            f"{update.manifest.weight_version}. Do not offload or rebind them in between, nor in "
            "quiesce=; install the update again."
        )

    def prove(self) -> InstallProof:
        """Read what the engine really holds.

        Raises:
            ProofFailed: it is not what was installed.

        """
        if self._update is None:
            raise _not_installed()
        return self._mode.prove(self._update)

    def resume(self) -> None:
        """Nothing waits for it: the engine came to rest for the install alone."""

    def undo(self) -> None:
        """Bring the engine back to the byte to what it held before `install`.

        Raises:
            TornEngine: it could not be brought back.

        """
        # Where the engine never came to rest, nothing was written that it must rest for.
        with self._quiesce() if self._is_dirty else nullcontext():
            if self._origin is not None:
                self._mode.undo(self._origin)
            self._forget()
        self._is_dirty = False  # last: an engine that did not go on is let go on by the next undo

    def abandon(self) -> None:
        """Forget what was prepared, unless an earlier install still has to be undone."""
        if not self._is_dirty:
            self._end()

    def commit(self) -> None:
        """The update is acknowledged: nothing of it will be undone any more."""
        try:
            if self._update is not None:
                self._mode.commit(self._update)
        finally:  # whatever failed: the next undo must not lead back before this version
            self._end()

    def release(self, update_id: str) -> None:
        """Release what is kept for an update; the engine goes on with the bytes that it has."""
        self._mode.release(update_id, is_under_way=self._update is not None)

    def _end(self) -> None:
        self._forget()
        self._is_dirty = False

    def _forget(self) -> None:
        self._update = self._origin = None
        self._mode.end()


def require_imported(tensors: object) -> ImportedTensors:
    """The mapping that a bridge imported."""
    if isinstance(tensors, ImportedTensors):
        return tensors
    raise IncompatibleUpdate(
        f"this adapter installs what bridge.import_update returned, got a {type(tensors).__name__}."
    )
