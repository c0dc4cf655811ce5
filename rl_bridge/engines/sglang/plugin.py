"""What SGLang loads in each of its processes: the entry point of the group ``sglang.srt.plugins``.

It hooks two things of the schedulers' processes. ``get_weights_by_name``, a control request that
SGLang answers between two steps of the model, without a lock and without pickle, answers for names
that begin with ``rl_bridge:`` what `SGLangInstallAdapter` asks. And a load of SGLang's own that
fails within an update of ours is answered with ``success: false``: SGLang would end the engine,
and the process that started it. So is a load of a driver that no longer has the engine: another one
may have proven what that would write over. In the process that takes requests, the same control
request answers which adapters they ask for: see `rl_bridge.engines.sglang.front`.
A rank is told when SGLang releases the memory of its weights, and when that is there again.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from rl_bridge.engines.sglang import require
from rl_bridge.errors import WeightBridgeUnavailableError, WeightUpdateRejectedError

_LOG = logging.getLogger(__name__)

NAME = "rl_bridge"
"""Name of the entry point: where ``SGLANG_PLUGINS`` is set, it must be in there."""
PREFIX = "rl_bridge:"
SENDER = "rl_bridge_sender"
"""Where a bucket of tensors tells its `sender`; a group and a folder have that in their names."""
_SENDER = re.compile(r"rl_bridge-([0-9a-f]{32})")
_COMPONENTS = "sglang.srt.model_executor.model_runner_components"
_REQUESTS = "sglang.srt.managers.io_struct"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
ANSWERED = f"{_MANAGER}.get_weights_by_name"
SLEEPS = f"{_MANAGER}.release_memory_occupation"
WAKES = f"{_MANAGER}.resume_memory_occupation"
_WEIGHTS = "weights"
GUARDED = tuple(
    f"{_COMPONENTS}.weight_updater.WeightUpdater.update_weights_from_{source}"
    for source in ("tensor", "disk")
)
FRONTED = "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_weights_by_name"
ACQUIRED = "sglang.srt.lora.lora_registry.LoRARegistry.acquire"
RECEIVED = f"{_COMPONENTS}.weight_updater.WeightUpdater.receive_weights_from_distributed"


def register() -> None:
    """Register the hooks; SGLang applies them. Where SGLang has none, the log says so."""
    try:
        registry = require("sglang.srt.plugins.hook_registry")
    except WeightBridgeUnavailableError as error:
        _LOG.warning("rl_bridge is not hooked in: %s", error)
        return
    around = registry.HookType.AROUND
    hooks = {
        ANSWERED: _answered,
        FRONTED: _fronted,
        ACQUIRED: _acquired,
        RECEIVED: _received,
        SLEEPS: _slept,
        WAKES: _woke,
        **dict.fromkeys(GUARDED, _guarded),
    }
    for target, hook in hooks.items():
        registry.HookRegistry.register(target, hook, around)


def sender(driver: str) -> str:
    """By what the engine knows whose a load is that comes by SGLang's own routes."""
    return f"rl_bridge-{driver}"


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
    from rl_bridge.engines.sglang.host import answer_text

    def flush() -> bool | None:
        if manager.tp_worker.model_config.is_multimodal:
            return None  # SGLang's tokenizer process has a cache of its own then
        return bool(manager.flush_cache(empty_cache=False))

    model = manager.tp_worker.model_runner.model
    lora = manager.tp_worker.model_runner.lora_manager
    text, may_sleep = request.name.removeprefix(PREFIX), bool(manager.memory_saver_adapter.enabled)
    said = answer_text(model, flush, text, lora, may_sleep=may_sleep)
    return require(_REQUESTS).GetWeightsByNameReqOutput(parameter=_as_numbers(said))


def _as_numbers(text: str) -> list[float]:
    """A text as a weight's numbers, which are all that this route can answer."""
    return [float(byte) for byte in text.encode("utf-8")]


async def _fronted(original: Callable[..., Any], manager: Any, request: Any, *more: Any) -> Any:
    from rl_bridge.engines.sglang.front import FRONT, answer_front

    if not request.name.startswith(FRONT):
        return await original(manager, request, *more)
    registry = getattr(manager, "lora_registry", None)
    return _as_numbers(await answer_front(registry, request.name.removeprefix(FRONT)))


async def _acquired(original: Callable[..., Any], registry: Any, names: Any) -> Any:
    from rl_bridge.engines.sglang.front import acquire

    return await acquire(original, registry, names)


def _slept(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Tell the rank. Whether SGLang keeps a copy of the weights depends on several flags."""
    from rl_bridge.engines.rank import note_sleep

    if manager.memory_saver_adapter.enabled and (not request.tags or _WEIGHTS in request.tags):
        note_sleep(manager.tp_worker.model_runner.model, keeps_weights=False)
    return original(manager, request)


def _woke(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    from rl_bridge.engines.rank import note_wake

    told = original(manager, request)
    if not request.tags or _WEIGHTS in request.tags:
        note_wake(manager.tp_worker.model_runner.model)
    return told


def _guarded(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    from rl_bridge.engines.rank import known_rank

    rank = known_rank(updater.get_model())
    given = args[0] if args else next(iter(kwargs.values()), None)
    said = given.get(SENDER) if isinstance(given, Mapping) else _last_name(given)
    refusal = _refusal(updater, said)
    if refusal:
        return False, refusal
    if rank is None or not rank.is_begun:
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


def _received(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    refusal = _refusal(updater, kwargs.get("group_name"))
    if refusal:
        raise WeightUpdateRejectedError(refusal)  # SGLang answers with it
    return original(updater, *args, **kwargs)


def _last_name(path: object) -> str:
    return PurePath(path).name if isinstance(path, str) else ""


def _refusal(updater: Any, said: object) -> str:
    """Why a load must not be let in; empty if it may, or is none of ours."""
    from rl_bridge.engines.rank import known_rank

    found = _SENDER.search(said) if isinstance(said, str) else None
    rank = known_rank(updater.get_model())
    if found is None or (rank is not None and rank.takes_load_of(found[1])):
        return ""
    return (
        "this load's update is not the one under way in the engine: another driver has taken the "
        "engine over, or it was started anew. Call recover(), and publish a later version"
    )
