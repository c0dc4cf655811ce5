"""prime-rl's trainer side: a parameter server for each rank, and broadcasts of three types.

A `ParameterServer` keeps the tensors of several runs under the keys ``lora:{run_idx}:{peft_key}``.
prime-rl's readers read tensors while the optimizer may write to them; here they read versions.
`ParameterServer.publish` seals what a run's tensors hold as a version of the transport ``nixl``,
all ranks together, and from then on the server gives that version's manifest to whoever asks. Each
run has a bridge of its own, so that a run that begins or ends touches no other.

The server itself listens at ``port + rank``. Every reader of a manifest can read the weights, so
both sides know a secret, unless all of it stays on this machine. The secret does not travel: each
side proves that it knows it, for the address that is connected to (`Greeting`), so that nobody can
pass a reader's proof on to another server.
"""

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field, StrictStr

from rl_bridge.bridge import TensorBridge, make_weight_bridge
from rl_bridge.compat.prime_rl.config import (
    FileSystemWeightBroadcastConfig,
    LoRAConfig,
    NCCLWeightBroadcastConfig,
    NIXLWeightBroadcastConfig,
    WeightBroadcastConfig,
)
from rl_bridge.errors import IncompatibleUpdate, UnknownUpdate, WeightBridgeUnavailableError
from rl_bridge.groups import (
    GroupExchange,
    GroupPublisher,
    Placement,
    StoreExchange,
    StoreOptions,
)
from rl_bridge.manifest import AdapterSpec, WeightUpdateManifest
from rl_bridge.memory.durable import replace_durably
from rl_bridge.trainers import FSDPWeightExtractor, StateDictExtractor, WeightExtractor
from rl_bridge.trainers.chunks import whole_copies, wire_name
from rl_bridge.trainers.gather import broadcast_json
from rl_bridge.trainers.meshes import MeshView, is_dtensor, largest_mesh, local_of
from rl_bridge.transports.files.steps import step_folder, take_back_from
from rl_bridge.transports.files.store import MANIFEST
from rl_bridge.transports.files.store import MARKER as STABLE
from rl_bridge.transports.wire.channel import (
    Channel,
    Count,
    Message,
    PeerJoin,
    PeerProtocol,
)
from rl_bridge.transports.wire.server import Peer, PeerServer, listen
from rl_bridge.transports.wire.tls import TLS, TLSFiles, load_tls

__all__ = [
    "FileSystemWeightBroadcast",
    "NCCLWeightBroadcast",
    "NIXLWeightBroadcast",
    "ParameterServer",
    "WeightBroadcast",
    "setup_weight_broadcast",
]

TOKEN = "RL_BRIDGE_PRIME_RL_TOKEN"  # noqa: S105 - the variable's name
"""Environment variable of the secret that parameter servers and their readers share."""
TLS_FILES = "RL_BRIDGE_PRIME_RL_TLS"
"""Environment variable of this side's files for TLS, as JSON."""
LOOPBACK = frozenset({"127.0.0.1", "::1"})
MAGIC = b"rlbprime"
"""Names the protocol of parameter servers in greetings."""
MAX_MESSAGE_NBYTES = 64 << 20
"""A manifest of a large group travels in one message."""

NIXL_INFO, ENDPOINTS = "nixl_info.json", "nixl_endpoints.json"
_KEPT = 2  # an engine may be reading the one before
_MAX_READERS = 1024

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


@dataclass(frozen=True, slots=True)
class Access:
    """How a parameter server and its readers know each other.

    Attributes:
        secret: that both sides know; empty if all of it stays on this machine.
        tls: files of this side; None without.

    """

    secret: str
    tls: TLS | None

    @classmethod
    def of(cls, host: str, token: str | None, tls: object) -> Self:
        """The value that was given, or else the environment's.

        Raises:
            ValueError: there is no secret, and `host` is another machine's or reached by others;
                or the environment's text is no JSON of paths.
            WeightBridgeUnavailableError: one of the files for TLS cannot be used.

        """
        secret = (os.environ.get(TOKEN, "") if token is None else token).strip()
        if not secret and host not in LOOPBACK:
            raise ValueError(
                f"host={host!r}: whoever reaches it could read the weights, expected a token. Set "
                f"{TOKEN} to the same secret on the trainer's and the inference's side."
            )
        return cls(secret, tls_for(tls))

    @property
    def token(self) -> bytes:
        """The bytes that both sides of a greeting know."""
        return hashlib.sha256(self.secret.encode()).digest()

    @property
    def nixl(self) -> dict[str, Any]:
        """Options of the transport: with a secret, no manifest holds a token."""
        options = tls_options(self.tls)
        if self.secret:
            options["token"] = hashlib.sha256(f"nixl {self.secret}".encode()).hexdigest()
        return options


