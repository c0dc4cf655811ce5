"""``alias`` and ``flip``: the engine's tensors become views of the verified pages."""

from typing import ClassVar

import numpy as np

from rl_bridge.errors import IncompatibleUpdate, SegmentError, WeightBridgeError
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.engine_memory import Binding, EngineMemory
from rl_bridge.installers.way import Rebinding, Way, prove_identity
from rl_bridge.manifest.collector import collector_paused
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.imported import ImportedTensors
from rl_bridge.memory.live import Live, live_range
from rl_bridge.memory.pins import Pin, tensor_in

__all__ = ["AliasWay", "FlipWay"]


class AliasWay(Way):
    """Points the engine's tensors at the imported pages; addresses change with every version."""

    rebinds: ClassVar[bool] = True

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        super().__init__(memory, strict=strict, num_threads=num_threads)
        self._rebinding = Rebinding()
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
        """Bind back."""
        self._rebinding.back()
        if self._pending is not None:
            # Where the version before is the same one (installed again after its release), the
            # engine has these very pages: what was written over them must not stay.
            pin = None if self._pending[1].is_forgotten else self._pending[1].pin
            if pin is not None and pin.view is not None:
                pin.view.refresh(pin.address, pin.nbytes)
        self.put_back()
        self._pending = None
        self.end()

    def commit(self) -> None:
        """Let go of what the engine had before."""
        try:
            if self._pending is not None and self._rebinding.has_pointed:
                _, tensors, bound = self._pending
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
        # Before the flip, while the engine still runs. Verifying read every page, but through this
        # mapping only if no other engine flipped them away since.
        tensors.pin.view.prefault(manifest.table.arena_nbytes)
        self._pending = (manifest, tensors, bound)

    def abandon(self) -> None:
        """Forget the update."""
        self._pending = None
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
        except SegmentError:
            if is_first:
                self._before = None  # nothing changed
            raise

    def _put(
        self, manifest: WeightUpdateManifest, tensors: ImportedTensors, bound: Binding
    ) -> None:
        if self._live is not None and self._live_layout == manifest.table.digest:
            self._live.flip(tensors.pin)
            return
        live = live_range(tensors.pin, manifest.table.arena_nbytes)
        live.flip(tensors.pin)
        self._live, self._live_layout = live, manifest.table.digest
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
        """Flip back, or bind back."""
        if self._before is not None:
            live, layout, content = self._before
            if live is not self._live:
                self._rebinding.back()
                if self._live is not None:
                    self._live.empty()
                self._live, self._live_layout = live, layout
            if live is not None and content is not None and live.content is not content:
                live.flip(content)
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
