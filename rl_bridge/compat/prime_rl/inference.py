"""prime-rl's inference side: readers of parameter servers, the server's routes, and the pool.

    vllm serve MODEL --enable-lora --max-loras 3

with ``VLLM_SERVER_DEV_MODE=1`` and ``VLLM_PLUGINS=rl_bridge,rl_bridge_prime_rl`` in its environment
gives vLLM's server the route ``POST /load_lora_adapter_nixl`` (`PrimeRLRoutes`). It asks the
trainer's parameter servers for a run's version, and installs it as a version of an adapter: each
engine rank reads the shards of all trainer ranks, all ranks have it or none, what they compute with
is read back, and a failure leaves the version before. No file is written, and nothing waits.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rl_bridge.bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.compat.prime_rl.config import (
    FileSystemWeightBroadcastConfig,
    NCCLWeightBroadcastConfig,
    NIXLWeightBroadcastConfig,
    WeightBroadcastConfig,
)
from rl_bridge.compat.prime_rl.trainer import (
    ENDPOINTS,
    NIXL_INFO,
    PROTOCOL,
    Access,
    Ask,
    Join,
    Told,
    Welcome,
    identity_of,
    key_of,
    run_of,
    tls_for,
    tls_options,
)
from rl_bridge.compat.skyrl import LORA_DISK_LOAD, LoRADiskLoader
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.rpc import in_thread
from rl_bridge.engines.vllm import require
from rl_bridge.engines.vllm.client import AsyncLLMClient
from rl_bridge.engines.vllm.endpoint import AdapterTable, rows_of
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import (
    DeadlineExceeded,
    IncompatibleUpdate,
    MalformedManifest,
    SegmentError,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupManifest, slices
from rl_bridge.manifest import AdapterSpec, WeightUpdateManifest
from rl_bridge.trainers import write_peft
from rl_bridge.transports.files.steps import LOOK_S, StepReceiver
from rl_bridge.transports.files.store import MANIFEST
from rl_bridge.transports.files.store import MARKER as STABLE
from rl_bridge.transports.wire.channel import checked_address
from rl_bridge.transports.wire.client import Connector, PeerClient
from rl_bridge.transports.wire.tls import TLSFiles

__all__ = [
    "LoadLoRAFromFiles",
    "LoadLoRAFromNIXL",
    "ParameterClient",
    "PrimeRLRoutes",
    "StaticInferencePool",
    "UnloadLoRA",
    "newest_version",
    "trainer_addresses",
]

_LOG = logging.getLogger(__name__)

CACHE_DIR = "NIXL_LORA_CACHE_DIR"
"""Environment variable: a directory where each installed adapter is written, too."""
SERVER_NAME = "NIXL_LORA_SERVER_NAME"
"""Environment variable: the trainer's ``server_name``, if it is not prime-rl's default."""

Address = tuple[str, int]
_KEPT = 2  # directories of a run in the cache
_FILES = "files"  # where an adapter comes from, if not from a run
_CALL_S = 120.0
_INSTALL_S = 60.0


# ---- a reader ------------------------------------------------------------------------------------


class ParameterClient:
    """Reads what one trainer rank holds of the newest version of each run, verified.

    All that is read between two calls of `refresh_catalog` is of one version of each run.

    Attributes:
        server_name: of the parameter server, with its rank.
        server_ip: where it listens.
        server_port: where it listens.

    """

    def __init__(
        self,
        server_name: str,
        server_ip: str,
        server_port: int,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        tls: TLSFiles | Mapping[str, str] | None = None,
    ) -> None:
        """Configure; nothing is sent.

        Args:
            server_name: ``{server_name}_{rank}``.
            server_ip: the parameter server's address.
            server_port: ``port + rank``.
            token: see `ParameterServer`.
            timeout: seconds that each answer may take.
            tls: see `ParameterServer`.

        Raises:
            ValueError: another machine's address without a token.
            WeightBridgeUnavailableError: one of the files of `tls` cannot be used.

        """
        self.server_name, self.server_ip, self.server_port = server_name, server_ip, server_port
        self._access, self._timeout_s = Access.of(server_ip, token, tls), timeout
        self._rank = 0
        self._manifests: dict[int, WeightUpdateManifest] = {}
        self._read: dict[int, tuple[str, TensorBridge, Mapping[str, torch.Tensor]]] = {}

    def refresh_catalog(self) -> None:
        """Ask for the newest versions.

        Raises:
            WeightBridgeError: as for `newest_version`.

        """
        address, within_s = (self.server_ip, self.server_port), self._timeout_s
        with _connected(address, self.server_name, self._access, within_s) as line:
            self._rank = line.welcome.rank
            told = line.ask(Ask(run_idx=None), Told, within_s=within_s)
        self._manifests = {
            at: WeightUpdateManifest.of(text, caller="refresh_catalog")
            for at, text in zip(told.runs, told.manifests, strict=True)
        }

    def manifest(self, run_idx: int) -> WeightUpdateManifest:
        """The newest version of a run, as of the last `refresh_catalog`.

        Raises:
            UnknownUpdate: there is none.

        """
        found = self._manifests.get(run_idx)
        if found is None:
            raise UnknownUpdate(
                f"parameter server {self.server_name!r} has no version of run {run_idx}, expected "
                f"one of {sorted(self._manifests)}. Ask when the trainer has published it: by "
                "broadcast_weights, or ParameterServer.publish after put."
            )
        return found

    def keys(self) -> list[str]:
        """Keys of the tensors of which this trainer rank holds something."""
        return [
            key_of(at, name)
            for at, manifest in self._manifests.items()
            for name in self._names(manifest)
        ]

    def get(self, key: str) -> torch.Tensor:
        """What this trainer rank holds of a tensor.

        Raises:
            UnknownUpdate: no such key, or run.
            WeightBridgeError: as for `TensorBridge.import_update`.

        """
        return self.batch_get([key])[key]

    def batch_get(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """What this trainer rank holds of several tensors. See `get`."""
        found = {}
        for key in keys:
            run_idx, name = run_of(key)
            tensors = self._tensors(run_idx)
            if name not in tensors:
                raise UnknownUpdate(
                    f"parameter server {self.server_name!r} holds nothing of {key!r}. Ask for one "
                    "of keys(), or another trainer rank."
                )
            found[key] = tensors[name]
        return found

    def disconnect(self) -> None:
        """Leave the parameter server; tensors that were read stay. Idempotent."""
        while self._read:
            _, (_, bridge, _) = self._read.popitem()
            bridge.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Disconnect."""
        self.disconnect()

    def _names(self, manifest: WeightUpdateManifest) -> list[str]:
        if isinstance(manifest, GroupManifest):
            return list(self._boxes(manifest))
        return list(manifest.table.rows)

    def _boxes(self, manifest: GroupManifest) -> dict[str, list[slice | int | None]]:
        """The box that this rank holds of each tensor.

        Raises:
            IncompatibleUpdate: it holds a range of elements, which is no box (FSDP1, ZeRO).

        """
        boxes: dict[str, list[slice | int | None]] = {}
        for name, pieces in manifest.layout.held.items():
            for piece in (one.piece for one in pieces if one.rank == self._rank):
                if piece.is_flat:
                    raise IncompatibleUpdate(
                        f"{name!r}: trainer rank {self._rank} holds a range of its elements, and "
                        "no part that has a shape: expected FSDP2. Import manifest() as a whole."
                    )
                ends = zip(piece.offset, piece.shape, strict=True)
                boxes[name] = [slice(begin, begin + size) for begin, size in ends]
        return boxes

    def _tensors(self, run_idx: int) -> Mapping[str, torch.Tensor]:
        manifest = self.manifest(run_idx)
        update_id, bridge, tensors = self._read.get(run_idx, ("", None, {}))
        if update_id == manifest.update_id:
            return tensors
        if bridge is not None:
            del self._read[run_idx]
            bridge.close()
        wanted = None
        if isinstance(manifest, GroupManifest):
            wanted = slices(self._boxes(manifest))
        bridge = make_weight_bridge(
            "nixl",
            source_worker="reader",
            wanted=wanted,
            timeout_s=self._timeout_s,
            **self._access.nixl,
        )
        try:
            tensors = bridge.import_update(manifest)
        except BaseException:
            bridge.close()
            raise
        self._read[run_idx] = manifest.update_id, bridge, tensors
        return tensors


