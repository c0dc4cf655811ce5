"""`ModuleInstallAdapter`: installs into a torch module, or a dict of tensors, of this process.

Three ways, one contract:

``copy``   into the engine's own storage. Works with every transport; undo copies the retained
           previous version back.
``alias``  the engine's tensors are pointed at the imported pages. Costs nothing per byte; addresses
           change with every version.
``flip``   the engine's tensors are views of one fixed range, under which versions are exchanged.
           Costs nothing per byte, addresses never change. Needs shared-memory.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.installers.copying import CopyWay
from rl_bridge.installers.engine_memory import Engine, EngineMemory
from rl_bridge.installers.rebinding import AliasWay, FlipWay
from rl_bridge.installers.threads import checked_threads
from rl_bridge.installers.way import Way, require_imported
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["ModuleInstallAdapter"]

_WAYS: dict[str, type[Way]] = {"copy": CopyWay, "alias": AliasWay, "flip": FlipWay}


class ModuleInstallAdapter(TransactionalAdapter):
    """Installs updates into an engine whose weights this process can see.

    All tensors of an update must be the engine's, by name, shape and dtype; tied tensors stay tied.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        mode: Literal["copy", "alias", "flip"] = "copy",
        strict: bool = True,
        quiesce: Callable[[], AbstractContextManager[object]] = nullcontext,
        num_threads: int | None = None,
    ) -> None:
        """Configure; the engine is not touched yet.

        Args:
            engine: an ``nn.Module`` (parameters and persistent buffers), or a dict of tensors.
            mode: ``copy``, ``alias`` or ``flip``.
            strict: False allows engine tensors that an update does not hold.
            quiesce: gives a context in which the engine does not run; entered around every install
                and undo.
            num_threads: threads that copy and digest; None takes the usable cores.

        Raises:
            ValueError: unknown mode, or less than one thread.

        """
        if mode not in _WAYS:
            msg = f"mode {mode!r}: expected one of {sorted(_WAYS)}"
            raise ValueError(msg)
        self.mode = mode
        self._quiesce = quiesce
        num_threads = checked_threads(num_threads)
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
        if not self._way.is_prepared(manifest):
            self.prepare(manifest, tensors)
        with self._quiesce():
            self._way.install()

    def prove(self) -> InstallProof:
        """Read what the engine really holds.

        Raises:
            ProofFailed: it is not what was installed.

        """
        return self._way.prove()

    def undo(self) -> None:
        """Bring the engine back to the byte to what it held before `install`.

        Raises:
            TornEngine: it could not be brought back.

        """
        with self._quiesce():
            self._way.undo()

    def commit(self) -> None:
        """The update is acknowledged: nothing of it will be undone any more."""
        self._way.commit()

    def release(self, update_id: str) -> None:
        """Let go of what is kept for an update; the engine goes on with the bytes that it has."""
        self._way.release(update_id)
