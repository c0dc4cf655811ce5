"""``copy``: into the engine's own storage. The retained previous version is the undo."""

from rl_bridge.errors import TornEngine, WeightBridgeError
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.engine_memory import Binding, EngineMemory
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.installers.way import Way
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.imported import ImportedTensors

__all__ = ["CopyWay"]


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
        if self._current is None or self._current[1].pin.view is None:
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
            self._rewrite(*self._current)
        if self._is_released:
            self._current = None
        self._is_released = False
        self._pending = self._snapshot = None
        self.end()

    def _rewrite(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        bound = self.memory.bind(manifest.table, strict=self.strict)
        view = tensors.pin.view
        if view is not None:
            # What the user wrote into his view of the old version must not come back with it.
            view.refresh(tensors.pin.address, tensors.pin.nbytes)
        self.memory.write(bound, tensors.addresses)
        try:
            self.memory.prove(bound, manifest)
        except WeightBridgeError as error:
            msg = (
                f"undo failed, although version {manifest.weight_version} was copied back: {error}"
            )
            raise TornEngine(msg) from error

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
