"""What the ranks of any engine do at the end of an update: tell its trainer, and let go of it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.bridges import TensorBridge
from rl_bridge.bridge.steps import FineSteps
from rl_bridge.errors import WeightBridgeError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["acknowledge", "let_go"]

_LOG = logging.getLogger(__name__)


def acknowledge(
    bridge: TensorBridge,
    manifest: WeightUpdateManifest,
    proof: InstallProof,
    timings_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Tell the trainer that its update is active here; where that fails, the answer says so.

    Called again for the same update, it is not told twice.
    """
    try:
        if bridge.active_update_id != manifest.update_id:
            evidence, timings = proof.to_dict(), dict(timings_ms)
            bridge.acknowledge(manifest.update_id, proof=evidence, timings_ms=timings)
    except WeightBridgeError as error:
        # Other ranks have committed: there is no way back, and none is needed.
        _LOG.exception("version %d is active, but its trainer is not told", manifest.weight_version)
        return {"not_told": describe(error)}
    finally:
        # The model has memory of its own: the trainer's slot is free for the next version.
        bridge.release_imported(manifest.update_id)
    return {}


def let_go(
    bridge: TensorBridge | None,
    manifest: WeightUpdateManifest,
    reason: str | None,
    installer: TransactionalAdapter | None,
) -> None:
    """End an update that is over here, whatever its trainer's side makes of it.

    Args:
        bridge: that imported it; None: another process did.
        manifest: the update.
        reason: why it is never let in again; None: nothing is wrong with it, and it may come again.
        installer: of the model that it was staged for.

    """
    steps: list[Callable[[], object]] = [] if installer is None else [installer.abandon]
    if bridge is not None:
        if reason is not None and FineSteps(bridge).is_in(manifest, State.IMPORTED, State.VERIFIED):
            # (Else the import failed: the bridge knows whether that may be tried again.)
            steps.append(lambda: bridge.reject(manifest.update_id, reason))
        steps.append(lambda: bridge.release_imported(manifest.update_id))
    for step in steps:
        try:
            step()
        except Exception:  # noqa: BLE001 - logged in full
            # The model is as it should be, and the trainer's slot must not wait for what failed.
            _LOG.exception("version %d could not be let go of", manifest.weight_version)
