"""`TwoPhaseExecutor`: an update in steps, for whoever decides between them.

`import_weights` -> `prepare_weights` -> `commit_weights`, or `abort_weights` before the last. Until
the commit the engine serves on, untouched. One update at a time is on its way: the next one gives
it up, and so does whatever else is asked of the executor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.bridge.arguments import UpdateRef, update_id_of
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.transaction import Transaction
from rl_bridge.errors import IllegalTransition, UnknownUpdate, WeightUpdateRejectedError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["TwoPhaseExecutor", "require_two_phase"]


class TwoPhaseExecutor(RolloutExecutor):
    """A `RolloutExecutor` whose updates may also be taken step by step."""

    def __init__(self, **options: Any) -> None:
        """Configure as `RolloutExecutor` does.

        Args:
            options: what `RolloutExecutor` takes.

        Raises:
            Exception: what `RolloutExecutor` raises.

        """
        super().__init__(**options)
        self._halted: Transaction | None = None

    @property
    def pending_weight_update_id(self) -> str | None:
        """The update that is imported or prepared, and neither committed nor given up."""
        halted = self._halted
        return None if halted is None or halted.is_over else halted.manifest.update_id

    def import_weights(
        self, manifest: WeightUpdateManifest | str | bytes
    ) -> Mapping[str, torch.Tensor]:
        """Import an update and verify every byte; the engine is not asked.

        Returns:
            The imported mapping, name -> tensor.

        Raises:
            WeightBridgeError: refused; the subclass and the text say why.

        """
        return self._exclusively("import_weights", self._import, manifest)

    def _import(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        update = self._begin(manifest)
        self._take(update, lambda: update.bring(self._look_for_suspicion))
        self._halted = update
        self._under_way = None
        return update.tensors

    def prepare_weights(self, update: UpdateRef) -> None:
        """Find every reason to refuse the imported update before a byte of the engine changes.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up.
            IllegalTransition: it is prepared already.
            WeightBridgeError: refused, and given up.
            Exception: the adapter's own, unchanged.

        """

        def step(halted: Transaction) -> None:
            if halted.is_staged:
                msg = f"{_name(halted)} is prepared already. Call commit_weights or abort_weights."
                raise IllegalTransition(msg)
            self._take(halted, halted.stage)
            self._under_way = None

        self._on("prepare_weights", update, step)

    def commit_weights(self, update: UpdateRef) -> Mapping[str, torch.Tensor]:
        """Install, prove and acknowledge the prepared update, or leave everything as it was.

        Returns:
            The imported mapping, name -> tensor.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up.
            IllegalTransition: it is not prepared.
            WeightBridgeError: undone; the previous version is active.
            TornEngine: install and undo both failed; the engine must not serve.
            Exception: the adapter's own, unchanged, after the undo.

        """

        def step(halted: Transaction) -> None:
            if not halted.is_staged:
                msg = f"{_name(halted)} is imported and not prepared. Call prepare_weights first."
                raise IllegalTransition(msg)
            self._take(halted, halted.install)
            halted.activate()
            self._under_way = None

        self._on("commit_weights", update, step)
        return self.shared_weights

    def abort_weights(self, update: UpdateRef, reason: str) -> None:
        """Give up the imported or prepared update; the engine is what it was.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up already.

        """

        def step(halted: Transaction) -> None:
            halted.end(WeightUpdateRejectedError(f"{_name(halted)} was given up: {reason}"))

        self._on("abort_weights", update, step)

    def _on(self, caller: str, update: UpdateRef, step: Callable[[Transaction], None]) -> None:
        """Take a step with the update that waits for one."""
        update_id = update_id_of(update, caller=caller)
        self._check_process()
        with self._lock:
            if self._busy.locked():
                msg = (
                    f"update {update_id}: {caller} was called from inside an update (an observer, "
                    "a hook of the adapter). Call it when that one is over."
                )
                raise WeightUpdateRejectedError(msg)
            with self._busy:
                self._check_open()
                if self._under_way is not None:
                    self._settle()  # an interrupt cut it off, and with it what waited
                halted = self._halted
                if halted is None or self.pending_weight_update_id != update_id:
                    msg = (
                        f"{caller}: update {update_id} is not on its way here, expected "
                        f"{self.pending_weight_update_id}. Import its manifest first."
                    )
                    raise UnknownUpdate(msg)
                try:
                    step(halted)
                finally:
                    if halted.is_over:
                        self._halted = None

    def _settle(self) -> None:
        """As in `RolloutExecutor`; what waited for its next step is given up as well."""
        super()._settle()
        halted = self._halted
        if halted is not None:
            msg = f"{_name(halted)} was not committed before something else was asked for."
            halted.end(WeightUpdateRejectedError(f"{msg} Publish a later version."))
            self._halted = None


def _name(update: Transaction) -> str:
    return f"version {update.manifest.weight_version} (update {update.manifest.update_id})"


def require_two_phase(executor: object) -> None:
    """Refuse an executor that cannot stop between its steps.

    Raises:
        TypeError: it is another one, or none.

    """
    if not isinstance(executor, TwoPhaseExecutor):
        msg = (
            f"executor is a {type(executor).__name__}, expected a TwoPhaseExecutor. Make one with "
            "rl_bridge.remote.TwoPhaseExecutor, which takes the same arguments."
        )
        raise TypeError(msg)