@contextmanager
def _connected(
    address: Address, server_name: str, access: Access, within_s: float
) -> Iterator[PeerClient[Welcome]]:
    """Be connected to one parameter server, which has to be the one of that name."""
    host, port = address
    what = f"parameter server {server_name!r}"
    line = PeerClient(
        Connector(what, host, port, PROTOCOL, timeout_s=within_s, tls=access.tls),
        access.token,
        identity_of(host, port),
        Join(worker="reader", rank=0, pid=os.getpid(), is_observer=True, server_name=server_name),
    )
    try:
        found = line.welcome.server_name
        if found != server_name:
            raise MalformedManifest(
                f"{line.where} calls itself {found!r}. Check the address, and use one release on "
                "both sides."
            )
        yield line
    finally:
        line.hang_up()


def newest_version(
    addresses: Sequence[Address],
    run_idx: int,
    *,
    weight_version: int | None = None,
    server_name: str = "lora_param_server",
    token: str | None = None,
    timeout: float = 30.0,
    tls: TLSFiles | Mapping[str, str] | None = None,
) -> WeightUpdateManifest:
    """Ask all trainer ranks whether they are there, and the first one for a version of a run.

    Args:
        addresses: of the parameter servers, by rank.
        run_idx: the run.
        weight_version: this version; None is the newest.
        server_name: of the parameter servers, without the rank; each one is asked whether it is
            the one of its rank.
        token: see `ParameterServer`.
        timeout: seconds that all of it may take.
        tls: see `ParameterServer`.

    Raises:
        SegmentError: a trainer rank does not answer, or without knowing the token.
        WeightBridgeUnavailableError: a trainer rank is another one.
        TransferTimeout: not in time.
        UnknownUpdate: there is no such version.
        IncompatibleUpdate: more or fewer ranks published it.

    """
    until, found = time.monotonic() + timeout, dict[int, str]()
    for rank, (host, port) in enumerate(addresses):
        name, left = f"{server_name}_{rank}", max(until - time.monotonic(), 1e-3)
        with _connected((host, port), name, Access.of(host, token, tls), left) as line:
            if not rank:
                left = max(until - time.monotonic(), 1e-3)
                told = line.ask(Ask(run_idx=run_idx), Told, within_s=left)
                held = {at: list(versions) for at, versions in told.runs.items()}
                found = dict(zip(held.get(run_idx, ()), told.manifests, strict=True))
                if not found or weight_version not in {None, *found}:
                    what = "version" if weight_version is None else f"version {weight_version}"
                    raise UnknownUpdate(
                        f"parameter server {name!r}: there is no {what} of run {run_idx}, expected "
                        f"one of {held}. Ask when the trainer has published it: by "
                        "broadcast_weights, or publish."
                    )
    if not addresses:
        raise UnknownUpdate(
            f"run {run_idx}: no trainer address was given. Name one for each trainer rank."
        )
    text = found[max(found) if weight_version is None else weight_version]
    manifest = WeightUpdateManifest.of(text, caller="newest_version")
    ranks = manifest.world_size if isinstance(manifest, GroupManifest) else 1
    if ranks != len(addresses):
        raise IncompatibleUpdate(
            f"version {manifest.weight_version} of run {run_idx} was published by {ranks} ranks, "
            f"and {len(addresses)} addresses were given. Name one for each trainer rank."
        )
    return manifest


