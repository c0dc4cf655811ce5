"""What a rank needs of others: one of two ways of installing, an engine that fits."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.engines.vllm.frames import clear_frames
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError, describe
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "make_installer",
    "manifest_of",
    "require_supported",
    "tried",
]

_LOG = logging.getLogger(__name__)


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
