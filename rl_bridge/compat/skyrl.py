"""SkyRL's weight sync: its policy workers update vLLM servers, and its LoRA by files, with a proof.

`bridged` gives SkyRL's policy worker's class with another sender of weights: its first rank
publishes the whole tensors that SkyRL gathers, and each vLLM server takes them as a transaction.

    fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(bridged(FSDPPolicyWorkerBase))

A LoRA adapter goes by files, as in SkyRL. SkyRL's trainer writes the adapter into
``lora_sync_path``, a directory that all workers see, and sends a request without tensors, whose
only name is ``lora_disk_load``; its engine has vLLM load the directory. Here every version has a
directory of its own below that path, written whole or not at all. The engine's side reads it, and
installs it as a version of an adapter: in memory, on all ranks or none, proven, and undone if
anything fails. Names and fields are those of SkyRL's weight sync (``trainer.policy.model.lora``,
``names``, ``extras``).

    lora = LoRAConfig(rank=8, alpha=16, lora_sync_path="/mnt/shared/lora")
    writer = LoRADiskWriter(lora)                              # trainer, on each rank
    if lora.is_lora:
        request = writer.write(extractor, weight_version=step)
        if request is not None:                                # on rank 0
            client.update_named_weights(request)
        return                                                 # the base stays as it is

    loader = LoRADiskLoader(VLLMEngineAdapter(llm))            # engine
    if is_lora_disk_loading_request(request):
        loader.load(request)
        llm.generate(prompts, params, lora_request=loader.lora_request())
"""

import asyncio
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from rl_bridge.bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.compat.servers import EngineServers, raise_on_all_ranks
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import IncompatibleUpdate, MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.installers import TransactionalAdapter
from rl_bridge.trainers import StateDictExtractor, WeightExtractor, read_peft, write_peft
from rl_bridge.trainers.chunks import whole_copies

__all__ = [
    "LORA_DISK_LOAD",
    "LoRAConfig",
    "LoRADiskLoader",
    "LoRADiskWriter",
    "bridged",
    "is_lora_disk_loading_request",
]

LORA_DISK_LOAD = "lora_disk_load"
"""The only name in a request that tells of a directory."""
_PATH, _VERSION = "lora_disk_path", "weight_version"
_KEPT = 2  # an engine may be reading the one before


_SYNC = "init_weight_sync_state"
Worker = TypeVar("Worker", bound=type)


def bridged(
    worker_class: Worker, *, transport: str = "shared-memory", **engine_options: Any
) -> Worker:
    """Return a SkyRL policy worker's class whose weights go to vLLM servers as transactions.

    For ``FSDPPolicyWorkerBase`` and ``MegatronPolicyWorkerBase`` with engines of their own GPUs
    (``placement.colocate_all=false``); made and used as ever. A sync that fails raises on all of
    the trainer's ranks, and the engines that refused it serve the version before.

    Args:
        worker_class: SkyRL's, or a subclass of one.
        transport: which one carries the bytes.
        engine_options: as `VLLMEngineAdapter` takes them. ``cast`` is True unless given.

    Raises:
        TypeError: no policy worker.

    """
    homes = [kind for kind in worker_class.__mro__ if _SYNC in vars(kind)]
    if not homes:
        raise TypeError(
            f"{worker_class.__name__} has no {_SYNC}, expected a policy worker of SkyRL such as "
            "FSDPPolicyWorkerBase. Give it that class, before ray.remote."
        )
    facts = {"bridge_transport": transport, "bridge_options": {"cast": True, **engine_options}}
    # Between SkyRL's own classes, whose last one would connect a sender of SkyRL's.
    sync = type("BridgedSync", (_BridgedSync, homes[-1]), facts)
    return type(worker_class.__name__, (worker_class, sync), {})  # type: ignore[return-value]  # a subclass


class _BridgedSync:
    """Connect a sender of this library, as SkyRL's worker connects its own."""

    bridge_transport: str
    bridge_options: Mapping[str, Any]
    cfg: Any  # SkyRL's

    async def init_weight_sync_state(
        self, inference_engine_client: Any, inference_engine_cfg: Any
    ) -> None:
        """Make the sender; every rank calls it. The engines are not called."""
        del inference_engine_cfg
        client = inference_engine_client
        replicas = getattr(client, "data_parallel_size", 1)
        if self.cfg.placement.colocate_all or replicas > 1:
            raise WeightBridgeUnavailableError(
                f"placement.colocate_all={self.cfg.placement.colocate_all} and "
                f"data_parallel_size={replicas}: expected false and 1. SkyRL puts colocated "
                "engines to sleep, which leaves an undo nothing to go back to, and lists a server "
                "for each replica of an engine. Start engines of their own."
            )
        servers = None
        if torch.distributed.get_rank() == 0:
            servers = EngineServers(self.bridge_transport)
            servers.connect(
                {url: VLLMEngineAdapter(url, **self.bridge_options) for url in client.server_urls}
            )
        self._weight_transfer_sender = BridgeWeightSender(servers)
        self._transfer_strategy_cls = BridgeWeightSender


class BridgeWeightSender:
    """SkyRL's ``WeightTransferSender`` over `EngineServers`, which its first rank has."""

    handles_prefix_cache_reset = True
    """An update drops what engines have cached, all or nothing with the weights."""

    def __init__(self, servers: EngineServers | None) -> None:
        """Send to these servers; None on the other ranks."""
        self._servers = servers

    async def send_chunks(
        self, chunks: Iterable[Any], weight_metadata: object = None, **_options: object
    ) -> None:
        """Publish all tensors as the next version, and return when every server has proven it.

        Every rank of the trainer calls it, and reads `chunks` to the end, since SkyRL gathers in
        there.

        Raises:
            WeightBridgeError: it was not published, or a server refused or undid it.

        """
        del weight_metadata
        chunks = iter(chunks)
        pairs = (
            (name, one.cpu())
            for chunk in chunks
            for name, one in zip(chunk.names, chunk.tensors, strict=True)
        )
        problem: Exception | None = None
        try:
            if self._servers is not None:
                await asyncio.to_thread(self._servers.update, pairs)
        except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
            problem = error
        for _ in chunks:
            pass
        raise_on_all_ranks(problem)

    def teardown(self) -> None:
        """Leave the servers to the next trainer. Idempotent."""
        if self._servers is not None:
            self._servers.close()


