"""TRL's GRPO trainers, with each push of weights as a transaction of this library.

The asynchronous trainer takes a weight transfer, and `BridgeWeightTransfer` is one. The synchronous
one makes its vLLM generation itself, in its constructor: `bridged` gives the trainer's class with
that one object replaced. Rollouts, rewards and losses stay TRL's.

    trainer = AsyncGRPOTrainer(..., weight_transfer=BridgeWeightTransfer("http://127.0.0.1:8000"))
    trainer = bridged(GRPOTrainer)(..., args=GRPOConfig(use_vllm=True, ...))

The engine's environment needs rl_bridge, and a server ``VLLM_SERVER_DEV_MODE=1``; vLLM's own
weight-transfer backend is not used. An update that fails raises in the trainer, and the engine
serves the version before. Names are those of TRL 1.16.
"""

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from rl_bridge.bridge import Acknowledgement, RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.compat.servers import Pairs, Standing, readable
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import (
    BridgeClosed,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest import WeightUpdateManifest

__all__ = ["BridgeWeightTransfer", "UpdatedEngine", "bridged"]

Trainer = TypeVar("Trainer", bound=type)
_GENERATION = "VLLMGeneration"


@runtime_checkable
class UpdatedEngine(Protocol):
    """What installs a version: a `RolloutExecutor` or a `RemoteEngine`."""

    @property
    def last_ack(self) -> Acknowledgement | None:
        """What the last acknowledged update left behind: proof, timings, memory."""

    def update_weights(self, manifest: Any) -> object:
        """Install one complete version, or leave everything as it was."""


class BridgeWeightTransfer:
    """TRL's ``WeightTransferProtocol``: what ``AsyncGRPOTrainer(weight_transfer=...)`` takes.

    The trainer's first sync is version 1, and each further one counts on. Its ``model_version``
    moves when `send_weights` returns, which is when the engine's proof was acknowledged; a refused
    version leaves it, and its number is not used again.
    Only the trainer's main process calls it.

    Attributes:
        bridge: the trainer's; `TensorBridge.holders` tells which worker has which version.
        engine: what installs: its ``last_ack`` has the proof and the timings of the last update.

    """

    def __init__(
        self, engine: Any, *, bridge: TensorBridge | str = "shared-memory", **engine_options: Any
    ) -> None:
        """Configure; the engine is not called.

        Args:
            engine: a vLLM server's URL, an ``LLM`` or ``AsyncLLM``, or an engine of any kind behind
                a `RolloutExecutor` or a `RemoteEngine`.
            bridge: the trainer's; or the name of a transport, for one that is made and closed here.
            engine_options: as `VLLMEngineAdapter` takes them, for a vLLM engine. ``cast`` is True
                unless given: TRL's trainers keep other dtypes than engines.

        Raises:
            TypeError: no engine, no such option, or options for an engine that has its own.
            ValueError: an option out of its range, a text that is no URL.
            WeightBridgeUnavailableError: no such transport; a URL without httpx.

        """
        self._closes: list[Any] = []
        if isinstance(bridge, str):
            bridge = make_weight_bridge(bridge, source_worker="trainer")
            self._closes.append(bridge)
        self.bridge: TensorBridge = bridge
        self._standing = Standing()
        self._is_closed = False
        if isinstance(engine, UpdatedEngine):
            if engine_options:
                raise TypeError(
                    f"engine is a {type(engine).__name__}, which has its options already; got "
                    f"{sorted(engine_options)}. Give them to its adapter."
                )
            self.engine: UpdatedEngine = engine
            return
        adapter = VLLMEngineAdapter(engine, **{"cast": True, **engine_options})
        # (What is suspicious about an update, the same bridge says when it is published.)
        executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=adapter, suspicious="off"
        )
        self.engine = executor
        self._closes.insert(0, executor)

    def init_weight_transfer(self) -> None:
        """Do nothing: there is no connection to make before the first update."""

    def pause(self) -> None:
        """Do nothing: the update itself pauses the engine, when all is verified and staged."""

    def send_weights(self, iterator: Pairs) -> None:
        """Publish all tensors as the next version, and have the engine install and prove it.

        Args:
            iterator: pairs of the checkpoint's name and the whole tensor; read to its end. A tensor
                on a GPU is copied to the host, unless the transport carries those.

        Raises:
            WeightBridgeError: it was not published, or refused, or undone; the subclass and the
                text say why. The version before serves.
            TornEngine: install and undo both failed; the engine must not serve.
            BridgeClosed: `destroy` was called.

        """
        if self._is_closed:
            raise BridgeClosed(
                "this weight transfer is destroyed. Make a new one for the next trainer."
            )
        bridge, last = self.bridge, self.bridge.publisher.last_version
        pairs = readable(bridge.transport, iterator)
        manifest = bridge.publish(pairs, weight_version=1 if last is None else last + 1)
        with self._standing.replaced(bridge, manifest):
            self.engine.update_weights(manifest)
            _require_acknowledged(manifest, self.engine.last_ack)

    def resume(self) -> None:
        """Do nothing: the update has ended its own pause."""

    def destroy(self) -> None:
        """Close what was made here; the engine goes on with what it has. Idempotent."""
        self._is_closed = True
        while self._closes:
            self._closes.pop(0).close()


def _require_acknowledged(manifest: WeightUpdateManifest, ack: Acknowledgement | None) -> None:
    """Refuse to count a version that the engine did not prove."""
    if ack is None or ack.update_id != manifest.update_id:
        raise WeightUpdateRejectedError(
            f"version {manifest.weight_version} was sent, and the engine's last acknowledgement is "
            f"{'none' if ack is None else f'of version {ack.weight_version}'}. Give this trainer "
            "an engine that nobody else updates."
        )


