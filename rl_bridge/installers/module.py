"""`ModuleInstallAdapter`: installs into a torch module, or a dict of tensors, of this process.

Three ways, one contract:

``copy``   into the engine's own storage. Works with every transport; undo copies the retained
           previous version back.
``alias``  the engine's tensors are pointed at the imported pages. Costs nothing per byte; addresses
           change with every version.
``flip``   the engine's tensors are views of one fixed range, under which versions are exchanged.
           Costs nothing per byte, addresses never change. Needs shared-memory.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from rl_bridge.installers.arguments import (
    Engine,
    Quiesce,
    checked_engine,
    checked_quiesce,
    require_owned,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.installers.copying import CopyWay
from rl_bridge.installers.engine_memory import EngineMemory
from rl_bridge.installers.rebinding import AliasWay, FlipWay
from rl_bridge.installers.threads import checked_threads
from rl_bridge.installers.way import Way, require_imported
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["ModuleInstallAdapter"]

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
