"""prime-rl's inference side: readers of parameter servers, the server's routes, and the pool.

    VLLM_PLUGINS=rl_bridge,rl_bridge_prime_rl vllm serve MODEL --enable-lora --max-loras 3

gives vLLM's server the route ``POST /load_lora_adapter_nixl`` (`PrimeRLRoutes`). It asks the
trainer's parameter servers for a run's newest version, and installs it as a version of an adapter:
each engine rank reads the shards of all trainer ranks, all ranks have it or none, what they compute
with is read back, and a failure leaves the version before. No file is written, and nothing waits.
"""

import asyncio
import http.client
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field

from rl_bridge.bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.compat.prime_rl.config import (
    FileSystemWeightBroadcastConfig,
    NCCLWeightBroadcastConfig,
    NIXLWeightBroadcastConfig,
    WeightBroadcastConfig,
)
from rl_bridge.compat.prime_rl.trainer import (
    ENDPOINTS,
    MANIFEST,
    NAME_HEADER,
    NIXL_INFO,
    STABLE,
    checked_token,
    key_of,
    run_of,
)
from rl_bridge.compat.skyrl import LORA_DISK_LOAD, LoRADiskLoader
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.vllm.client import AsyncLLMClient
from rl_bridge.engines.vllm.endpoint import AdapterTable
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import (
    IncompatibleUpdate,
    MalformedManifest,
    TransferTimeout,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupManifest, slices
from rl_bridge.manifest import AdapterSpec, WeightUpdateManifest
from rl_bridge.trainers import write_peft

__all__ = [
    "LoadLoRAFromFiles",
    "LoadLoRAFromNIXL",
    "ParameterClient",
    "PrimeRLRoutes",
    "StaticInferencePool",
    "newest_version",
    "trainer_addresses",
]

CACHE_DIR = "NIXL_LORA_CACHE_DIR"
"""Environment variable: a directory where each installed adapter is written, too."""
SERVER_NAME = "NIXL_LORA_SERVER_NAME"
"""Environment variable: the trainer's ``server_name``, if it is not prime-rl's default."""

Address = tuple[str, int]
_MAX_ANSWER_NBYTES = 1 << 28


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
    ) -> None:
        """Configure; nothing is sent.

        Args:
            server_name: ``{server_name}_{rank}``.
            server_ip: the parameter server's address.
            server_port: ``port + rank``.
            token: see `ParameterServer`.
            timeout: seconds that each answer may take.

        Raises:
            ValueError: another machine's address without a token.

        """
        self.server_name, self.server_ip, self.server_port = server_name, server_ip, server_port
        self._token, self._timeout_s = checked_token(token, server_ip), timeout
        self._rank = 0
        self._manifests: dict[int, WeightUpdateManifest] = {}
        self._read: dict[int, tuple[str, TensorBridge, Mapping[str, torch.Tensor]]] = {}

    def refresh_catalog(self) -> None:
        """Ask for the newest versions.

        Raises:
            WeightBridgeUnavailableError: nobody answers there, or with another name or token.
            TransferTimeout: not in time.
            MalformedManifest: the answer is none.

        """
        catalog = self._ask("/catalog")
        try:
            self._rank = int(catalog["rank"])
            told = {int(at): str(run["update_id"]) for at, run in catalog["runs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._strange(error) from error
        known = self._manifests
        self._manifests = {
            at: known[at]
            if at in known and known[at].update_id == update_id
            else WeightUpdateManifest.of(
                str(self._ask(f"/runs/{at}").get("manifest")), caller="get"
            )
            for at, update_id in told.items()
        }

    def manifest(self, run_idx: int) -> WeightUpdateManifest:
        """The newest version of a run, as of the last `refresh_catalog`.

        Raises:
            UnknownUpdate: there is none.

        """
        found = self._manifests.get(run_idx)
        if found is None:
            msg = (
                f"parameter server {self.server_name!r} has no version of run {run_idx}, expected "
                f"one of {sorted(self._manifests)}. Ask when the trainer has broadcast it."
            )
            raise UnknownUpdate(msg)
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
                msg = (
                    f"parameter server {self.server_name!r} holds nothing of {key!r}. Ask for one "
                    "of keys(), or another trainer rank."
                )
                raise UnknownUpdate(msg)
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
                    msg = (
                        f"{name!r}: trainer rank {self._rank} holds a range of its elements, and "
                        "no part that has a shape: expected FSDP2. Import manifest() as a whole."
                    )
                    raise IncompatibleUpdate(msg)
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
            "nixl", source_worker="reader", wanted=wanted, timeout_s=self._timeout_s
        )
        try:
            tensors = bridge.import_update(manifest)
        except BaseException:
            bridge.close()
            raise
        self._read[run_idx] = manifest.update_id, bridge, tensors
        return tensors

    def _ask(self, path: str) -> dict[str, Any]:
        where = f"parameter server {self.server_name!r} at {self.server_ip}:{self.server_port}"
        connection = http.client.HTTPConnection(
            self.server_ip, self.server_port, timeout=self._timeout_s
        )
        headers = {NAME_HEADER: self.server_name, "Authorization": f"Bearer {self._token}"}
        try:
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            text = reply.read(_MAX_ANSWER_NBYTES)
        except TimeoutError as error:
            msg = f"{where} did not answer within {self._timeout_s:g} s. See that trainer rank."
            raise TransferTimeout(msg) from error
        except (OSError, http.client.HTTPException) as error:
            msg = (
                f"{where} cannot be reached ({type(error).__name__}: {error}). Check that this "
                "trainer rank runs, and its address."
            )
            raise WeightBridgeUnavailableError(msg) from error
        finally:
            connection.close()
        said = reply.getheader(NAME_HEADER)
        if reply.status == http.client.OK and said != self.server_name:
            msg = f"{where} calls itself {said!r}. Give both sides the same server_name."
            raise WeightBridgeUnavailableError(msg)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise self._strange(error) from error
        if not isinstance(answer, dict):
            raise self._strange(TypeError(f"a {type(answer).__name__}"))
        if reply.status != http.client.OK:
            kind = UnknownUpdate if reply.status == http.client.NOT_FOUND else None
            msg = f"{where} refuses: {answer.get('error')} (status {reply.status})."
            raise (kind or WeightBridgeUnavailableError)(msg)
        return answer

    def _strange(self, error: Exception) -> MalformedManifest:
        return MalformedManifest(
            f"what answers at {self.server_ip}:{self.server_port} is no parameter server "
            f"({type(error).__name__}: {error}). Check the address, and use one release on both "
            "sides."
        )


def newest_version(
    addresses: Sequence[Address],
    run_idx: int,
    *,
    server_name: str = "lora_param_server",
    token: str | None = None,
    timeout: float = 30.0,
) -> WeightUpdateManifest:
    """Ask all trainer ranks, and return the newest version of a run.

    Args:
        addresses: of the parameter servers, by rank.
        run_idx: the run.
        server_name: of the parameter servers, without the rank; each one is asked whether it is
            the one of its rank.
        token: see `ParameterServer`.
        timeout: seconds that all of it may take.

    Raises:
        WeightBridgeUnavailableError: a trainer rank does not answer, or is another one.
        TransferTimeout: not in time.
        UnknownUpdate: there is no version of the run.
        IncompatibleUpdate: more or fewer ranks published it.

    """
    until = time.monotonic() + timeout
    clients = []
    for rank, (host, port) in enumerate(addresses):
        left = max(until - time.monotonic(), 1e-3)
        client = ParameterClient(f"{server_name}_{rank}", host, port, token=token, timeout=left)
        client.refresh_catalog()
        clients.append(client)
    if not clients:
        msg = f"run {run_idx}: no trainer address was given. Name one for each trainer rank."
        raise UnknownUpdate(msg)
    manifest = clients[0].manifest(run_idx)
    ranks = manifest.world_size if isinstance(manifest, GroupManifest) else 1
    if ranks != len(addresses):
        msg = (
            f"version {manifest.weight_version} of run {run_idx} was published by {ranks} ranks, "
            f"and {len(addresses)} addresses were given. Name one for each trainer rank."
        )
        raise IncompatibleUpdate(msg)
    return manifest


# ---- routes of vLLM's server ---------------------------------------------------------------------

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]


