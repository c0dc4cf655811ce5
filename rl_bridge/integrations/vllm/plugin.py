"""What vLLM loads in each of its processes: the entry point of the group ``vllm.general_plugins``.

It registers the weight-transfer backend ``rl_bridge`` and gives workers one method more, by which
`VLLMEngineAdapter` reaches them through vLLM's own ``collective_rpc``. (vLLM names this group as
the place where plugins install worker-side methods.) A vLLM that cannot be served starts all the
same: the log says why.
"""

import logging
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.vllm.parts import require

__all__ = ["BACKEND", "METHOD", "register"]

_LOG = logging.getLogger(__name__)

BACKEND = "rl_bridge"
"""What users write: ``weight_transfer_config={"backend": "rl_bridge"}``."""
METHOD = "rl_bridge"
"""Name of the workers' method."""


def register() -> None:
    """Register backend and method in this process; again, it does nothing."""
    try:
        factory = require("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        worker = require("vllm.v1.worker.worker_base").WorkerBase
    except WeightBridgeUnavailableError as error:
        _LOG.warning("backend %r is not registered: %s", BACKEND, error)
        return
    if BACKEND not in factory._registry:  # noqa: SLF001 - a second registration raises
        home = "rl_bridge.integrations.vllm.transfer_engine"
        factory.register_engine(BACKEND, home, "RLBridgeTransferEngine")
    if not hasattr(worker, METHOD):
        setattr(worker, METHOD, _call)


def _call(worker: Any, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """The workers' method. Never raises: a rank's failure is part of its answer."""
    from rl_bridge.integrations.vllm.rank import rank_of

    return rank_of(worker.model_runner.get_model(), worker.vllm_config).call(verb, payload or {})