class LoRAConfig(BaseModel):
    """SkyRL's ``trainer.policy.model.lora``.

    Attributes:
        rank: of the adapter; 0 is training without LoRA.
        alpha: numerator of the scaling.
        dropout: in training.
        lora_sync_path: directory that trainer and engines see under the same path.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(default=0, ge=0)
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_sync_path: Path = Path("/tmp/skyrl_lora_sync")  # noqa: S108 - SkyRL's own default

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is trained: the base's weights are not sent then."""
        return self.rank > 0


def is_lora_disk_loading_request(request: Mapping[str, Any]) -> bool:
    """Whether a request tells of a directory, instead of tensors."""
    return list(request.get("names") or [])[:1] == [LORA_DISK_LOAD]


class LoRADiskWriter:
    """The trainer's side, on each of its ranks."""

    def __init__(self, config: LoRAConfig, *, adapter: str = "policy") -> None:
        """Configure; nothing is written.

        Args:
            config: SkyRL's.
            adapter: name of the adapter, which its directories begin with.

        """
        self._config = config
        self._adapter = adapter
        # A trainer that begins anew at an earlier step meets directories of the one before.
        self._token = secrets.token_hex(4)
        self._written: list[Path] = []

    def write(self, source: Any, weight_version: int) -> dict[str, Any] | None:
        """Write a version of the adapter; returns the request for the engines, on rank 0.

        Every rank of a sharded trainer calls it: the adapter's tensors are gathered. The
        writer keeps its last two directories, and removes the older ones that it wrote.

        Args:
            source: a PEFT model, or an extractor with ``adapter=``, such as
                ``FSDPWeightExtractor(model, adapter="policy")``.
            weight_version: of the trainer.

        Raises:
            IncompatibleUpdate: no adapter; or one of another rank than configured.
            WeightBridgeUnavailableError: the directory cannot be written.

        """
        extractor = source
        if not isinstance(source, WeightExtractor):
            extractor = StateDictExtractor(source, adapter=self._adapter)
        tensors = whole_copies(extractor.full())
        spec = extractor.adapter
        if spec is None:
            raise IncompatibleUpdate(
                "the extractor gives a model's weights, expected an adapter. Make it with adapter=."
            )
        shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        ranks = {pair.rank for pair in spec.pairs(shapes)}
        if ranks != {self._config.rank}:
            raise IncompatibleUpdate(
                f"adapter {spec.name!r} has rank {sorted(ranks)}, and lora.rank is "
                f"{self._config.rank}. Set lora.rank to the adapter's."
            )
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return None
        home = self._config.lora_sync_path
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightBridgeUnavailableError(
                f"lora_sync_path {home} cannot be made: {error.strerror}. Name another one."
            ) from error
        folder = home / f"{self._adapter}-{weight_version}-{self._token}"
        write_peft(folder, spec, tensors)
        self._written.append(folder)
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        extra = {_PATH: str(folder), _VERSION: weight_version}
        return {"names": [LORA_DISK_LOAD], "extras": [extra]}


class LoRADiskLoader:
    """The engine's side: what a request's directory holds becomes the version that serves."""

    def __init__(self, engine: TransactionalAdapter, *, adapter: str = "policy") -> None:
        """Configure; nothing is read.

        Args:
            engine: such as ``VLLMEngineAdapter(llm)`` or ``SGLangInstallAdapter(engine)``.
            adapter: under which name it is installed.

        """
        self.adapter = adapter
        self.executor = RolloutExecutor(weight_install_adapter=engine, suspicious="off")
        self._version = -1

    def load(self, request: Mapping[str, Any]) -> int:
        """Read the directory and install it; returns its version. On failure the one before serves.

        A request of SkyRL's own trainer names no version: it gets the next number.

        Raises:
            MalformedManifest: a request without a directory; damaged files.
            IncompatibleUpdate: no adapter that the engine can serve.
            WeightBridgeUnavailableError: the directory is not here.
            WeightBridgeError: as for `RolloutExecutor.update_weights`.

        """
        extra: Mapping[str, Any] = next(iter(request.get("extras") or []), {})
        if not is_lora_disk_loading_request(request) or not isinstance(extra.get(_PATH), str):
            raise MalformedManifest(
                f"the request has names {list(request.get('names') or [])[:3]}, expected "
                f"[{LORA_DISK_LOAD!r}] and extras with {_PATH!r}. Send requests with tensors to "
                "the weights' own loader."
            )
        spec, tensors = read_peft(extra[_PATH], self.adapter)
        version = int(extra.get(_VERSION, self._version + 1))
        # One for each load: a request that failed may come again, and a trainer may go back a step.
        with make_weight_bridge("shared-memory", suspicious="off") as bridge:
            manifest = bridge.publish(tensors, weight_version=version, adapter=spec)
            self.executor.update_weights(manifest)
            bridge.release(manifest.update_id)
        self._version = version
        return version

    def lora_request(self, version: int | None = None) -> Any:
        """Return what a request names the active version by: see `RolloutExecutor.lora_request`."""
        return self.executor.lora_request(self.adapter, version)

    def close(self) -> None:
        """Leave the engine, which goes on with what it has."""
        self.executor.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()