# ---- routes of vLLM's server ---------------------------------------------------------------------

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
_Host = Annotated[str, AfterValidator(checked_address)]


class LoadLoRAFromNIXL(BaseModel):
    """The body of ``POST /load_lora_adapter_nixl``.

    Attributes:
        lora_name: by which clients ask for the version, in the field ``model``.
        run_idx: the trainer's run.
        trainer_addresses: host, in numbers, and port of each rank's parameter server.
        lora_alpha: what the trainer's must be; None: whatever it is.
        timeout: seconds until the trainer ranks must have answered.
        weight_version: the trainer's step that is meant; None: the newest.

    """

    model_config = ConfigDict(extra="forbid")

    lora_name: _Name
    run_idx: Annotated[int, Field(ge=0)]
    trainer_addresses: list[tuple[_Host, Annotated[int, Field(ge=1, lt=2**16)]]]
    lora_alpha: float | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] = 30.0
    weight_version: Annotated[int, Field(ge=0)] | None = None


class LoadLoRAFromFiles(BaseModel):
    """The body of ``POST /load_lora_adapter``.

    Attributes:
        lora_name: of the adapter: each directory is the next version of it.
        lora_path: a directory of PEFT, which the server sees.

    """

    model_config = ConfigDict(extra="ignore")

    lora_name: _Name
    lora_path: str


