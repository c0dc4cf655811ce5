"""prime-rl's trainer side: a parameter server for each rank, and broadcasts of three types.

A `ParameterServer` keeps the tensors of several runs under the keys ``lora:{run_idx}:{peft_key}``.
prime-rl's readers read tensors while the optimizer may write to them; here they read versions.
`ParameterServer.publish` seals what a run's tensors hold as a version of the transport ``nixl``,
all ranks together, and from then on the server names that version to whoever asks. Each run has a
bridge of its own, so that a run that begins or ends touches no other.

The server itself answers two questions by HTTP at ``port + rank``: which runs there are
(``/catalog``), and the manifest of a run's newest version (``/runs/{run_idx}``). Every reader of a
manifest can read the weights, so both sides know a token, unless all of it stays on this machine.
"""

import hmac
import json
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from rl_bridge.bridge import TensorBridge, make_weight_bridge
from rl_bridge.compat.prime_rl.config import (
    FileSystemWeightBroadcastConfig,
    LoRAConfig,
    NCCLWeightBroadcastConfig,
    NIXLWeightBroadcastConfig,
    WeightBroadcastConfig,
)
from rl_bridge.errors import (
    IncompatibleUpdate,
    TransportUnavailable,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupExchange, GroupPublisher, Placement, ProcessGroupExchange
from rl_bridge.manifest import AdapterSpec, WeightUpdateManifest
from rl_bridge.trainers import (
    FSDPWeightExtractor,
    StateDictExtractor,
    WeightExtractor,
    write_peft,
)
from rl_bridge.trainers.chunks import whole_copies, wire_name
from rl_bridge.trainers.meshes import MeshView, is_dtensor, largest_mesh, local_of

__all__ = [
    "FileSystemWeightBroadcast",
    "NCCLWeightBroadcast",
    "NIXLWeightBroadcast",
    "ParameterServer",
    "WeightBroadcast",
    "setup_weight_broadcast",
]

TOKEN = "RL_BRIDGE_PRIME_RL_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable of the token that parameter servers and their readers share."""
NAME_HEADER = "X-Server-Name"
"""Header by which each side says the parameter server's name."""
LOOPBACK = frozenset({"127.0.0.1", "::1"})

STABLE, NIXL_INFO, ENDPOINTS = "STABLE", "nixl_info.json", "nixl_endpoints.json"
MANIFEST = "manifest.json"
_KEPT = 2  # an engine may be reading the one before
_CALL_S = 30.0

Exchanges = Callable[[str], GroupExchange]
"""Makes a rank's way to the other ranks, for a group of that name."""


def key_of(run_idx: int, name: str) -> str:
    """The key of a run's tensor."""
    return f"lora:{run_idx}:{name}"


def run_of(key: str) -> tuple[int, str]:
    """Run and name of a key.

    Raises:
        ValueError: it is none.

    """
    kind, _, rest = key.partition(":")
    number, _, name = rest.partition(":")
    if kind != "lora" or not number.isdecimal() or not name:
        raise ValueError(f"key {key!r}: expected lora:RUN_IDX:PEFT_KEY, such as lora:0:NAME.")
    return int(number), name


def checked_token(token: str | None, host: str) -> str:
    """The token that was given, or the environment's; empty if all of it stays on this machine.

    Raises:
        ValueError: there is none, and `host` is another machine's or reached by others.

    """
    found = os.environ.get(TOKEN, "") if token is None else token
    if not found and host not in LOOPBACK:
        raise ValueError(
            f"host={host!r}: whoever reaches it could read the weights, expected a token. Set "
            f"{TOKEN} to the same secret on the trainer's and the inference's side."
        )
    return found


# ---- the parameter server ------------------------------------------------------------------------


class _Run:
    """One run's tensors, and its stream of versions."""

    def __init__(self, bridge: TensorBridge, group: GroupPublisher | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.newest: WeightUpdateManifest | None = None
        self._bridge, self._group = bridge, group
        self._kept: list[WeightUpdateManifest] = []

    def publish(
        self, source: WeightExtractor | None, version: int, adapter: AdapterSpec | None
    ) -> WeightUpdateManifest:
        if self._group is None:
            given = self.tensors if source is None else source
            made = self._bridge.publish(given, weight_version=version, adapter=adapter)
        elif source is None:
            parts, placements = _placed(self.tensors)
            made = self._group.publish(parts, placements, weight_version=version, adapter=adapter)
        else:
            made = self._group.publish(source, weight_version=version, adapter=adapter)
        self._kept.append(made)
        while len(self._kept) > _KEPT:
            self._release(self._kept.pop(0))
        self.newest = made
        return made

    def _release(self, manifest: WeightUpdateManifest) -> None:
        if self._group is None:
            self._bridge.release(manifest.update_id)
        else:
            self._group.release(manifest.update_id)

    def close(self) -> None:
        self._bridge.close()


def _placed(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
    """What this rank holds of each tensor, and where that lies in the whole; others are copies."""
    view = MeshView(largest_mesh(tensors.values()))
    parts: dict[str, torch.Tensor] = {}
    placements: dict[str, Placement] = {}
    for name, tensor in tensors.items():
        part, piece = tensor.detach(), view.whole(name, tuple(tensor.shape))
        if is_dtensor(tensor):
            cut = view.shard(name, tensor)  # type: ignore[arg-type]  # just asked
            found = cut.piece(name, tuple(tensor.shape))
            if found is None:  # this rank holds nothing of it
                continue
            part, piece = local_of(tensor).detach(), found
        parts[name] = part
        placements[name] = Placement(
            dtype=wire_name(part.dtype), shape=tuple(part.shape), pieces=(piece,)
        )
    return parts, placements


class ParameterServer:
    """One trainer rank's server: keeps tensors by reference, and versions of what they held.

    Attributes:
        server_name: of this rank, ``{server_name}_{rank}``.
        host: where it listens.
        port: of this rank.

    """

    def __init__(
        self,
        server_name: str = "lora_param_server",
        port: int = 6000,
        *,
        rank: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        exchange: Exchanges | None = None,
        timeout: float = 30.0,
        **options: object,
    ) -> None:
        """Listen; nothing is answered before `run`.

        Args:
            server_name: of all ranks.
            port: of rank 0; this rank adds its own to it.
            rank: this trainer rank.
            host: this rank's address, in numbers.
            token: a secret that readers know too; None takes that of the environment variable
                ``RL_BRIDGE_PRIME_RL_TOKEN``. Only 127.0.0.1 may go without.
            exchange: makes the way to the other ranks for each run; None: this rank has all.
            timeout: seconds that each step may wait for another side.
            options: of the transport ``nixl``, such as ``max_slots``.

        Raises:
            ValueError: another host without a token.
            TransportUnavailable: the port is taken, or the address is not this machine's.

        """
        self.server_name, self.host, self.port = f"{server_name}_{rank}", host, port + rank
        self._base, self._rank, self._exchange, self._timeout_s = (
            server_name,
            rank,
            exchange,
            timeout,
        )
        self._options = options
        self._token = checked_token(token, host)
        self._runs: dict[int, _Run] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        try:
            self._http = _Catalog((host, self.port), self)
        except OSError as error:
            raise TransportUnavailable(
                "nixl",
                f"nothing can listen at {host} port {self.port}: {error}",
                "Choose an address of this machine, and a port that is free on it.",
            ) from error

    # ---- tensors --------------------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a tensor by reference, also one that is there already.

        Args:
            key: ``lora:{run_idx}:{peft_key}``.
            tensor: a DTensor if the ranks hold shards of it; any other one is whole.

        Raises:
            ValueError: no such key.

        """
        run_idx, name = run_of(key)
        with self._lock:
            self._run(run_idx).tensors[name] = tensor

    def remove(self, key: str) -> None:
        """Forget a tensor; unknown keys are ignored. A run without tensors has ended.

        Raises:
            ValueError: no such key.

        """
        run_idx, name = run_of(key)
        with self._lock:
            run = self._runs.get(run_idx)
            if run is not None and run.tensors.pop(name, None) is not None and not run.tensors:
                self.end_run(run_idx)

    def keys(self) -> list[str]:
        """Keys of all tensors that are kept."""
        with self._lock:
            return [key_of(at, name) for at, run in self._runs.items() for name in run.tensors]

    def shapes(self, run_idx: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a run's tensors, as they are over all ranks, by PEFT's names."""
        with self._lock:
            run = self._runs.get(run_idx)
            tensors = {} if run is None else run.tensors
            return {name: tuple(one.shape) for name, one in tensors.items()}

    # ---- versions -------------------------------------------------------------------------------

    def publish(
        self,
        run_idx: int,
        weight_version: int,
        *,
        adapter: AdapterSpec | None = None,
        source: WeightExtractor | None = None,
    ) -> WeightUpdateManifest:
        """Seal what a run's tensors hold now; readers are told of it from now on.

        All ranks call it together. The two newest versions of a run stay.

        Args:
            run_idx: the run.
            weight_version: the training's step; it grows.
            adapter: what belongs to the tensors that were `put`.
            source: an extractor with ``adapter=``, instead of tensors that were `put`.

        Raises:
            UnknownUpdate: the run has no tensors.
            WeightBridgeError: as for `GroupPublisher.publish` and `TensorBridge.publish`.

        """
        with self._lock:
            run = self._run(run_idx)
            if source is None and not run.tensors:
                msg = f"run {run_idx} has no tensors. Put them first, or pass source=."
                raise UnknownUpdate(msg)
            return run.publish(source, weight_version, adapter)

    def newest(self, run_idx: int) -> WeightUpdateManifest | None:
        """The newest version of a run; None if there is none."""
        run = self._runs.get(run_idx)
        return None if run is None else run.newest

    def runs(self) -> dict[int, WeightUpdateManifest]:
        """Newest version of each run that has one."""
        found = {at: run.newest for at, run in list(self._runs.items())}
        return {at: one for at, one in found.items() if one is not None}

    def end_run(self, run_idx: int) -> None:
        """Forget a run, with its tensors and versions; others notice nothing. Idempotent."""
        with self._lock:
            run = self._runs.pop(run_idx, None)
        if run is not None:
            run.close()

    def _run(self, run_idx: int) -> _Run:
        if run_idx not in self._runs:
            bridge = make_weight_bridge(
                "nixl",
                source_worker=self.server_name,
                source_rank=self._rank,
                address=self.host,
                server_name=self._base,
                timeout_s=self._timeout_s,
                suspicious="off",
                **self._options,
            )
            group = None
            if self._exchange is not None:
                exchange = self._exchange(f"{self._base}/{run_idx}")
                group = GroupPublisher(bridge, exchange, timeout_s=self._timeout_s)
            self._runs[run_idx] = _Run(bridge, group)
        return self._runs[run_idx]

    # ---- the server -----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer until `shutdown`."""
        self._http.serve_forever()

    def start(self) -> None:
        """Answer in a thread of its own, until `shutdown`."""
        self._thread = threading.Thread(target=self.run, name="rlb-parameters", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """End all runs, and stop to listen. Idempotent."""
        for run_idx in list(self._runs):
            self.end_run(run_idx)
        if self._thread is not None:
            self._http.shutdown()  # which waits for `run`
            self._thread = None
        self._http.server_close()

    def __enter__(self) -> Self:
        """Use as a context manager: answers from now on."""
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Shut down."""
        self.shutdown()

    def answer(self, path: str, name: str | None, token: str) -> tuple[int, object]:
        """Status and JSON of the answer to a question."""
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 401, {
                "error": f"the token is another one. Set {TOKEN} to the same on both sides."
            }
        if name != self.server_name:
            return 409, {
                "error": f"this is {self.server_name!r}, and {name!r} was asked for. Give both "
                "sides the same server_name, and the addresses by rank."
            }
        runs = self.runs()
        if path == "/catalog":
            return 200, {
                "rank": self._rank,
                "runs": {at: {"update_id": one.update_id} for at, one in runs.items()},
            }
        kind, _, at = path.removeprefix("/").partition("/")
        if kind == "runs" and at.isdecimal() and int(at) in runs:
            return 200, {"manifest": runs[int(at)].to_json()}
        return 404, {
            "error": f"{path} is not here, expected /catalog or one of its runs {list(runs)}."
        }


class _Catalog(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], parameters: ParameterServer) -> None:
        self.parameters = parameters
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Questions)


class _Questions(BaseHTTPRequestHandler):
    timeout = _CALL_S
    server: _Catalog

    def do_GET(self) -> None:
        """Answer one question."""
        parameters, said = self.server.parameters, self.headers
        token = said.get("Authorization", "").removeprefix("Bearer").strip()
        status, body = parameters.answer(self.path, said.get(NAME_HEADER), token)
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header(NAME_HEADER, parameters.server_name)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write nothing for each question."""


# ---- broadcasts ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _BroadcastRun:
    """A run whose versions are broadcast.

    Attributes:
        directory: below which its versions are marked.
        name: of its adapter.
        is_registered: its tensors were registered, and do not come with the model.
        extractor: of the model.

    """

    directory: Path
    name: str
    is_registered: bool
    extractor: WeightExtractor | None = None


class WeightBroadcast(ABC):
    """Broadcasts the versions of one or several runs, and marks each one for the orchestrator.

    A version's directory is ``{run's directory}/broadcasts/step_{step}``. Its marker ``STABLE`` is
    written last, durably.
    """

    def __init__(self, output_dir: str | Path, lora_config: LoRAConfig | None = None) -> None:
        """Configure.

        Args:
            output_dir: of the only run, which is run 0; see `on_run_created` for several.
            lora_config: of the adapter; None: the model's whole weights are broadcast.

        """
        self.output_dir, self.lora_config = Path(output_dir), lora_config
        is_one = not dist.is_available() or not dist.is_initialized()
        self.rank, self.world_size = (0, 1) if is_one else (dist.get_rank(), dist.get_world_size())
        self._runs: dict[int, _BroadcastRun] = {}

    def on_run_created(
        self,
        run_idx: int,
        directory: str | Path,
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Register a run, once; all ranks call it.

        Args:
            run_idx: its number.
            directory: of the run.
            parameters: its adapter by PEFT's names; DTensors where the ranks hold shards. The
                optimizer writes to these same tensors. None: they come with the model.
            name: of its adapter; None: that of the configuration for run 0, ``run_{run_idx}`` for
                others.

        """
        usual = self.lora_config.name if self.lora_config and not run_idx else f"run_{run_idx}"
        self._runs[run_idx] = _BroadcastRun(Path(directory), name or usual, bool(parameters))
        self._register(run_idx, parameters or {})

    def on_run_deleted(self, run_idx: int) -> None:
        """Forget a run; others notice nothing. Its directories stay. Unknown ones are ignored."""
        self._runs.pop(run_idx, None)

    def broadcast_weights(self, model: Any, step: int | Mapping[int, int]) -> None:
        """Broadcast a version of each run that is named; all ranks call it together.

        Args:
            model: what is trained, or its extractor; None if all runs registered their tensors.
            step: of run 0; or run -> its step, for the runs that are ready.

        Raises:
            UnknownUpdate: a run that was not created.
            WeightBridgeError: a version could not be made; nothing marks it.

        """
        steps = step if isinstance(step, Mapping) else {0: step}
        if 0 in steps and not self._runs:
            self.on_run_created(0, self.output_dir)
        for run_idx, its in sorted(steps.items()):
            run = self._runs.get(run_idx)
            if run is None:
                msg = f"run {run_idx} is unknown, expected one of {sorted(self._runs)}. Create it."
                raise UnknownUpdate(msg)
            if model is not None and run.extractor is None and not run.is_registered:
                run.extractor = self._extractor(model, run.name)
            self._broadcast(run_idx, run, its)

    @abstractmethod
    def shutdown(self) -> None:
        """Stop; what engines installed stays theirs."""

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Shut down."""
        self.shutdown()

    # ---- what each type does --------------------------------------------------------------------

    @abstractmethod
    def _broadcast(self, run_idx: int, run: _BroadcastRun, step: int) -> None:
        """Broadcast one version, and mark it."""

    def _register(self, run_idx: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep a run's tensors."""
        if parameters:
            msg = f"run {run_idx}: its tensors are taken over nixl alone. Pass the model."
            raise IncompatibleUpdate(msg)

    def _extractor(self, model: Any, name: str) -> WeightExtractor:
        if isinstance(model, WeightExtractor):
            return model
        adapter = None if self.lora_config is None else name
        kind = StateDictExtractor if self.world_size == 1 else FSDPWeightExtractor
        return kind(model, adapter=adapter)

    def _mark(self, folder: Path, files: Mapping[str, object]) -> None:
        """Write a version's files, and then its marker; rank 0 does."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                _write(folder / name, content if isinstance(content, str) else json.dumps(content))
            _write(folder / STABLE, "")
        except OSError as error:
            msg = f"{folder} cannot be written to: {error.strerror}. Name another output_dir."
            raise WeightBridgeUnavailableError(msg) from error


def _write(path: Path, text: str) -> None:
    """Write a file durably; nobody meets half of it, and nobody else may read it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch(mode=0o600)
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def step_folder(run_directory: Path, step: int) -> Path:
    """The directory that marks a run's version."""
    return run_directory / "broadcasts" / f"step_{step}"


class NIXLWeightBroadcast(WeightBroadcast):
    """Shards of adapters, which stay where they are: engines read them from all ranks."""

    def __init__(
        self,
        output_dir: str | Path,
        config: NIXLWeightBroadcastConfig,
        lora_config: LoRAConfig,
        *,
        exchange: Exchanges | None = None,
        **options: Any,
    ) -> None:
        """Start this rank's parameter server.

        Args:
            output_dir: see `WeightBroadcast`.
            config: with this rank's host.
            lora_config: of the adapters.
            exchange: how the ranks talk, see `ParameterServer`; None: over torch.distributed's
                default process group, whose backend must move CPU tensors.
            options: of `ParameterServer`.

        """
        super().__init__(output_dir, lora_config)
        self.config, self._alpha = config, lora_config.alpha
        if exchange is None and self.world_size > 1:
            exchange = _by_process_group
        self.param_server = ParameterServer(
            config.server_name,
            config.port,
            rank=self.rank,
            host=config.host,
            exchange=exchange,
            timeout=config.timeout,
            **options,
        )
        self.param_server.start()

    def on_run_deleted(self, run_idx: int) -> None:
        """Forget a run. See `WeightBroadcast`."""
        super().on_run_deleted(run_idx)
        self.param_server.end_run(run_idx)

    def shutdown(self) -> None:
        """End the parameter server."""
        self.param_server.shutdown()

    def _register(self, run_idx: int, parameters: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in parameters.items():
            self.param_server.put(key_of(run_idx, name), tensor)

    def _broadcast(self, run_idx: int, run: _BroadcastRun, step: int) -> None:
        server, spec = self.param_server, None
        if run.extractor is None:
            spec = AdapterSpec.inferred(run.name, server.shapes(run_idx), lora_alpha=self._alpha)
        manifest = server.publish(run_idx, step, adapter=spec, source=run.extractor)
        if self.rank == 0:
            info = {
                "run_idx": run_idx,
                "host": self.config.host,
                "base_port": self.config.port,
                "world_size": self.world_size,
            }
            parts = getattr(manifest, "parts", (manifest,))
            hosts = [part.handle["endpoint"]["address"] for part in parts]
            endpoints = [[host, self.config.port + at] for at, host in enumerate(hosts)]
            folder = step_folder(run.directory, step)
            self._mark(folder, {NIXL_INFO: info, ENDPOINTS: endpoints})


def _by_process_group(name: str) -> GroupExchange:
    del name  # all runs publish in one order
    return ProcessGroupExchange()


class FileSystemWeightBroadcast(WeightBroadcast):
    """Adapters as directories of PEFT, gathered to rank 0."""

    def shutdown(self) -> None:
        """Nothing is open: the directories stay."""

    def _broadcast(self, run_idx: int, run: _BroadcastRun, step: int) -> None:
        if run.extractor is None or run.extractor.adapter is None:
            msg = (
                f"run {run_idx} has no adapter, and files are written of adapters alone: expected "
                'model.lora. Take weight_broadcast.type = "nccl" for whole weights.'
            )
            raise IncompatibleUpdate(msg)
        tensors = whole_copies(run.extractor.full(), is_kept=self.rank == 0)
        if self.rank == 0:
            folder = step_folder(run.directory, step)
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                msg = f"{folder.parent} cannot be made: {error.strerror}. Name another output_dir."
                raise WeightBridgeUnavailableError(msg) from error
            write_peft(folder, run.extractor.adapter, tensors)
            self._mark(folder, {})


class NCCLWeightBroadcast(WeightBroadcast):
    """Whole weights, gathered to rank 0 and sent over the transport ``broadcast``."""

    def __init__(
        self, output_dir: str | Path, config: NCCLWeightBroadcastConfig, **options: Any
    ) -> None:
        """Open rank 0's bridge.

        Args:
            output_dir: see `WeightBroadcast`.
            config: of the transport.
            options: of the transport ``broadcast``, such as ``device``.

        """
        super().__init__(output_dir)
        self._kept: list[str] = []
        self._bridge = make_weight_bridge(
            "broadcast",
            source_worker="trainer",
            backend=config.backend,
            address=config.host,
            port=config.port,
            timeout_s=config.timeout,
            suspicious="off",
            **options,
        )
        self._device = "cuda" if config.backend == "nccl" else "cpu"

    def shutdown(self) -> None:
        """Close the bridge."""
        self._bridge.close()

    def _broadcast(self, run_idx: int, run: _BroadcastRun, step: int) -> None:
        if run.extractor is None:
            msg = f"run {run_idx} has no model. Pass it to broadcast_weights."
            raise IncompatibleUpdate(msg)
        tensors = whole_copies(run.extractor.full(), self._device, is_kept=self.rank == 0)
        if self.rank == 0:
            manifest = self._bridge.publish(tensors, weight_version=step)
            self._kept.append(manifest.update_id)
            while len(self._kept) > _KEPT:
                self._bridge.release(self._kept.pop(0))
            self._mark(step_folder(run.directory, step), {MANIFEST: manifest.to_json()})


def setup_weight_broadcast(
    output_dir: str | Path,
    config: WeightBroadcastConfig,
    lora_config: LoRAConfig | None = None,
    **options: Any,
) -> WeightBroadcast:
    """Make the broadcast of a configuration, on each of the trainer's ranks.

    Args:
        output_dir: of the run.
        config: ``weight_broadcast``.
        lora_config: ``model.lora``.
        options: of the broadcast that is made.

    Raises:
        ValueError: ``nixl`` without ``model.lora``.
        WeightBridgeError: the transport cannot be opened.

    """
    match config:
        case NIXLWeightBroadcastConfig():
            if lora_config is None:
                raise ValueError('type = "nixl" carries adapters: expected lora_config. Pass it.')
            return NIXLWeightBroadcast(output_dir, config, lora_config, **options)
        case NCCLWeightBroadcastConfig():
            return NCCLWeightBroadcast(output_dir, config, **options)
        case FileSystemWeightBroadcastConfig():
            return FileSystemWeightBroadcast(output_dir, lora_config, **options)
