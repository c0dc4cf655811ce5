"""What a rank needs of others: bridges, one of two ways of installing, an engine that fits."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.bridges import TensorBridge, make_weight_bridge
from rl_bridge.bridge.group_end import GROUP
from rl_bridge.bridge.records import is_shortage
from rl_bridge.bridge.steps import FineSteps
from rl_bridge.errors import MalformedManifest, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.installers.vllm.model_installer import VLLMModelInstaller
from rl_bridge.installers.vllm.reload import VLLMReloadAdapter
from rl_bridge.integrations.vllm.frames import clear_frames
from rl_bridge.integrations.vllm.votes import group
from rl_bridge.lifecycle.table import State
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "Bridges",
    "acknowledge",
    "let_go",
    "make_installer",
    "manifest_of",
    "require_supported",
    "tried",
]

_LOG = logging.getLogger(__name__)


class Bridges:
    """One bridge for each transport that updates came by."""

    def __init__(self) -> None:
        """Begin with none."""
        self._made: dict[str, TensorBridge] = {}

    def of(self, manifest: WeightUpdateManifest) -> TensorBridge:
        """The bridge that imports this update.

        Raises:
            WeightBridgeUnavailableError: no transport leads it here.

        """
        if manifest.transport == GROUP:
            msg = (
                f"version {manifest.weight_version} was assembled of a group's parts, in the "
                "memory of the process that did it, and the engine's workers read updates by "
                "themselves. Publish what was assembled there once more, by shared-memory, for the "
                "engine; or publish whole tensors."
            )
            raise WeightBridgeUnavailableError(msg)
        bridge = self._made.get(manifest.transport)
        if bridge is None:
            bridge = make_weight_bridge(
                manifest.transport,
                source_worker="vllm",
                source_rank=int(group().rank_in_group),
            )
            self._made[manifest.transport] = bridge
        return bridge

    def close(self) -> None:
        """Close all of them."""
        made, self._made = self._made, {}
        for bridge in made.values():
            bridge.close()


def acknowledge(
    bridge: TensorBridge,
    manifest: WeightUpdateManifest,
    proof: InstallProof,
    timings_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Tell the trainer that its update is active here; where that fails, the answer says so."""
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
    bridge: TensorBridge,
    manifest: WeightUpdateManifest,
    reason: str | None,
    installer: TransactionalAdapter | None,
) -> None:
    """End an update that is over here, whatever its trainer's side makes of it.

    Args:
        bridge: that imported it.
        manifest: the update.
        reason: why it is never let in again; None: nothing is wrong with it, and it may come again.
        installer: of the model that it was staged for.

    """
    steps: list[Callable[[], object]] = [lambda: bridge.release_imported(manifest.update_id)]
    is_here = FineSteps(bridge).is_in(manifest, State.IMPORTED, State.VERIFIED)
    if reason is not None and is_here:
        # (Else the import failed: the bridge knows whether that may be tried again.)
        steps.insert(0, lambda: bridge.reject(manifest.update_id, reason))
    if installer is not None:
        steps.insert(0, installer.abandon)
    for step in steps:
        try:
            step()
        except Exception:  # noqa: BLE001 - logged in full
            # The model is as it should be; that its trainer is not told must not change this.
            _LOG.exception("version %d could not be let go of", manifest.weight_version)


def manifest_of(given: object) -> WeightUpdateManifest:
    """Read a manifest from its JSON text, or from that text parsed.

    Raises:
        MalformedManifest: it is neither.
        WeightManifestValidationError: it describes none that could be imported.

    """
    if isinstance(given, dict):
        given = canonical_json(given)
    if not isinstance(given, str):
        msg = (
            f"update_info has a {type(given).__name__} for its manifest. Pass "
            "{'manifest': manifest.to_json()}."
        )
        raise MalformedManifest(msg)
    return WeightUpdateManifest.from_json(given)


def make_installer(
    model: torch.nn.Module, vllm_config: Any, *, reload: bool = False, **options: Any
) -> TransactionalAdapter:
    """What installs into a worker's model: beside the serving version, or by vLLM's reload.

    Raises:
        TypeError: no such option.
        ValueError: a value that it cannot have.

    """
    kind = VLLMReloadAdapter if reload else VLLMModelInstaller
    made: TransactionalAdapter = kind(model, vllm_config, **options)
    return made


def require_supported(vllm_config: Any) -> None:
    """Refuse engines whose ranks cannot decide together.

    Raises:
        WeightBridgeUnavailableError: replicas or pipeline stages.

    """
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", 0)
    if index:
        msg = (
            f"the engine is replica {index} of a data-parallel group (data_parallel_index), "
            "expected one that stands alone: replicas do not decide together. Start it without "
            "data parallelism, and use one executor for each engine."
        )
        raise WeightBridgeUnavailableError(msg)
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        degree = getattr(parallel, name)
        if degree != 1:
            msg = (
                f"the engine has {name}={degree}, expected 1: its ranks cannot decide together "
                "here. Use tensor parallelism, and one executor for each engine."
            )
            raise WeightBridgeUnavailableError(msg)


def tried(step: Callable[[], object]) -> tuple[str, bool]:
    """Why a step failed, to be told behind a vote, and whether that is a refusal.

    Empty if it did not fail.
    """
    try:
        step()
    except Exception as error:  # noqa: BLE001 - its text is the answer
        _LOG.warning("an update is refused", exc_info=True)
        problem = describe(error)
        clear_frames(error)
        return problem, not is_shortage(error)
    return "", False