class UnloadLoRA(BaseModel):
    """The body of ``POST /unload_lora_adapter``.

    Attributes:
        lora_name: as it was loaded. If it names the version that is active, the adapter leaves the
            engine with all of its versions; an older version's name is only taken away.
        timeout: seconds that requests which have the adapter are waited for.

    """

    model_config = ConfigDict(extra="ignore")

    lora_name: str
    timeout: Annotated[float, Field(gt=0, le=3600)] = _CALL_S


class _ServedClient(AsyncLLMClient):
    """The engine behind a server of this process, whose clients have the `AdapterTable`."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, table: AdapterTable) -> None:
        super().__init__(engine, _CALL_S, loop=loop)
        self._table = table

    def adapters_in_use(self) -> frozenset[int]:
        """Ids of the adapters that requests have. See `AdapterFrontEnd`."""

        async def used() -> list[int]:
            return self._table.used()

        return frozenset(self._do("tell which adapters are in use", used))

    def adapters_held(self) -> frozenset[int]:
        """None: clients name an adapter by a text. See `AdapterFrontEnd`."""
        return frozenset()

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """Let clients ask for these versions. See `AdapterFrontEnd`."""
        told = rows_of(residents)

        async def offer() -> None:
            self._table.offer(adapter, None if active is None else active.label, told)

        try:
            self._do("offer adapters", offer)
        except ValueError as error:
            raise WeightBridgeUnavailableError(
                f"adapter {adapter!r} cannot be offered: {error}. Or give it another name."
            ) from error

    def lora_request(self, version: Resident) -> str:
        """What clients send as ``model``."""
        return version.label


class _Served:
    """One adapter's versions in the engine, by an executor of its own: none waits for another."""

    def __init__(self, adapter: str, source: str, client: _ServedClient) -> None:
        self.adapter, self.source = adapter, source
        self.lock = threading.Lock()  # of all that is done about it
        self.names = {adapter}  # by which clients were to ask for a version of it
        self.is_empty = True  # no version of it was installed
        self._written: list[Path] = []  # its directories in the cache, the oldest first
        self._ends = ExitStack()
        self.loader: LoRADiskLoader | None = None
        if source == _FILES:
            self.loader = LoRADiskLoader(VLLMEngineAdapter(client), adapter=adapter)
            self.executor = self.loader.executor
        else:
            options = Access.of("127.0.0.1", None, None).nixl
            bridge = make_weight_bridge("nixl", source_worker="vllm-server", **options)
            self._ends.callback(bridge.close)
            adapter_of = VLLMEngineAdapter(client, transports={"nixl": options})
            self.executor = RolloutExecutor(
                weight_bridge=bridge, weight_install_adapter=adapter_of, suspicious="off"
            )
        self._ends.callback(self.executor.close)

    def close(self) -> None:
        """Leave the engine."""
        self._ends.close()

    def write(self, folder: Path, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the version into the cache; of older ones the last stays. Failures are logged."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
            write_peft(folder, spec, tensors)
        except (WeightBridgeError, OSError):  # the version serves all the same
            _LOG.exception("adapter %s was not written to %s", spec.name, folder)
            return
        self._written = [one for one in self._written if one != folder] + [folder]
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)