def tls_for(given: object) -> TLS | None:
    """The files that were given, or the environment's, read; None without."""
    if given is None and (text := os.environ.get(TLS_FILES, "").strip()):
        given = TLSFiles.model_validate_json(text)
    return load_tls(given)


def tls_options(tls: TLS | None) -> dict[str, Any]:
    """Options of a transport for these files, as plain JSON: they travel to engines' ranks."""
    return {} if tls is None else {"tls": tls.files.plain()}


def identity_of(host: str, port: int) -> str:
    """What both sides of a greeting name: the address that is connected to."""
    return f"{host} {port}"


# ---- what a parameter server and its readers say -------------------------------------------------


class Join(PeerJoin):
    """From a reader: its first message, with the name of the server that it expects."""

    kind: Literal["join"] = "join"
    server_name: Annotated[StrictStr, Field(max_length=160)]


class Ask(Message):
    """From a reader: which versions are there? The manifests of one run, or the newest of each."""

    kind: Literal["ask"] = "ask"
    run_idx: Count | None


class Welcome(Message):
    """From the server: its own name."""

    kind: Literal["welcome"] = "welcome"
    server_name: StrictStr
    rank: Count


class Told(Message):
    """From the server: versions of each run, the newest last, and the manifests asked for."""

    kind: Literal["told"] = "told"
    runs: dict[Count, tuple[Count, ...]]
    manifests: tuple[StrictStr, ...]


PROTOCOL = PeerProtocol(
    magic=MAGIC,
    join=Join,
    welcome=Welcome,
    from_receiver=(Ask,),
    from_publisher=(Told,),
    max_message_nbytes=MAX_MESSAGE_NBYTES,
)


# ---- the parameter server ------------------------------------------------------------------------


