"""`TwoPhaseExecutor`: an update in steps, with decisions between them.

`import_weights` -> `prepare_weights` -> `commit_weights`, or `abort_weights` before the last. Until
the commit the engine serves on, untouched. One update at a time is on its way: the next one gives
it up, and so does whatever else is asked of the executor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rl_bridge.bridge.arguments import UpdateRef, update_id_of
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.transaction import Step, Transaction
from rl_bridge.errors import IllegalTransition, UnknownUpdate, WeightUpdateRejectedError
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.manifest.model import WeightUpdateManifest


class TwoPhaseExecutor(RolloutExecutor):
    """A `RolloutExecutor` whose updates may also be taken step by step."""

    @property
    def pending_weight_update_id(self) -> str | None:
        """The update that is imported or prepared, and neither committed nor given up."""
        pending = self._pending
        is_over = pending is None or pending.step is Step.OVER
        return None if pending is None or is_over else pending.manifest.update_id

    @deferred_interrupts()
    def import_weights(
        self, manifest: WeightUpdateManifest | str | bytes
    ) -> Mapping[str, torch.Tensor]:
        """Import an update and verify every byte; the engine is not asked.

        Returns:
            The imported mapping, name -> tensor.

        Raises:
            WeightBridgeError: refused; the subclass and the text say why.

        """
        with self._exclusively("import_weights", manifest):
            update = self._begin("import_weights", manifest)
            update.run(lambda: update.bring(reads=True))
            return update.tensors

    @deferred_interrupts()
    def prepare_weights(self, update: UpdateRef) -> None:
        """Find every reason to refuse the imported update before a byte of the engine changes.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up.
            IllegalTransition: it is prepared already.
            WeightBridgeError: refused, and given up.
            Exception: the adapter's own, unchanged.

        """
        with self._on("prepare_weights", update) as pending:
            if pending.step is Step.PREPARED:
                msg = f"{pending.name} is prepared already. Call commit_weights or abort_weights."
                raise IllegalTransition(msg)
            pending.run(pending.stage)

    @deferred_interrupts()
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
        with self._on("commit_weights", update) as pending:
            if pending.step is not Step.PREPARED:
                msg = f"{pending.name} is imported and not prepared. Call prepare_weights first."
                raise IllegalTransition(msg)
            pending.run(pending.install, pending.activate)
            return self.shared_weights

    @deferred_interrupts()
    def abort_weights(self, update: UpdateRef, reason: str) -> None:
        """Give up the imported or prepared update; the engine is what it was.

        Raises:
            UnknownUpdate: it is not the one that was imported, or it is given up already.

        """
        with self._on("abort_weights", update) as pending:
            pending.end(WeightUpdateRejectedError(f"{pending.name} was given up: {reason}"))

    @contextmanager
    def _on(self, caller: str, update: UpdateRef) -> Iterator[Transaction]:
        """Take a step with the update that waits for one."""
        update_id = update_id_of(update, caller=caller)
        with self._exclusively(caller, update):
            pending = self._pending
            if pending is None or self.pending_weight_update_id != update_id:
                msg = (
                    f"{caller}: update {update_id} is not on its way here, expected "
                    f"{self.pending_weight_update_id}. Import its manifest first."
                )
                raise UnknownUpdate(msg)
            yield pending


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