class PrimeRLRoutes:
    """An endpoint plugin of vLLM: adapters from parameter servers and from files, and their end.

    Its routes exist in development mode alone: whoever reaches them can change what is served.
    """

    name = "rl_bridge_prime_rl"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Know no server yet."""
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models: Any = None
        self._guard = threading.Lock()  # of the table below, never held while something waits
        self._served: dict[str, _Served] = {}  # by the adapter's name

    def attach_router(self, app: Any) -> None:
        """Add the routes, in development mode."""
        if require("vllm.envs").VLLM_SERVER_DEV_MODE:
            app.add_api_route("/load_lora_adapter_nixl", self.load_from_nixl, methods=["POST"])
            app.add_api_route("/load_lora_adapter", self.load_from_files, methods=["POST"])
            app.add_api_route("/unload_lora_adapter", self.unload, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep what the routes need."""
        del args
        self._engine, self._loop = engine_client, asyncio.get_running_loop()
        self._models = state.openai_serving_models

    async def load_from_nixl(self, given: LoadLoRAFromNIXL) -> Any:
        """Install a version of a run, and let clients ask for it by a name."""
        return await self._answered(lambda: self._from_nixl(given))

    async def load_from_files(self, given: LoadLoRAFromFiles) -> Any:
        """Install a directory of PEFT as the next version of an adapter."""
        return await self._answered(lambda: self._from_files(given))

    async def unload(self, given: UnloadLoRA) -> Any:
        """Take an adapter out of the engine, when no request has it any more.

        Where requests keep it for longer than `timeout`, the answer has status 503, no new request
        gets the adapter, and the next unload ends it.
        """
        return await self._answered(lambda: self._unload(given.lora_name, given.timeout))

    async def _answered(self, action: Callable[[], None]) -> Any:
        response = require("fastapi.responses").JSONResponse
        try:
            # In a thread of its own: what waits for requests must not keep others from beginning.
            await asyncio.wrap_future(in_thread(action))
        except (WeightBridgeError, ValueError) as error:
            kinds = (WeightBridgeUnavailableError, SegmentError, DeadlineExceeded)
            body = {"status": "error", "error": f"{type(error).__name__}: {error}"}
            return response(body, status_code=503 if isinstance(error, kinds) else 409)
        return {"status": "ok"}

    def _from_nixl(self, given: LoadLoRAFromNIXL) -> None:
        self._table()  # which says what the server lacks, before a trainer is asked
        manifest = newest_version(
            given.trainer_addresses,
            given.run_idx,
            weight_version=given.weight_version,
            server_name=os.environ.get(SERVER_NAME, "lora_param_server"),
            timeout=given.timeout,
        )
        spec = manifest.adapter
        if spec is None:
            raise IncompatibleUpdate(
                f"run {given.run_idx} holds no adapter. Broadcast the adapter alone."
            )
        _check_alpha(spec, given)
        with self._held(spec.name, f"run {given.run_idx}") as served:
            self._load(served, given.lora_name, spec, manifest)

    @contextmanager
    def _held(self, adapter: str, source: str) -> Iterator[_Served]:
        """An adapter, made where it is missing, to itself; one that stays empty is forgotten.

        A load of this name from elsewhere is refused, and not waited for: it is another adapter.
        """
        while True:
            with self._guard:
                if adapter not in self._served:
                    client = _ServedClient(self._engine, self._running(), self._table())
                    self._served[adapter] = _Served(adapter, source, client)
                served = self._served[adapter]
            if served.source != source:
                raise IncompatibleUpdate(
                    f"adapter {adapter!r} comes from {served.source} already, expected {source}. "
                    "Unload it, or give one of both another name."
                )
            with served.lock:
                if self._served.get(adapter) is not served:
                    continue  # whoever had it before forgot it
                try:
                    yield served
                except BaseException:
                    # (One that is not offered may be in the engine: an unload did not end.)
                    if served.is_empty:
                        self._forget(served)
                    raise
                return

    def _forget(self, served: _Served) -> None:
        with self._guard:
            if self._served.get(served.adapter) is served:
                del self._served[served.adapter]
        served.close()

    def _load(
        self, served: _Served, lora_name: str, spec: AdapterSpec, manifest: WeightUpdateManifest
    ) -> None:
        table = self._table()
        self._on_loop(lambda: table.check_alias(lora_name, spec.name))
        path = Resident(spec.name, manifest.weight_version, manifest.update_id).path
        label, active = self._on_loop(lambda: (table.label_at(path), table.path_of(spec.name)))
        tensors = None
        # An older version that is still there gets another name; the adapter's own is the active's.
        if label is None or (lora_name == spec.name and active != path):
            # (Which offers it again, where an unload did not end and the engine has it still.)
            tensors = served.executor.update_weights(manifest)
            served.is_empty = False
            label = self._on_loop(lambda: table.label_at(path))
        self._on_loop(lambda: table.alias(lora_name, spec.name, str(label)))
        with self._guard:
            for other in self._served.values():
                other.names.discard(lora_name)  # a name is one adapter's
            served.names.add(lora_name)
        if tensors is not None and (home := os.environ.get(CACHE_DIR)):
            served.write(Path(home) / lora_name, spec, tensors)

    def _from_files(self, given: LoadLoRAFromFiles) -> None:
        request = {"names": [LORA_DISK_LOAD], "extras": [{"lora_disk_path": given.lora_path}]}
        with self._held(given.lora_name, _FILES) as served:
            assert served.loader is not None  # of files
            served.loader.load(request)
            served.is_empty = False

    def _unload(self, lora_name: str, timeout_s: float) -> None:
        table = self._table()
        with self._guard:
            served = {name: one for one in self._served.values() for name in one.names}
        if lora_name not in served:
            raise UnknownUpdate(
                f"{lora_name!r} was not loaded here, expected one of {sorted(served)}. Name one "
                "of them."
            )
        found = served[lora_name]
        adapter = found.adapter

        def is_whole() -> bool:
            """Whether the adapter is to go; an older version's name is taken away here."""
            # (Where nothing is offered, an earlier unload did not come to its end.)
            if lora_name == adapter or adapter not in table:
                return True
            return lora_name in table and table.unalias(lora_name) is not None

        with found.lock:
            if not self._on_loop(is_whole):
                with self._guard:
                    found.names.discard(lora_name)
                return
            found.executor.drop_adapter(adapter, timeout_s=timeout_s)
            self._forget(found)

    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None  # as the server runs
        return self._loop

    def _table(self) -> AdapterTable:
        table = self._models.lora_requests
        if not isinstance(table, AdapterTable):
            raise WeightBridgeUnavailableError(
                "the server does not count which requests have an adapter. Start it with "
                "VLLM_PLUGINS=rl_bridge,rl_bridge_prime_rl, and one process that takes requests."
            )
        return table

    def _on_loop(self, action: Callable[[], Any]) -> Any:
        """Do something with the table, which the server's event loop reads."""

        async def run() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._running()).result(timeout=_CALL_S)


