"""What vLLM loads in each of its processes: the entry point of the group ``vllm.general_plugins``.

It registers the weight-transfer backend ``rl_bridge`` and gives workers one method more, by which
`VLLMEngineAdapter` reaches them through vLLM's own ``collective_rpc``. (vLLM names this group as
the place where plugins install worker-side methods.) Of data-parallel replicas, ``collective_rpc``
asks all and returns what the first one's workers said; for that method, what all workers said. With
that backend, vLLM's own calls for an update go through `rl_bridge.engines.vllm.transfer_engine`. A
vLLM that cannot be served starts all the same: the log says why.

A trainer that sends by vLLM's flow loads no plugins: there `RLBridgeTrainerInitInfo`, which that
flow begins with, registers the backend's trainer side.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_bridge.engines.vllm import MINIMUM, require
from rl_bridge.errors import WeightBridgeUnavailableError

_LOG = logging.getLogger(__name__)

BACKEND = "rl_bridge"
"""What users write: ``weight_transfer_config={"backend": "rl_bridge"}``."""
METHOD = "rl_bridge"
"""Name of the workers' method."""
_RPC = "collective_rpc_async"
# What a driver calls, and when, is its own mistake to make: all ranks tell it together.
_CALLS = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "shutdown_weight_transfer_engine",
)
_SLEEPS = ("sleep", "discard", "wake_up")
_DEEP = 2  # the level of sleep from which on no copy of the weights is kept
_WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class RLBridgeTrainerInitInfo:
    """What vLLM's ``WeightTransferTrainerFactory.trainer_init`` takes to send by rl_bridge.

    Attributes:
        rank: of this process in the trainer; rank 0 publishes, the others take part in gathers.
        transport: of the bridge; the engines' workers must reach it.
        bridge_options: of rank 0's bridge, as `rl_bridge.make_weight_bridge` takes them.
        engine_options: of the workers: ``cast``, ``staging``, ``memory_budget_nbytes``,
            ``num_threads``, ``transports``, as `rl_bridge.vllm.VLLMEngineAdapter` takes them.

    """

    backend: ClassVar[str] = BACKEND
    rank: int
    transport: str = "shared-memory"
    bridge_options: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let this process's factory know the backend.

        Raises:
            WeightBridgeUnavailableError: no vLLM here, or one without trainer-side engines.

        """
        if not _register_trainer(require("vllm.distributed.weight_transfer.factory")):
            raise WeightBridgeUnavailableError(
                f"this vLLM has no WeightTransferTrainerFactory, expected {MINIMUM} or later. "
                "Publish over a bridge, and pass the manifest to vLLM's update_weights yourself."
            )

    @property
    def is_sender(self) -> bool:
        """Whether this rank publishes."""
        return self.rank == 0


def _register_trainer(module: Any) -> bool:
    """Register the trainer's side, where vLLM has one."""
    factory = getattr(module, "WeightTransferTrainerFactory", None)
    if factory is not None and BACKEND not in factory._registry:  # noqa: SLF001 - as below
        home = "rl_bridge.engines.vllm.trainer_engine"
        factory.register_engine(BACKEND, home, "RLBridgeTrainerTransferEngine")
    return factory is not None


def register() -> None:
    """Register backend and method in this process; again, it does nothing."""
    try:
        transfer = require("vllm.distributed.weight_transfer.factory")
        factory = transfer.WeightTransferEngineFactory
        workers = require("vllm.v1.worker.worker_base")
    except WeightBridgeUnavailableError as error:
        _LOG.warning("backend %r is not registered: %s", BACKEND, error)
        return
    if BACKEND not in factory._registry:  # noqa: SLF001 - a second registration raises
        home = "rl_bridge.engines.vllm.transfer_engine"
        factory.register_engine(BACKEND, home, "RLBridgeTransferEngine")
    _register_trainer(transfer)
    if not hasattr(workers.WorkerBase, METHOD):
        setattr(workers.WorkerBase, METHOD, _call)
    for name in _CALLS:
        # What executors call: it hands all that it does not have itself to its worker.
        if name not in vars(workers.WorkerWrapperBase):
            setattr(workers.WorkerWrapperBase, name, _together(name))
    for name in _SLEEPS:
        if name not in vars(workers.WorkerWrapperBase):
            setattr(workers.WorkerWrapperBase, name, _noted(name))
    # Beside the engine, not in its workers; a vLLM that has no such client reaches no replicas.
    client = getattr(require("vllm.v1.engine.core_client"), "DPLBAsyncMPClient", None)
    if hasattr(client, "call_utility_all_async") and _RPC not in vars(client):
        setattr(client, _RPC, _of_all_replicas(getattr(client, _RPC)))


def _call(worker: Any, verb: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """The workers' method. Never raises: a rank's failure is part of its answer."""
    from rl_bridge.engines.rank import answer
    from rl_bridge.engines.vllm.host import vllm_rank

    given = {} if payload is None else payload
    # (What is no mapping is refused in the answer.)
    adapter = str(given.get("adapter", "")) if isinstance(given, dict) else ""
    rank = vllm_rank(worker.model_runner.get_model(), worker.vllm_config, adapter)
    return answer(rank, verb, given)


def _together(name: str) -> Callable[..., Any]:
    """A method in front of the worker's own; it leaves other backends alone."""

    def call(wrapper: Any, *arguments: Any, **options: Any) -> Any:
        worker = wrapper.worker
        config = worker.vllm_config.weight_transfer_config
        if config is None or config.backend != BACKEND:
            return getattr(worker, name)(*arguments, **options)
        from rl_bridge.engines.vllm.transfer_engine import call_together

        return call_together(worker, name, arguments, options)

    call.__name__ = name
    return call


def _noted(name: str) -> Callable[..., Any]:
    """A call that puts a worker to sleep or wakes it; the ranks are told what it does."""

    def call(wrapper: Any, *arguments: Any, **options: Any) -> Any:
        worker = wrapper.worker
        method = getattr(worker, name)
        if not worker.vllm_config.model_config.enable_sleep_mode:
            return method(*arguments, **options)  # which does nothing to the weights
        from rl_bridge.engines.rank import note_sleep, note_wake

        model = worker.model_runner.get_model()
        given = inspect.signature(method).bind(*arguments, **options)
        given.apply_defaults()
        tags = given.arguments.get("tags") or (_WEIGHTS,)  # none named: all of them
        if name == "sleep":
            note_sleep(model, keeps_weights=given.arguments["level"] < _DEEP)
        elif name == "discard" and _WEIGHTS in tags:
            note_sleep(model, keeps_weights=False)
        told = method(*arguments, **options)
        if name == "wake_up" and _WEIGHTS in tags:
            note_wake(model)
        return told

    call.__name__ = name
    return call


def _of_all_replicas(first: Callable[..., Any]) -> Callable[..., Any]:
    """``collective_rpc`` of an engine with replicas, where vLLM's returns what the `first` said."""

    async def call(
        client: Any,
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's own signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method != METHOD:
            told: list[Any] = await first(client, method, timeout, args, kwargs)
            return told
        each = await client.call_utility_all_async("collective_rpc", method, timeout, args, kwargs)
        return [reply for replica in each for reply in replica]

    return call