class LoadLoRAFromNIXL(BaseModel):
    """The body of ``POST /load_lora_adapter_nixl``.

    Attributes:
        lora_name: by which clients ask for the version, in the field ``model``.
        run_idx: the trainer's run.
        trainer_addresses: host and port of each rank's parameter server.
        lora_alpha: what the trainer's must be; None: whatever it is.
        timeout: seconds until the trainer ranks must have answered.

    """

    model_config = ConfigDict(extra="forbid")

    lora_name: _Name
    run_idx: int
    trainer_addresses: list[Address]
    lora_alpha: float | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] = 30.0


class LoadLoRAFromFiles(BaseModel):
    """The body of ``POST /load_lora_adapter``.

    Attributes:
        lora_name: of the adapter: each directory is the next version of it.
        lora_path: a directory of PEFT, which the server sees.

    """

    model_config = ConfigDict(extra="ignore")

    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
    lora_path: str


class UnloadLoRA(BaseModel):
    """The body of ``POST /unload_lora_adapter``.

    Attributes:
        lora_name: as it was loaded; its adapter leaves the engine with all versions.

    """

    model_config = ConfigDict(extra="ignore")

    lora_name: str


class _ServedClient(AsyncLLMClient):
    """The engine behind a server of this process, whose clients have the `AdapterTable`."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, table: AdapterTable) -> None:
        super().__init__(engine, loop=loop)
        self._table = table

    def adapters_in_use(self) -> frozenset[int]:
        """Ids of the adapters that requests have. See `AdapterFrontEnd`."""

        async def used() -> list[int]:
            return self._table.used()

        return frozenset(self._do("tell which adapters are in use", used))

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """Let clients ask for these versions. See `AdapterFrontEnd`."""
        told = [{"label": one.label, "number": one.number, "path": one.path} for one in residents]

        async def offer() -> None:
            self._table.offer(adapter, None if active is None else active.label, told)

        try:
            self._do("offer adapters", offer)
        except ValueError as error:
            msg = f"adapter {adapter!r} cannot be offered: {error}. Or give it another name."
            raise WeightBridgeUnavailableError(msg) from error

    def lora_request(self, version: Resident) -> str:
        """What clients send as ``model``."""
        return version.label


class PrimeRLRoutes:
    """An endpoint plugin of vLLM: adapters from parameter servers and from files, and their end."""

    name = "rl_bridge_prime_rl"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Know no server yet."""
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models: Any = None
        self._lock = threading.Lock()
        self._executor: RolloutExecutor | None = None
        self._loaders: dict[str, LoRADiskLoader] = {}
        self._installed: dict[str, str] = {}  # adapter -> its newest update
        self._names: dict[str, str] = {}  # what clients ask by -> adapter

    def attach_router(self, app: Any) -> None:
        """Add the routes."""
        app.add_api_route("/load_lora_adapter_nixl", self.load_from_nixl, methods=["POST"])
        app.add_api_route("/load_lora_adapter", self.load_from_files, methods=["POST"])
        app.add_api_route("/unload_lora_adapter", self.unload, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep what the routes need."""
        del args
        self._engine, self._loop = engine_client, asyncio.get_running_loop()
        self._models = state.openai_serving_models

    async def load_from_nixl(self, given: LoadLoRAFromNIXL) -> Any:
        """Install the newest version of a run, and let clients ask for it by a name."""
        return await self._answered(lambda: self._from_nixl(given))

    async def load_from_files(self, given: LoadLoRAFromFiles) -> Any:
        """Install a directory of PEFT as the next version of an adapter."""
        return await self._answered(lambda: self._from_files(given))

    async def unload(self, given: UnloadLoRA) -> Any:
        """Take an adapter out of the engine, when no request has it any more."""
        return await self._answered(lambda: self._unload(given.lora_name))

    async def _answered(self, action: Any) -> Any:
        from fastapi.responses import JSONResponse

        def turn() -> None:
            with self._lock:
                action()

        try:
            await asyncio.to_thread(turn)
        except (WeightBridgeError, ValueError) as error:
            is_gone = isinstance(error, WeightBridgeUnavailableError | TransferTimeout)
            body = {"status": "error", "error": f"{type(error).__name__}: {error}"}
            return JSONResponse(body, status_code=503 if is_gone else 409)
        return {"status": "ok"}

    def _from_nixl(self, given: LoadLoRAFromNIXL) -> None:
        table = self._table()
        manifest = newest_version(
            given.trainer_addresses,
            given.run_idx,
            server_name=os.environ.get(SERVER_NAME, "lora_param_server"),
            timeout=given.timeout,
        )
        spec = manifest.adapter
        if spec is None:
            msg = f"run {given.run_idx} holds no adapter. Broadcast the adapter alone."
            raise IncompatibleUpdate(msg)
        _check_alpha(spec, given)
        self._on_loop(lambda: table.check_alias(given.lora_name, spec.name))
        if self._executor is None:
            adapter = VLLMEngineAdapter(_ServedClient(self._engine, self._running(), table))
            self._executor = RolloutExecutor(
                weight_transport="nixl", weight_install_adapter=adapter, suspicious="off"
            )
        if self._installed.get(spec.name) != manifest.update_id:  # else it is asked for once more
            tensors = self._executor.update_weights(manifest)
            self._installed[spec.name] = manifest.update_id
            if folder := os.environ.get(CACHE_DIR):
                _write_anew(Path(folder) / given.lora_name, spec, tensors)
        self._on_loop(lambda: table.alias(given.lora_name, spec.name))
        self._names[given.lora_name] = spec.name

    def _from_files(self, given: LoadLoRAFromFiles) -> None:
        loader = self._loaders.get(given.lora_name)
        if loader is None:
            client = _ServedClient(self._engine, self._running(), self._table())
            loader = LoRADiskLoader(VLLMEngineAdapter(client), adapter=given.lora_name)
            self._loaders[given.lora_name] = loader
        loader.load({"names": [LORA_DISK_LOAD], "extras": [{"lora_disk_path": given.lora_path}]})

    def _unload(self, lora_name: str) -> None:
        if lora_name in self._loaders:
            loader = self._loaders[lora_name]
            loader.executor.drop_adapter(lora_name)
            del self._loaders[lora_name]
            loader.close()
        elif lora_name in self._names and self._executor is not None:
            adapter = self._names[lora_name]
            self._executor.drop_adapter(adapter)
            self._installed.pop(adapter, None)
            self._names = {name: one for name, one in self._names.items() if one != adapter}
        else:
            known = sorted({*self._loaders, *self._names})
            msg = f"{lora_name!r} was not loaded here, expected one of {known}. Name one of them."
            raise UnknownUpdate(msg)

    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None  # as the server runs
        return self._loop

    def _table(self) -> AdapterTable:
        table = self._models.lora_requests
        if not isinstance(table, AdapterTable):
            msg = (
                "the server does not count which requests have an adapter. Start it with "
                "VLLM_PLUGINS=rl_bridge,rl_bridge_prime_rl, and one process that takes requests."
            )
            raise WeightBridgeUnavailableError(msg)
        return table

    def _on_loop(self, action: Any) -> None:
        """Do something with the table, which the server's event loop reads."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001 - raised where the future is read
                done.set_exception(error)

        self._running().call_soon_threadsafe(run)
        done.result(timeout=60.0)


def _check_alpha(spec: AdapterSpec, given: LoadLoRAFromNIXL) -> None:
    alpha = spec.config.get("lora_alpha")
    if given.lora_alpha is not None and alpha != given.lora_alpha:
        msg = (
            f"adapter {spec.name!r} was published with lora_alpha {alpha}, and {given.lora_alpha} "
            "was asked for. Give the trainer and the orchestrator the same model.lora.alpha."
        )
        raise IncompatibleUpdate(msg)


def _write_anew(folder: Path, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter's directory, in place of the one of that name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        msg = f"{folder} cannot be written: {error.strerror}. Name another {CACHE_DIR}."
        raise WeightBridgeUnavailableError(msg) from error
    write_peft(folder, spec, tensors)


# ---- the orchestrator's pool ---------------------------------------------------------------------


def trainer_addresses(weight_dir: str | Path) -> tuple[int, list[Address]]:
    """Run and parameter servers of the version that a directory marks.

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
        return int(info["run_idx"]), addresses
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = (
            f"{folder} does not name the trainer's parameter servers ({type(error).__name__}: "
            f"{error}). Name a directory that has {STABLE}."
        )
        raise MalformedManifest(msg) from error


class StaticInferencePool:
    """All inference servers of a run, which get each version."""

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

    async def update_weights(
        self, weight_dir: Path | str | None, lora_name: str | None = None, step: int = 0
    ) -> None:
        """Bring the version that a directory marks to all servers.

        Each server has it or keeps what it had. Servers that have it go on with it, also if
        others refused it.

        Args:
            weight_dir: with the marker ``STABLE``.
            lora_name: by which clients ask for an adapter's version.
            step: for messages.

        Raises:
            MalformedManifest: the directory marks no version.
            WeightBridgeUnavailableError: servers refused it; the message names them.

        """
        folder = Path(weight_dir or ".")
        if weight_dir is None or not (folder / STABLE).exists():
            msg = f"step {step}: {weight_dir} marks no version: {STABLE} is missing. Wait for it."
            raise MalformedManifest(msg)
        match self._config:
            case NIXLWeightBroadcastConfig(timeout=timeout):
                run_idx, addresses = trainer_addresses(folder)
                body = {
                    "lora_name": lora_name,
                    "run_idx": run_idx,
                    "trainer_addresses": addresses,
                    "lora_alpha": self._lora_alpha,
                    "timeout": timeout,
                }
                tasks = [
                    self._post(one, "load_lora_adapter_nixl", body) for one in self.admin_clients
                ]
            case FileSystemWeightBroadcastConfig():
                body = {"lora_name": lora_name, "lora_path": str(folder)}
                tasks = [self._post(one, "load_lora_adapter", body) for one in self.admin_clients]
            case NCCLWeightBroadcastConfig():
                text = (folder / MANIFEST).read_text(encoding="utf-8")
                tasks = [
                    asyncio.to_thread(self._install, str(one.base_url), text)
                    for one in self.admin_clients
                ]
        failed = [one for one in await asyncio.gather(*tasks) if one]
        if failed:
            msg = (
                f"step {step}: {len(failed)} of {len(tasks)} servers keep what they had: "
                f"{'; '.join(failed)}. Mend that, and update again."
            )
            raise WeightBridgeUnavailableError(msg)

    def close(self) -> None:
        """Leave the servers, which go on with what they have."""
        while self._executors:
            self._executors.popitem()[1].close()

    async def _post(self, client: Any, path: str, body: Mapping[str, Any]) -> str:
        """Ask one server; returns why it refused, or nothing."""
        try:
            reply = await client.post(f"/{path}", json=dict(body))
        except Exception as error:  # noqa: BLE001 - of any client; the message names it
            return f"{client.base_url}: {type(error).__name__}: {error}"
        return "" if reply.is_success else f"{client.base_url}: {reply.status_code}: {reply.text}"

    def _install(self, url: str, manifest: str) -> str:
        """Install a model's weights in one server; returns why it refused, or nothing."""
        try:
            if url not in self._executors:
                self._executors[url] = RolloutExecutor(
                    weight_transport="broadcast",
                    weight_install_adapter=VLLMEngineAdapter(url),
                    suspicious="off",
                )
            self._executors[url].update_weights(manifest)
        except WeightBridgeError as error:
            return f"{url}: {type(error).__name__}: {error}"
        return ""