def _check_alpha(spec: AdapterSpec, given: LoadLoRAFromNIXL) -> None:
    alpha = spec.config.get("lora_alpha")
    if given.lora_alpha is not None and alpha != given.lora_alpha:
        raise IncompatibleUpdate(
            f"adapter {spec.name!r} was published with lora_alpha {alpha}, and {given.lora_alpha} "
            "was asked for. Give the trainer and the orchestrator the same model.lora.alpha."
        )


# ---- the orchestrator's pool ---------------------------------------------------------------------


def trainer_addresses(weight_dir: str | Path) -> tuple[int, list[Address], int | None]:
    """Run, parameter servers and version that a directory marks; prime-rl's own names no version.

    The trainer's list of all hosts is taken; without one, all ranks are on the host that
    ``nixl_info.json`` names.

    Raises:
        MalformedManifest: the files are not there, or no such files.

    """
    folder = Path(weight_dir)
    try:
        info = json.loads((folder / NIXL_INFO).read_text(encoding="utf-8"))
        host, port, world = str(info["host"]), int(info["base_port"]), int(info["world_size"])
        addresses = [(host, port + rank) for rank in range(world)]
        if (folder / ENDPOINTS).exists():
            told = json.loads((folder / ENDPOINTS).read_text(encoding="utf-8"))
            addresses = [(str(at), int(port)) for at, port in told]
        version = info.get("weight_version")
        return int(info["run_idx"]), addresses, None if version is None else int(version)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MalformedManifest(
            f"{folder} does not name the trainer's parameter servers ({type(error).__name__}: "
            f"{error}). Name a directory that has {STABLE}."
        ) from error