class _Run:
    """One run's tensors, and its stream of versions."""

    def __init__(self, bridge: TensorBridge, group: GroupPublisher | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.kept: tuple[WeightUpdateManifest, ...] = ()  # replaced as a whole: the server reads it
        self._bridge, self._group = bridge, group

    def publish(
        self, source: WeightExtractor | None, version: int, adapter: AdapterSpec | None
    ) -> WeightUpdateManifest:
        parts, placements = _placed(self.tensors) if source is None else ({}, None)
        given = parts if source is None else source
        options: Any = {"weight_version": version, "adapter": adapter}
        if self._group is None:  # this rank has all of it, whatever its mesh says
            made = self._bridge.publish(given, **options)
        else:
            made = self._group.publish(given, placements, **options)
        every = (*self.kept, made)
        self.kept = every[-_KEPT:]
        for one in every[:-_KEPT]:  # whatever engines hold of it: others may need its slot
            (self._group or self._bridge).release(one.update_id)
        return made

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


class _Catalog(PeerServer[Peer, Join]):
    """Answers the readers of one parameter server."""

    def __init__(self, parameters: "ParameterServer", access: Access, timeout_s: float) -> None:
        self._parameters = parameters
        super().__init__(
            listen("nixl", parameters.host, parameters.port),
            parameters.server_name,
            PROTOCOL,
            token=access.token,
            identity=identity_of(parameters.host, parameters.port),
            timeout_s=timeout_s,
            max_members=_MAX_READERS,
            tls=access.tls,
        )

    def join(self, channel: Channel, join: Join) -> None:
        own = self._parameters.server_name
        if join.server_name != own:
            self.refuse(
                channel,
                f"this is {own!r}, and {join.server_name!r} was asked for. Give both sides the "
                "same server_name, and the addresses by rank",
            )
        elif self.has_room(channel):
            self.admit(Peer(channel, join), Welcome(server_name=own, rank=self._parameters.rank))

    def handle(self, member: Peer, message: Any) -> Message | None:
        del member
        if not isinstance(message, Ask):
            return None
        held = self._parameters.versions()
        runs = {at: tuple(one.weight_version for one in kept) for at, kept in held.items()}
        asked = [kept[-1] for kept in held.values()]
        if message.run_idx is not None:
            asked = [*held.get(message.run_idx, ())]
        return Told(runs=runs, manifests=tuple(one.to_json() for one in asked))


class ParameterServer:
    """One trainer rank's server: keeps tensors by reference, and versions of what they held.

    Attributes:
        server_name: of this rank, ``{server_name}_{rank}``.
        rank: this trainer rank.
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
        """Listen, and answer in a thread of its own until `shutdown`.

        Args:
            server_name: of all ranks.
            port: of rank 0; this rank adds its own to it.
            rank: this trainer rank.
            host: this rank's address, in numbers.
            token: a secret that readers know too; None takes that of the environment variable
                ``RL_BRIDGE_PRIME_RL_TOKEN``. Only 127.0.0.1 may go without.
            exchange: makes the way to the other ranks for each run; None: this rank has all.
            timeout: seconds that each step may wait for another side.
            options: of the transport ``nixl``, such as ``max_slots``. ``tls`` counts for this
                server's own connections as well; None takes that of the environment variable
                ``RL_BRIDGE_PRIME_RL_TLS``: ``{"cert": PATH, "key": PATH, "ca": PATH}``.

        Raises:
            ValueError: another host without a token.
            TransportUnavailable: the port is taken, or the address is not this machine's.
            WeightBridgeUnavailableError: one of the files of ``tls`` cannot be used.

        """
        self.server_name, self.rank = f"{server_name}_{rank}", rank
        self.host, self.port = host, port + rank
        self._base, self._exchange, self._timeout_s = server_name, exchange, timeout
        access = Access.of(host, token, options.pop("tls", None))
        self._options = {**access.nixl, **options}
        self._runs: dict[int, _Run] = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._catalog = _Catalog(self, access, timeout)

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
                raise UnknownUpdate(
                    f"run {run_idx} has no tensors. Put them first, or pass source=."
                )
            return run.publish(source, weight_version, adapter)

    def versions(self) -> dict[int, tuple[WeightUpdateManifest, ...]]:
        """What is held of each run that has a version, the newest last."""
        found = {at: run.kept for at, run in list(self._runs.items())}
        return {at: kept for at, kept in found.items() if kept}

    def end_run(self, run_idx: int) -> None:
        """Forget a run, with its tensors and versions; others notice nothing. Idempotent."""
        with self._lock:
            run = self._runs.pop(run_idx, None)
        if run is not None:
            run.close()

    def _run(self, run_idx: int) -> _Run:
        if run_idx not in self._runs:
            group = None
            exchange = None if self._exchange is None else self._exchange(f"{self._base}/{run_idx}")
            bridge = make_weight_bridge(
                "nixl",
                source_worker=self.server_name,
                source_rank=self.rank,
                address=self.host,
                server_name=self._base,
                timeout_s=self._timeout_s,
                suspicious="off",
                **self._options,
            )
            if exchange is not None:
                group = GroupPublisher(bridge, exchange, timeout_s=self._timeout_s)
            self._runs[run_idx] = _Run(bridge, group)
        return self._runs[run_idx]

    # ---- its end --------------------------------------------------------------------------------

    def run(self) -> None:
        """Wait for `shutdown`: it answers in a thread of its own anyway."""
        self._ended.wait()

    def shutdown(self) -> None:
        """End all runs, and stop to listen. Idempotent."""
        for run_idx in list(self._runs):
            self.end_run(run_idx)
        self._catalog.close()
        self._ended.set()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Shut down."""
        self.shutdown()


# ---- broadcasts ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _BroadcastRun:
    """A run whose versions are broadcast."""

    directory: Path
    name: str  # of its adapter
    is_registered: bool  # its tensors do not come with the model
    extractor: WeightExtractor | None = None
    model: Any = None  # that the extractor was made for
    is_begun: bool = False  # a version of it was broadcast


class WeightBroadcast(ABC):
    """Broadcasts the versions of one or several runs, and marks each one for the orchestrator.

    A version's directory is ``{run's directory}/broadcasts/step_{step}``. Its marker ``STABLE`` is
    written last, durably.

    Attributes:
        marks: whether steps are marked here, and not by what carries the versions.

    """

    marks: ClassVar[bool] = True

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
                raise UnknownUpdate(
                    f"run {run_idx} is unknown, expected one of {sorted(self._runs)}. Create it."
                )
            if model is not None and run.model is not model and not run.is_registered:
                run.extractor, run.model = self._extractor(model, run.name), model
            if self.marks and not run.is_begun and self.rank == 0:
                # An earlier life of the training may have gone further.
                take_back_from(broadcasts_of(run.directory), its)
            self._broadcast(run_idx, run, its)
            run.is_begun = True

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
            raise IncompatibleUpdate(
                f"run {run_idx}: its tensors are taken over nixl alone. Pass the model."
            )

    def _extractor(self, model: Any, name: str) -> WeightExtractor:
        if isinstance(model, WeightExtractor):
            return model
        adapter = None if self.lora_config is None else name
        others = sorted(one.name for one in self._runs.values() if not one.is_registered)
        if (
            adapter is not None
            and len(others) > 1
            and name not in getattr(model, "peft_config", ())
        ):
            raise IncompatibleUpdate(
                f"the model has no adapter {name!r}, and runs {others} are to come of it: expected "
                "an adapter of each one's name. Register the runs' own tensors."
            )
        is_sharded = self.world_size > 1 or any(map(is_dtensor, model.parameters()))
        kind = FSDPWeightExtractor if is_sharded else StateDictExtractor
        return kind(model, adapter=adapter)

    def _mark(self, run: _BroadcastRun, step: int, files: Mapping[str, str]) -> None:
        """Write a version's files, and then its marker; rank 0 does."""
        folder = step_folder(broadcasts_of(run.directory), step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in {**files, STABLE: ""}.items():
                mode = 0o600 if name == MANIFEST else 0o644  # a manifest leads to the weights
                replace_durably(folder, name, text.encode(), mode=mode)
        except OSError as error:
            raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{folder} cannot be written to: {error.strerror}. Name another output_dir."
    )


def _extractor_of(run_idx: int, run: _BroadcastRun) -> WeightExtractor:
    if run.extractor is None:
        raise IncompatibleUpdate(f"run {run_idx} has no model. Pass it to broadcast_weights.")
    return run.extractor


def broadcasts_of(run_directory: Path) -> Path:
    """The directory of a run's steps."""
    return run_directory / "broadcasts"


class NIXLWeightBroadcast(WeightBroadcast):
    """Shards of adapters, which stay where they are: engines read them from all ranks.

    Attributes:
        param_server: this rank's.
        server_name: of it.
        port: of it.

    """

    def __init__(
        self,
        output_dir: str | Path,
        config: NIXLWeightBroadcastConfig,
        lora_config: LoRAConfig,
        *,
        exchange: Exchanges | None = None,
        **options: Any,
    ) -> None:
        """Start this rank's parameter server; all ranks call it together.

        Args:
            output_dir: see `WeightBroadcast`.
            config: with this rank's host.
            lora_config: of the adapters.
            exchange: how the ranks talk, see `ParameterServer`; None: over a store that rank 0
                has, so that a rank that is late costs a version and no process group.
            options: of `ParameterServer`.

        Raises:
            ValueError: another host than 127.0.0.1 without a token.
            WeightBridgeUnavailableError: the ranks do not meet in time.
            TransportUnavailable: as for `ParameterServer`.

        """
        super().__init__(output_dir, lora_config)
        # (Before ranks wait for each other: each says by itself that it has no secret.)
        Access.of(config.host, options.get("token"), options.get("tls"))
        self.config, self._alpha = config, lora_config.alpha
        if exchange is None and self.world_size > 1:
            exchange = _over_a_store(config.host, timedelta(seconds=config.timeout))
        self.param_server = ParameterServer(
            config.server_name,
            config.port,
            rank=self.rank,
            host=config.host,
            exchange=exchange,
            timeout=config.timeout,
            **options,
        )
        self.server_name, self.port = self.param_server.server_name, self.param_server.port

    def on_run_deleted(self, run_idx: int) -> None:
        """Forget a run."""
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
                "weight_version": step,
            }
            parts = getattr(manifest, "parts", (manifest,))
            hosts = [part.handle["endpoint"]["address"] for part in parts]
            endpoints = [[host, self.config.port + at] for at, host in enumerate(hosts)]
            self._mark(run, step, {NIXL_INFO: json.dumps(info), ENDPOINTS: json.dumps(endpoints)})


