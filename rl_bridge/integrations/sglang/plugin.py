"""What SGLang loads in each of its processes: the entry point of the group ``sglang.srt.plugins``.

It hooks two things of the schedulers' processes. ``get_weights_by_name``, a control request that
SGLang answers between two steps of the model, without a lock and without pickle, answers for names
that begin with ``rl_bridge:`` what `SGLangInstallAdapter` asks. And a load of SGLang's own that
fails within an update of ours is answered with ``success: false``: SGLang would end the engine,
and the process that started it.
"""

import logging
from collections.abc import Callable
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.sglang.parts import require

__all__ = ["ANSWERED", "GUARDED", "NAME", "PREFIX", "call_text", "register", "reply_text"]

_LOG = logging.getLogger(__name__)

NAME = "rl_bridge"
"""Name of the entry point: where ``SGLANG_PLUGINS`` is set, it must be in there."""
PREFIX = "rl_bridge:"
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"
_REQUESTS = "sglang.srt.managers.io_struct"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ANSWERED = f"{_MANAGER}.get_weights_by_name"
GUARDED = tuple(
    f"{_COMPONENTS}.weight_updater.WeightUpdater.update_weights_from_{source}"
    for source in ("tensor", "disk")
)


def register() -> None:
    """Register the hooks; SGLang applies them. Where SGLang has none, the log says so."""
    try:
        registry = require("sglang.srt.plugins.hook_registry")
    except WeightBridgeUnavailableError as error:
        _LOG.warning("rl_bridge is not hooked in: %s", error)
        return
    around = registry.HookType.AROUND
    registry.HookRegistry.register(ANSWERED, _answered, around)
    for target in GUARDED:
        registry.HookRegistry.register(target, _guarded, around)


def call_text(text: str) -> str:
    """A call as the name of a weight."""
    return f"{PREFIX}{text}"


def reply_text(weights: object) -> str | None:
    """The reply that came back as a weight's numbers; None if it is none."""
    if isinstance(weights, list) and weights and isinstance(weights[0], list):
        weights = weights[0]  # replicas answer each for itself
    try:
        return bytes(int(number) for number in weights).decode("utf-8")  # type: ignore[attr-defined]  # what else it is, is found out here
    except (TypeError, ValueError, UnicodeDecodeError):
        return None


def _answered(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.name.startswith(PREFIX):
        return original(manager, request)
    from rl_bridge.integrations.sglang.rank import answer

    def flush() -> bool | None:
        if manager.tp_worker.model_config.is_multimodal:
            return None  # SGLang's tokenizer process has a cache of its own then
        return bool(manager.flush_cache(empty_cache=False))

    model = manager.tp_worker.model_runner.model
    said = answer(model, flush, request.name.removeprefix(PREFIX))
    # A weight's numbers are all that this route can answer.
    numbers = [float(byte) for byte in said.encode("utf-8")]
    return require(_REQUESTS).GetWeightsByNameReqOutput(parameter=numbers)


def _guarded(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    from rl_bridge.integrations.sglang.rank import known_rank

    rank = known_rank(updater.get_model())
    if rank is None or not rank.is_open:
        return original(updater, *args, **kwargs)
    path = updater.model_config.model_path
    try:
        succeeded, message = original(updater, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever a loader raises is the answer
        # SGLang's scheduler would end for it. The executor is told, and puts the weights back.
        _LOG.exception("SGLang's loader failed in an update")
        succeeded, message = False, f"the loader failed: {type(error).__name__}: {error}"
    if not succeeded:
        updater.model_config.model_path = path  # it names the checkpoint that could not be loaded
    return succeeded, message