def _manifest_in(folder: Path) -> str:
    try:
        return (folder / MANIFEST).read_text(encoding="utf-8")
    except OSError as error:
        raise MalformedManifest(
            f"{folder / MANIFEST} cannot be read ({error.strerror}): expected whole weights of "
            "this library's trainer. Give trainer and orchestrator the same weight_broadcast, or "
            "name the adapter (lora_name)."
        ) from error


class StaticInferencePool:
    """All inference servers of a run, which get each version.

    Whole weights are brought by executors in this process. Over ``nccl`` it joins the broadcast:
    with the backend ``nccl`` it needs a GPU. The servers are started in development mode.
    """

    def __init__(
        self,
        clients: Sequence[Any] = (),
        admin_clients: Sequence[Any] = (),
        *,
        weight_broadcast_config: WeightBroadcastConfig,
        lora_alpha: float | None = None,
    ) -> None:
        """Configure; nothing is sent.

        Args:
            clients: for requests; kept for the caller.
            admin_clients: one `httpx.AsyncClient` for each server, with its ``base_url``.
            weight_broadcast_config: how versions travel.
            lora_alpha: what the trainer's must be.

        """
        self.clients, self.admin_clients = list(clients), list(admin_clients)
        self._config, self._lora_alpha = weight_broadcast_config, lora_alpha
        self._executors: dict[str, RolloutExecutor] = {}
        self._ends = ExitStack()

    async def update_weights(
        self, weight_dir: Path | str | None, lora_name: str | None = None, step: int = 0
    ) -> None:
        """Bring the version that a directory marks to all servers.

        A server that refuses it keeps what it had; others go on with the version. One that does
        not answer may have it.

        Args:
            weight_dir: with the marker ``STABLE``; in stages, of the step that is waited for.
            lora_name: by which clients ask for an adapter's version; None: whole weights.
            step: for messages.

        Raises:
            MalformedManifest: the directory marks no version.
            ValueError: over ``nixl``, an adapter without a name.
            DeadlineExceeded: in stages, the trainer did not offer or finish it in time.
            WeightBridgeUnavailableError: servers refused it; the message names them.

        """
        folder, config = Path(weight_dir or "."), self._config
        if lora_name is None and isinstance(config, NIXLWeightBroadcastConfig):
            raise ValueError("lora_name=None: expected the name by which clients ask. Pass it.")
        is_staged = (
            isinstance(config, FileSystemWeightBroadcastConfig) and config.handshake == "stages"
        )
        if is_staged and weight_dir is not None:
            with StepReceiver(folder, timeout_s=config.timeout) as receiver:
                # In this task, and not in a thread: one that is cancelled answers no offer.
                while not receiver.look():  # noqa: ASYNC110 - a file system has no events
                    await asyncio.sleep(LOOK_S)
        elif weight_dir is None or not (folder / STABLE).exists():
            raise MalformedManifest(
                f"step {step}: {weight_dir} marks no version: {STABLE} is missing. Wait for it."
            )
        tasks: list[Any]
        match config:
            case NIXLWeightBroadcastConfig():
                run_idx, addresses, version = trainer_addresses(folder)
                body = {
                    "lora_name": lora_name,
                    "run_idx": run_idx,
                    "trainer_addresses": addresses,
                    "lora_alpha": self._lora_alpha,
                    "timeout": config.timeout,
                    "weight_version": version,
                }
                path, within_s = "load_lora_adapter_nixl", config.timeout + _INSTALL_S
                tasks = [self._post(one, path, body, within_s) for one in self.admin_clients]
            case FileSystemWeightBroadcastConfig() if lora_name is not None:
                body = {"lora_name": lora_name, "lora_path": str(folder)}
                path = "load_lora_adapter"
                tasks = [self._post(one, path, body, _INSTALL_S) for one in self.admin_clients]
            case _:  # whole weights
                text = _manifest_in(folder)
                urls = [str(one.base_url) for one in self.admin_clients]
                tasks = [asyncio.to_thread(self._install, url, folder, text) for url in urls]
        failed = [one for one in await asyncio.gather(*tasks) if one]
        if failed:
            raise WeightBridgeUnavailableError(
                f"step {step}: {len(failed)} of {len(tasks)} servers did not take it: "
                f"{'; '.join(failed)}. Mend that, and update again."
            )

    def close(self) -> None:
        """Leave the servers, which go on with what they have."""
        self._executors.clear()
        self._ends.close()

    async def _post(self, client: Any, path: str, body: Mapping[str, Any], within_s: float) -> str:
        """Ask one server; returns why it refused, or nothing."""
        try:
            reply = await client.post(f"/{path}", json=dict(body), timeout=within_s)
        except Exception as error:  # noqa: BLE001 - of any client; the message names it
            return f"{client.base_url} did not answer ({type(error).__name__}: {error})"
        return "" if reply.is_success else f"{client.base_url}: {reply.status_code}: {reply.text}"

    def _install(self, url: str, folder: Path, manifest: str) -> str:
        """Install a model's weights in one server; returns why it refused, or nothing."""
        config, transport = self._config, "files"
        options: dict[str, Any] = {"url": str(folder.parent.absolute())}
        if isinstance(config, NCCLWeightBroadcastConfig):
            transport = "broadcast"
            options = {
                "backend": config.backend,
                "timeout_s": config.timeout,
                **tls_options(tls_for(None)),
            }
        try:
            if url not in self._executors:
                bridge = make_weight_bridge(transport, source_worker="pool", **options)
                # (From an orchestrator that died: there is one at a time.)
                adapter = VLLMEngineAdapter(url, transports={transport: options}, take_over=True)
                self._executors[url] = executor = RolloutExecutor(
                    weight_bridge=bridge, weight_install_adapter=adapter, suspicious="off"
                )
                self._ends.callback(bridge.close)
                self._ends.callback(executor.close)
            self._executors[url].update_weights(manifest)
        except WeightBridgeError as error:
            return f"{url}: {type(error).__name__}: {error}"
        return ""
