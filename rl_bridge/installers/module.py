"""`ModuleInstallAdapter`: installs into a torch module, or a dict of tensors, of this process.

Three ways, one contract:

``copy``   into the engine's own storage. Works with every transport; undo copies the retained
           previous version back.
``alias``  the engine's tensors are pointed at the imported pages. Costs nothing per byte; addresses
           change with every version.
``flip``   the engine's tensors are views of one fixed range, under which versions are exchanged.
           Costs nothing per byte, addresses never change. Needs shared-memory.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
)
from rl_bridge.installers.arguments import (
    Engine,
    Quiesce,
    checked_engine,
    checked_quiesce,
    require_owned,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter, checked_threads
from rl_bridge.installers.engine_memory import Binding, EngineMemory
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable, collector_paused
from rl_bridge.memory import vm
from rl_bridge.memory.packing import dtype_name
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.views import ImportedTensors, LeasedView, Pin, tensor_in

__all__ = [
    "AliasWay",
    "CopyWay",
    "FlipWay",
    "ModuleInstallAdapter",
    "Rebinding",
    "Way",
    "prove_identity",
    "require_imported",
]

# ---- A way to install into memory of this process: what the ways have in common.


class Way(ABC):
    """One way to install. The adapter calls prepare, install, prove, then commit or undo."""

    rebinds: ClassVar[bool] = False
    """Whether the engine's tensors get other storages, instead of other bytes in theirs."""

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        self.memory = memory
        self.strict = strict
        self.num_threads = num_threads
        # The engine as it was matched before the first install since the last commit or undo.
        self._origin: Binding | None = None

    def begin(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> Binding:
        """Match names, shapes and dtypes, and remember what `put_back` goes back to.

        Raises:
            IncompatibleUpdate: they do not fit, lie on another device, or names that the engine
                ties differ.

        """
        bound = self.memory.bind_update(manifest, strict=self.strict, rebinds=self.rebinds)
        here, there = bound.place.device, tensors.device
        if here != there and len(bound.tensors):
            msg = (
                f"the update lies on {there} and the engine on {here}. Use a transport that ends "
                "where the engine is: cuda-vmm or cuda-ipc for a GPU, shared-memory for the CPU."
            )
            raise IncompatibleUpdate(msg)
        if self._origin is None:
            self._origin = bound
        return bound

    def put_back(self) -> None:
        """Bring names, tensor objects and views back to what they were.

        Raises:
            TornEngine: they cannot be brought back.

        """
        if self._origin is not None:
            self.memory.put_back(self._origin)

    def end(self) -> None:
        """Nothing is under way any more."""
        self._origin = None

    @abstractmethod
    def is_prepared(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `prepare` was called for this update."""

    @abstractmethod
    def prepare(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Refuse, or remember what `install` shall do and what `undo` needs."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget what was prepared: it will not be installed, and nothing else is under way."""

    @abstractmethod
    def install(self) -> None:
        """Do what was prepared."""

    @abstractmethod
    def prove(self) -> InstallProof:
        """Read what the engine holds."""

    @abstractmethod
    def undo(self) -> None:
        """Take back what `install` did, complete or not."""

    @abstractmethod
    def commit(self) -> None:
        """Forget what `undo` would need."""

    @abstractmethod
    def release(self, update_id: str) -> None:
        """Let go of what is kept for an update."""


class Rebinding:
    """Points an engine's tensor objects at other memory, and back."""

    def __init__(self) -> None:
        """Begin with nothing pointed elsewhere."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_pointed(self) -> bool:
        """Whether anything was pointed elsewhere since the last `back` or `forget`."""
        return bool(self._before)

    def point(self, owners: Sequence[torch.Tensor], counterparts: Sequence[torch.Tensor]) -> None:
        """Give each engine tensor the storage of its counterpart; undone by `back`."""
        # Views made in inference mode would make inference tensors of the engine's: for good.
        with torch.inference_mode(mode=False):
            for owner, tensor in zip(owners, counterparts, strict=True):
                # Remembered first: a failure in the middle must find everything that was changed.
                self._before.append((owner, owner.detach()))
                owner.data = tensor

    def back(self) -> None:
        """Point everything back, the last change first."""
        with torch.inference_mode(mode=False):
            while self._before:
                owner, data = self._before[-1]
                owner.data = data
                self._before.pop()

    def forget(self) -> None:
        """Let go of the old storages."""
        self._before.clear()


def prove_identity(
    way: Way,
    manifest: WeightUpdateManifest,
    bound: Binding,
    expected: Addresses,
    *,
    base: int,
    is_verified: bool,
) -> InstallProof:
    """Show that the engine's tensors are the pages that were verified; digest them where not.

    Args:
        way: whose engine.
        manifest: what was installed.
        bound: the engine's tensors, as they were matched with the layout.
        expected: where each of the layout's rows must be, uint64.
        base: first byte of the arena that they lie in.
        is_verified: whether `base` shows the very mapping that import verified.

    Raises:
        ProofFailed: a tensor is elsewhere, or differs.

    """
    table = manifest.table
    _require_views(way, manifest, bound, expected)
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
    found = bound.place.plan(table.nbytes_column).digest(expected, num_threads=way.num_threads)
    if found != manifest.digests:
        have = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_NBYTES)
        want = np.frombuffer(manifest.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        row = int(np.flatnonzero((have != want).any(axis=1))[0])
        msg = (
            f"the engine does not hold version {manifest.weight_version}: tensor "
            f"{table.names[row]!r} is {have[row].tobytes().hex()}, expected "
            f"{want[row].tobytes().hex()}. Nothing else may write to the engine during an update: "
            "see quiesce=."
        )
        raise ProofFailed(msg)
    return InstallProof(
        method="digest",
        root=manifest.root,
        digested_nbytes=table.total_nbytes,
        tensors=len(table.rows),
    )


def _require_views(
    way: Way, manifest: WeightUpdateManifest, bound: Binding, expected: Addresses
) -> None:
    """Every tensor of the engine lies where its row is expected, whole and contiguous."""
    lost: str | None = None
    if not bound.holds_objects(way.memory.tensors()):
        lost = "one of its tensor objects was replaced"
    elif bound.is_at(expected) and bound.is_as_matched():
        return
    elif not bound.reads_as_stored():
        lost = "one of its tensors is a lazy conjugate or negative"
    else:
        name = _first_elsewhere(manifest.table, bound, expected)
        lost = None if name is None else f"tensor {name!r} is no view of the verified memory"
    if lost is not None:
        msg = (
            f"the engine does not hold version {manifest.weight_version}: {lost}. Nothing else may "
            "change the engine's tensors during an update: see quiesce=."
        )
        raise ProofFailed(msg)


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


def require_imported(tensors: object) -> ImportedTensors:
    """The mapping that a bridge imported, or a refusal.

    Raises:
        IncompatibleUpdate: another mapping: its memory is unknown.

    """
    if isinstance(tensors, ImportedTensors):
        return tensors
    msg = (
        f"this adapter installs what bridge.import_update returned, got a {type(tensors).__name__}."
    )
    raise IncompatibleUpdate(msg)


# ---- ``copy``: into the engine's own storage. The retained previous version is the undo.


def _covers(older: TensorTable, newer: TensorTable) -> bool:
    """Whether every tensor of `newer` is in `older` too, so that `older` can undo it."""
    return older.digest == newer.digest or older.rows.keys() >= newer.rows.keys()


class CopyWay(Way):
    """Copies; every byte that the engine holds afterwards is read again for the proof."""

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        super().__init__(memory, strict=strict, num_threads=num_threads)
        self._current: tuple[WeightUpdateManifest, ImportedTensors] | None = None
        self._pending: tuple[WeightUpdateManifest, ImportedTensors, Binding] | None = None
        self._snapshot: Snapshot | None = None
        self._is_released = False

    def is_prepared(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `prepare` was called for this update."""
        return self._pending is not None and self._pending[0].update_id == manifest.update_id

    def prepare(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Match names, shapes and dtypes; copy the engine aside if nothing else can restore it."""
        bound = self.begin(manifest, tensors)
        # While an update is neither undone nor committed, the engine may be a mixture: what `undo`
        # goes back to must then not be taken from it.
        if self._pending is None:
            self._snapshot = None
            if not self._is_covered(manifest):
                self._snapshot = Snapshot(self.memory.engine, num_threads=self.num_threads)
        self._pending = (manifest, tensors, bound)

    def abandon(self) -> None:
        """Drop the copy: it is of an engine that goes on and may change."""
        self._pending = self._snapshot = None
        self.end()

    def _is_covered(self, manifest: WeightUpdateManifest) -> bool:
        """Whether the retained version can undo an update to `manifest`.

        Only if it lies in a published segment: of a copy in this process's own memory nobody can
        tell what the user wrote into it meanwhile.
        """
        pin = None if self._current is None else self._current[1].held
        if self._current is None or pin is None or pin.view is None:
            return False
        return _covers(self._current[0].table, manifest.table)

    def install(self) -> None:
        """Copy every byte."""
        if self._pending is not None:
            _, tensors, bound = self._pending
            self.memory.write(bound, tensors.addresses)

    def prove(self) -> InstallProof:
        """Read the engine's memory and digest it."""
        if self._pending is None:
            msg = "prove was called before install. Call prepare, install, then prove."
            raise WeightBridgeError(msg)
        manifest, _, bound = self._pending
        return self.memory.prove(bound, manifest)

    def undo(self) -> None:
        """Copy the previous version, or the initial weights, back."""
        if self._pending is None:
            return
        if self._snapshot is not None:
            self._snapshot.restore()
        elif self._current is not None:
            self.put_back()
            self.memory.rewrite(*self._current, strict=self.strict)
        if self._is_released:
            self._current = None
        self._is_released = False
        self._pending = self._snapshot = None
        self.end()

    def commit(self) -> None:
        """The new version is now what the next undo goes back to."""
        if self._pending is not None:
            self._current = self._pending[:2]
        self._is_released = False
        self._pending = self._snapshot = None
        self.end()

    def release(self, update_id: str) -> None:
        """Drop the retained version; the next update then copies the engine aside first."""
        if self._current is not None and self._current[0].update_id == update_id:
            if self._pending is not None:
                self._is_released = True  # the undo needs it; it goes with the next commit or undo
            else:
                self._current = None


# ---- ``alias`` and ``flip``: the engine's tensors become views of the verified pages.


class AliasWay(Way):
    """Points the engine's tensors at the imported pages; addresses change with every version."""

    rebinds: ClassVar[bool] = True

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        super().__init__(memory, strict=strict, num_threads=num_threads)
        self._rebinding = Rebinding()
        # The slot that the engine's tensors look at since the last commit, and its bytes: weakly,
        # since they end with these tensors.
        self._current: tuple[LeasedView, weakref.ref[object], int, int] | None = None
        self._pending: tuple[WeightUpdateManifest, ImportedTensors, Binding] | None = None

    def is_prepared(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `prepare` was called for this update."""
        return self._pending is not None and self._pending[0].update_id == manifest.update_id

    def prepare(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Match names, shapes and dtypes."""
        bound = self.begin(manifest, tensors)
        self._pending = (manifest, tensors, bound)

    def abandon(self) -> None:
        """Forget the update."""
        self._pending = None
        self.end()

    def install(self) -> None:
        """Rebind."""
        if self._pending is not None:
            manifest, tensors, bound = self._pending
            names = manifest.table.names
            with collector_paused():
                views = [tensors[names[row]] for row in bound.rows.tolist()]
                self._rebinding.point(bound.tensors, views)

    def prove(self) -> InstallProof:
        """Show that the tensors are the verified pages, and that nobody wrote there."""
        if self._pending is None:
            msg = "prove was called before install. Call prepare, install, then prove."
            raise WeightBridgeError(msg)
        manifest, tensors, bound = self._pending
        pin = tensors.pin
        return prove_identity(
            self,
            manifest,
            bound,
            tensors.addresses,
            base=pin.address,
            is_verified=pin.view is not None,
        )

    def undo(self) -> None:
        """Bind back, to the bytes that were published: what the engine wrote over them goes."""
        self._rebinding.back()
        if self._pending is not None and self._current is not None:
            view, buffer, address, nbytes = self._current
            if buffer() is not None:
                view.refresh(address, nbytes)
        self.put_back()
        self._pending = None
        self.end()

    def commit(self) -> None:
        """Let go of what the engine had before."""
        try:
            if self._pending is not None and self._rebinding.has_pointed:
                _, tensors, bound = self._pending
                pin, self._current = tensors.pin, None
                if pin.view is not None:
                    at = pin.address, pin.nbytes
                    self._current = (pin.view, weakref.ref(pin.buffer), *at)
                self.memory.moved(bound, tensors.addresses)
        finally:  # whatever failed: the next undo must not lead back before this version
            self._rebinding.forget()
            self._pending = None
            self.end()

    def release(self, update_id: str) -> None:
        """The engine's tensors hold the version themselves, until the next one."""


class FlipWay(Way):
    """Exchanges versions under one fixed range of addresses."""

    rebinds: ClassVar[bool] = True

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        super().__init__(memory, strict=strict, num_threads=num_threads)
        self._rebinding = Rebinding()
        self._live: Live | None = None
        self._live_layout = ""
        self._fresh: Live | None = None  # reserved by `prepare` for a layout that is not live yet
        # While an update is under way: what was live before, to go back to.
        self._before: tuple[Live | None, str, Pin | None] | None = None
        self._pending: tuple[WeightUpdateManifest, ImportedTensors, Binding] | None = None

    def is_prepared(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `prepare` was called for this update."""
        return self._pending is not None and self._pending[0].update_id == manifest.update_id

    def prepare(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Match names, shapes and dtypes; make sure that the update lies in a mapped segment."""
        bound = self.begin(manifest, tensors)
        if tensors.pin.view is None:
            msg = (
                "a flip needs the mapped segment of a shared-memory update, this transport copied "
                "it in. Use mode='copy' or 'alias'."
            )
            raise IncompatibleUpdate(msg)
        if self._live is not None and self._live_layout == manifest.table.digest:
            live = self._live
            places = manifest.table.offset_column[bound.rows] + np.uint64(live.address)
            sizes = manifest.table.nbytes_column[bound.rows]
            if ((bound.addresses != places) & (sizes > 0)).any():
                self._live = None  # somebody rebound the engine: bind it anew
        if self._live is None or self._live_layout != manifest.table.digest:
            # A shortage of addresses must show here, before anything of the engine changes.
            self._fresh = live_range(tensors.pin, manifest.table.arena_nbytes)
        # Before the flip, while the engine still runs. Verifying read every page, but through this
        # mapping only if no other engine flipped them away since.
        tensors.pin.view.prefault(manifest.table.arena_nbytes)
        self._pending = (manifest, tensors, bound)

    def abandon(self) -> None:
        """Forget the update."""
        self._pending = self._fresh = None
        self.end()

    def install(self) -> None:
        """Flip; the first time, and after a change of layout, bind the engine to the range."""
        if self._pending is None:
            return
        manifest, tensors, bound = self._pending
        # An update whose undo failed goes on: its `undo` still leads back to where that one began.
        is_first = self._before is None
        if is_first:
            content = None if self._live is None else self._live.content
            self._before = (self._live, self._live_layout, content)
        try:
            self._put(manifest, tensors, bound)
        except (SegmentError, WeightBridgeUnavailableError):
            if is_first:
                self._before = None  # nothing changed
            raise

    def _put(
        self, manifest: WeightUpdateManifest, tensors: ImportedTensors, bound: Binding
    ) -> None:
        if self._live is not None and self._live_layout == manifest.table.digest:
            self._live.flip(tensors.pin)
            return
        live = self._fresh or live_range(tensors.pin, manifest.table.arena_nbytes)
        live.flip(tensors.pin)
        self._fresh, self._live, self._live_layout = None, live, manifest.table.digest
        with collector_paused():
            self._bind_to(live, manifest.table, bound)

    def _bind_to(self, live: Live, table: TensorTable, bound: Binding) -> None:
        views = [
            tensor_in(live.pin, *place)
            for place in zip(table.offsets, table.nbytes, table.dtypes, table.shapes, strict=True)
        ]
        self._rebinding.point(bound.tensors, [views[row] for row in bound.rows.tolist()])

    def prove(self) -> InstallProof:
        """Show that the tensors lie in the range, and that it shows the verified segment."""
        if self._pending is None or self._live is None:
            msg = "prove was called before install. Call prepare, install, then prove."
            raise WeightBridgeError(msg)
        manifest, tensors, bound = self._pending
        live = self._live
        expected = manifest.table.offset_column + live.address
        shown = live.content is tensors.pin and live.shows(tensors.pin)
        return prove_identity(self, manifest, bound, expected, base=live.address, is_verified=shown)

    def undo(self) -> None:
        """Flip back, or bind back, to the bytes that were published."""
        if self._before is not None:
            live, layout, content = self._before
            if live is not self._live:
                self._rebinding.back()
                if self._live is not None:
                    self._live.empty()
                self._live, self._live_layout = live, layout
            if live is not None and content is not None:
                if live.content is not content:
                    live.flip(content)
                if content.view is not None:  # what the engine wrote over them goes
                    content.view.refresh(live.address, content.nbytes)
        self.put_back()
        self._before = self._pending = None
        self.end()

    def commit(self) -> None:
        """Let go of what was live before."""
        try:
            if self._pending is not None and self._live is not None and self._rebinding.has_pointed:
                manifest, _, bound = self._pending
                places = manifest.table.offset_column + np.uint64(self._live.address)
                self.memory.moved(bound, places)
            content = None if self._before is None else self._before[2]
            if content is not None and content.view is not None:
                # What the engine wrote over the version before went with it to its own address,
                # where tensors that the user holds would show it.
                content.view.refresh(content.address, content.nbytes)
        finally:  # as in `AliasWay.commit`
            self._rebinding.forget()
            self._before = self._pending = None
            self.end()

    def release(self, update_id: str) -> None:
        """The range holds its version itself, until the next one."""


# ---- the rest builds on the parts above

_WAYS: dict[str, type[Way]] = {"copy": CopyWay, "alias": AliasWay, "flip": FlipWay}


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
            num_threads: threads that copy and digest; None takes the usable cores.

        Raises:
            TypeError: an engine that is neither, or a `quiesce` that is no such function.
            ValueError: unknown mode, less than one thread, or a dict for ``alias`` or ``flip`` with
                tensors whose memory others look at too, such as ``module.state_dict()``.

        """
        if not isinstance(mode, str) or mode not in _WAYS:
            msg = f"mode {mode!r}: expected one of {sorted(_WAYS)}"
            raise ValueError(msg)
        self.mode = mode
        self._quiesce = checked_quiesce(quiesce)
        self._has_begun = False
        self._is_dirty = False
        num_threads = checked_threads(num_threads)
        engine = checked_engine(engine)
        if _WAYS[mode].rebinds and not isinstance(engine, torch.nn.Module):
            require_owned(engine, mode)
        memory = EngineMemory(engine, num_threads=num_threads)
        self._way = _WAYS[mode](memory, strict=strict, num_threads=num_threads)

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find every reason to refuse before a byte of the engine changes.

        Raises:
            IncompatibleUpdate: names, shapes or dtypes do not fit the engine or the mode.

        """
        self._way.prepare(manifest, require_imported(tensors))

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put all tensors into the engine. Prepares by itself where that was not done.

        Raises:
            WeightBridgeError: call `undo`.

        """
        self._has_begun = True
        if not self._way.is_prepared(manifest):
            self.prepare(manifest, tensors)
        with self._quiet():
            self._is_dirty = True
            self._way.install()

    def prove(self) -> InstallProof:
        """Read what the engine really holds.

        Raises:
            ProofFailed: it is not what was installed.

        """
        return self._way.prove()

    def resume(self) -> None:
        """Nothing waits for it: the engine came to rest for the install alone."""

    def undo(self) -> None:
        """Bring the engine back to the byte to what it held before `install`.

        Raises:
            TornEngine: it could not be brought back.

        """
        # Where the engine never came to rest, nothing was written that it must rest for.
        with self._quiet() if self._is_dirty else nullcontext():
            self._way.undo()
        self._has_begun = self._is_dirty = False

    def abandon(self) -> None:
        """Forget what was prepared, unless an earlier install still has to be undone."""
        if not self._has_begun:
            self._way.abandon()

    def commit(self) -> None:
        """The update is acknowledged: nothing of it will be undone any more."""
        try:
            self._way.commit()
        finally:
            self._has_begun = self._is_dirty = False

    def release(self, update_id: str) -> None:
        """Let go of what is kept for an update; the engine goes on with the bytes that it has."""
        self._way.release(update_id)

    def _quiet(self) -> AbstractContextManager[object]:
        context: object = self._quiesce()
        if not isinstance(context, AbstractContextManager):
            msg = (
                f"quiesce returned a {type(context).__name__}, expected a context manager. Write "
                "it with contextlib.contextmanager: stop the engine, yield, let it go on."
            )
            raise TypeError(msg)
        return context