def _over_a_store(host: str, timeout: timedelta) -> Exchanges:
    """The ranks meet in a store of rank 0's; where it is, they are told over a group of Gloo's."""
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), None
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch does not list it
    try:
        group = dist.new_group(backend="gloo", timeout=timeout)
        if rank == 0:
            store = make(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        where = [host, 0 if store is None else store.port]
        at, port = broadcast_json(where, source=0, group=group, device=torch.device("cpu"))
        if store is None:
            store = make(at, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightBridgeUnavailableError(
            f"rank {rank} did not meet the others within {timeout.total_seconds():g} s, at host "
            f"{host!r}: {error}. Give rank 0 an address that all ranks reach "
            "(weight_broadcast.host)."
        ) from error

    def exchange(name: str) -> GroupExchange:
        return StoreExchange(StoreOptions(store, name), rank=rank, world_size=world_size)

    return exchange


class FileSystemWeightBroadcast(WeightBroadcast):
    """Whole weights as Hugging Face lays them out, or adapters as PEFT does, gathered to rank 0.

    A run's ``broadcasts`` is a directory of the transport ``files``, which shows its versions as
    steps and says what of an earlier life of the training stays.
    """

    marks: ClassVar[bool] = False

    def __init__(
        self,
        output_dir: str | Path,
        config: FileSystemWeightBroadcastConfig,
        lora_config: LoRAConfig | None = None,
        **options: Any,
    ) -> None:
        """Configure; offers that a killed trainer left in `output_dir` are taken back.

        An orchestrator that starts at the same time would answer them.

        Args:
            output_dir: see `WeightBroadcast`.
            config: with the handshake.
            lora_config: of the adapter; None: the model's whole weights are broadcast.
            options: of the transport ``files``, such as ``config_dir`` and ``keep_last``.

        Raises:
            WeightBridgeUnavailableError: another trainer has the directory.

        """
        super().__init__(output_dir, lora_config)
        self._options = {
            "steps": config.handshake,
            "ready_timeout_s": config.timeout,
            "suspicious": "off",
            **options,
        }
        self._bridges: dict[int, TensorBridge] = {}
        if self.rank == 0 and broadcasts_of(self.output_dir).is_dir():
            with self._opened(self.output_dir):
                pass

    def on_run_deleted(self, run_idx: int) -> None:
        """Forget a run."""
        super().on_run_deleted(run_idx)
        if run_idx in self._bridges:
            self._bridges.pop(run_idx).close()

    def shutdown(self) -> None:
        """Close the bridges: the directories stay."""
        while self._bridges:
            self._bridges.popitem()[1].close()

    def _register(self, run_idx: int, parameters: Mapping[str, torch.Tensor]) -> None:
        super()._register(run_idx, parameters)
        if self.rank == 0:
            self._bridges[run_idx] = self._opened(self._runs[run_idx].directory)

    def _broadcast(self, run_idx: int, run: _BroadcastRun, step: int) -> None:
        extractor = _extractor_of(run_idx, run)
        tensors = whole_copies(extractor.full(), is_kept=self.rank == 0)
        if self.rank == 0:
            bridge = self._bridges[run_idx]
            manifest = bridge.publish(tensors, weight_version=step, adapter=extractor.adapter)
            bridge.release(manifest.update_id)  # the newest ones stay

    def _opened(self, directory: Path) -> TensorBridge:
        """Open a run's bridge: with that, what is unfinished there is taken back."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(directory, error) from error
        bridge = make_weight_bridge(
            "files", url=broadcasts_of(directory), source_worker="trainer", **self._options
        )
        try:
            _ = bridge.publisher  # which makes it
        except BaseException:
            bridge.close()
            raise
        return bridge


class NCCLWeightBroadcast(WeightBroadcast):
    """Whole weights, gathered to rank 0 and sent over the transport ``broadcast``."""

    def __init__(
        self, output_dir: str | Path, config: NCCLWeightBroadcastConfig, **options: Any
    ) -> None:
        """Open rank 0's bridge.

        Args:
            output_dir: see `WeightBroadcast`.
            config: of the transport.
            options: of the transport ``broadcast``, such as ``device``; for ``tls`` see
                `ParameterServer`.

        """
        super().__init__(output_dir)
        options.update(tls_options(tls_for(options.pop("tls", None))))
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
        extractor = _extractor_of(run_idx, run)
        tensors = whole_copies(extractor.full(), self._device, is_kept=self.rank == 0)
        if self.rank == 0:
            manifest = self._bridge.publish(tensors, weight_version=step)
            self._kept.append(manifest.update_id)
            while len(self._kept) > _KEPT:
                self._bridge.release(self._kept.pop(0))
            self._mark(run, step, {MANIFEST: manifest.to_json()})


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
            return FileSystemWeightBroadcast(output_dir, config, lora_config, **options)
