"""vLLM's own calls for an update: at the wrong moment, all ranks refuse them together.

vLLM reads the ranks' answers in order and stops at the first error: an answer behind it would be
taken for the answer to the next call. Its workers check by themselves whether an update is under
way, and raise on every rank. So these calls are looked at before a worker sees them, and the last
rank tells for all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.engines.vllm.transfer_engine import RLBridgeTransferEngine
from rl_bridge.engines.vllm.votes import first_said
from rl_bridge.errors import WeightUpdateRejectedError

__all__ = [
    "call_together",
]

_BEGINS = frozenset({"start_weight_update", "shutdown_weight_transfer_engine"})


def call_together(
    worker: Any, name: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call one of a worker's methods, on all ranks or on none.

    Raises:
        WeightUpdateRejectedError: the call does not fit the worker's session; told by the last
            rank. The session is what it was; a refused update ends it.

    """
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, RLBridgeTransferEngine):
        given = arguments[0] if arguments else options.get("update_info")
        problem = first_said(_problem(worker, name, given))
        if problem:
            if name == "update_weights":
                worker._weight_update_active = False  # noqa: SLF001 - as where it is refused itself
            if engine.rank.is_last:
                raise WeightUpdateRejectedError(problem)
            return None
    return getattr(worker, name)(*arguments, **options)


def _problem(worker: Any, name: str, given: object) -> str:
    """Why this worker must not be called so now; empty if it may."""
    is_active = bool(getattr(worker, "_weight_update_active", False))
    if name == "start_draft_weight_update":
        return (
            "rl_bridge updates no draft model. Start a fresh engine for another draft, or leave "
            "this one: it only costs speed."
        )
    if name in _BEGINS:
        return (
            f"{name} was called while a weight update is already active. Call "
            "finish_weight_update first."
            if is_active
            else ""
        )
    if not is_active:
        return (
            f"{name} was called without a matching start_weight_update: it must be called before, "
            "and again behind a refused update. Call start_weight_update and update_weights first."
        )
    ranks = worker.vllm_config.parallel_config.world_size
    if name == "update_weights" and isinstance(given, list) and len(given) != ranks:
        return (
            f"update_info is a list of {len(given)}, expected one for each of {ranks} ranks. Pass "
            "one update_info for all of them: {'manifest': manifest.to_json()}."
        )
    return ""