def bridged(
    trainer_class: Trainer, *, bridge: TensorBridge | str = "shared-memory", **engine_options: Any
) -> Trainer:
    """Return a TRL trainer's class whose weights go to vLLM as transactions.

    For ``GRPOTrainer`` with ``use_vllm=True``, in both values of ``vllm_mode``, and other trainers
    that are made around TRL's ``VLLMGeneration``. In server mode the main process updates the
    server; colocated, each process updates its own engine, and if one refuses all processes raise.
    ``trainer.vllm_generation.weight_transfer`` is the `BridgeWeightTransfer`; a server is left to
    the next trainer when it is destroyed, or when the process ends by itself.

    Args:
        trainer_class: such as ``trl.GRPOTrainer``; made and used as ever. Its constructor raises
            ValueError without ``use_vllm=True``.
        bridge: as for `BridgeWeightTransfer`.
        engine_options: as for `BridgeWeightTransfer`.

    Raises:
        TypeError: no trainer that generates with vLLM.

    """
    homes = [sys.modules[kind.__module__] for kind in trainer_class.__mro__]
    home = next((one for one in homes if hasattr(one, _GENERATION)), None)
    if home is None:
        raise TypeError(
            f"{trainer_class.__name__} does not use TRL's {_GENERATION}, expected a trainer such "
            "as trl.GRPOTrainer. Give AsyncGRPOTrainer weight_transfer=BridgeWeightTransfer(...)."
        )
    base = getattr(home, _GENERATION)
    facts = {
        "bridge": bridge,
        "engine_options": engine_options,
        "trl_home": sys.modules[base.__module__],
    }
    generation = type(_GENERATION, (_BridgedGeneration, base), facts)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # The constructor makes its generation by this name, and connects it by NCCL at once.
        with _replaced(home, generation):
            trainer_class.__init__(self, *args, **kwargs)  # type: ignore[misc]  # the class's own
        if not hasattr(self, "vllm_generation"):
            raise ValueError(
                "the trainer does not generate with vLLM. Set use_vllm=True in its arguments."
            )

    return type(trainer_class.__name__, (trainer_class,), {"__init__": init})  # type: ignore[return-value]  # a subclass


@contextmanager
def _replaced(module: Any, generation: type) -> Iterator[None]:
    original = getattr(module, _GENERATION)
    setattr(module, _GENERATION, generation)
    try:
        yield
    finally:
        setattr(module, _GENERATION, original)


class _BridgedGeneration:
    """TRL's generation, which it stands before, with the push of weights as an update of ours."""

    bridge: TensorBridge | str
    engine_options: Mapping[str, Any]
    trl_home: Any  # the module of TRL's generation
    weight_transfer: BridgeWeightTransfer | None = None  # in processes that have an engine
    # TRL's own, or set by it.
    model: Any
    accelerator: Any
    mode: str
    server_base_url: str | None
    server_host: str
    server_port: int
    server_timeout: float
    tensor_parallel_size: int
    enable_sleep_mode: bool
    vllm_client: Any
    llm: Any
    _dist: Any
    _iter_named_params: Callable[[], Iterator[tuple[str, torch.Tensor]]]

    def _init_vllm(self) -> None:
        """Start or find the engine as TRL does, without the NCCL group that its own push needs."""
        if self.mode == "server":
            if self.accelerator.is_main_process:
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = self.trl_home.VLLMClient(
                    base_url=url, connection_timeout=self.server_timeout
                )
                # The server outlives this process, and would wait for it.
                atexit.register(self._use(self.vllm_client.base_url).destroy)
            self.accelerator.wait_for_everyone()
            return
        if self.tensor_parallel_size > 1 or self.enable_sleep_mode:
            raise WeightBridgeUnavailableError(
                f"a colocated engine with tensor_parallel_size={self.tensor_parallel_size} and "
                f"sleep mode {'on' if self.enable_sleep_mode else 'off'}: expected 1 and off. Each "
                "process drives its own engine only, and what a deep sleep throws away is not what "
                "an undo could go back to. Use vllm_mode='server'."
            )
        super()._init_vllm()  # type: ignore[misc]  # TRL's
        self._use(self.llm)

    def _use(self, engine: Any) -> BridgeWeightTransfer:
        options = {"bridge": self.bridge, **self.engine_options}
        self.weight_transfer = made = BridgeWeightTransfer(engine, **options)
        return made

    def sync_weights(self) -> None:
        """Update the engine; every process calls it. See `BridgeWeightTransfer.send_weights`."""
        pairs = self._iter_named_params()
        problem: Exception | None = None
        try:
            if self.weight_transfer is not None:
                self.weight_transfer.send_weights(self._lasting(pairs))
        except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
            problem = error
        finally:
            for _ in pairs:  # gathers of all processes, and the end of a merge, are behind it
                pass
        # Told to every process: else the others would wait for this one in their next gather.
        failed = torch.tensor(int(problem is not None), device=self.accelerator.device)
        count = int(self.accelerator.reduce(failed, reduction="sum"))
        if problem is not None:
            raise problem
        if count:
            raise WeightUpdateRejectedError(
                f"the update failed in {count} of the trainer's processes, and not in this one; "
                "theirs say why. Start the trainer anew from its last checkpoint."
            )

    def _lasting(self, pairs: Pairs) -> Pairs:
        """The tensors as they are read at the end: those of a merge or a gather are gone then."""
        is_passing = self._dist.is_fsdp or self._dist.is_zero3
        if not is_passing and not hasattr(self.model, "merge_adapter"):  # as peft's models have
            return pairs
        return ((name, one.to("cpu", copy=True)) for name, one in pairs)
