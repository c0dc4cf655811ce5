"""``broadcast``: one trainer's versions to many engines, over a process group of their own.

A version is sealed in a slot of the trainer, as with shared memory, and sent from there by Gloo or
NCCL into slots of each engine. The engines' reports (imported, acknowledged, refused) travel over
sockets. No memory is shared, so the engines may be on other machines.
"""

import json
from collections.abc import Mapping
from typing import ClassVar

import torch

from rl_bridge.errors import MalformedManifest, TransportUnavailable
from rl_bridge.memory.passes import checked_count
from rl_bridge.transports.base import (
    Availability,
    ConsumerEnd,
    PublisherEnd,
    Transport,
)
from rl_bridge.transports.broadcast.messages import BACKENDS, Backend, BroadcastInitInfo
from rl_bridge.transports.wire.arenas import Arenas, CPUArenas, DeviceArenas
from rl_bridge.transports.wire.ends import Options
from rl_bridge.transports.wire.tls import TLSFiles

_REMEDIES = {
    "gloo": "Use shared-memory on one machine, or a build of torch with Gloo.",
    "nccl": "Use backend='gloo' and weights on the CPU, or GPUs and a build of torch for CUDA.",
}


def backend_cause(backend: str) -> str | None:
    """The part that this machine lacks for a backend; None if it lacks nothing."""
    if not torch.distributed.is_available():
        return f"torch {torch.__version__} is built without torch.distributed"
    if backend == "gloo":
        if not torch.distributed.is_gloo_available():
            return f"torch {torch.__version__} is built without Gloo"
        return None
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL"
    if not torch.cuda.is_available():
        return "the NVIDIA driver reports no usable device"
    return None


class Broadcast(Transport):
    """The ``broadcast`` transport."""

    name: ClassVar[str] = "broadcast"
    crosses_processes: bool = True
    zero_copy_import: bool = False
    binds_header: bool = True

    def __init__(
        self,
        *,
        backend: str = "gloo",
        address: str = "127.0.0.1",
        port: int = 0,
        group_name: str | None = None,
        world_size: int | None = None,
        init_info: BroadcastInitInfo | Mapping[str, object] | str | None = None,
        override: bool = True,
        device: int | None = None,
        max_slots: int = 4,
        max_consumers: int = 64,
        num_threads: int | None = None,
        timeout_s: float = 30.0,
        tls: TLSFiles | Mapping[str, str] | None = None,
    ) -> None:
        """Configure; receivers learn everything else from the manifest, or from `init_info`.

        Args:
            backend: ``gloo`` for weights on the CPU, ``nccl`` for weights on GPUs; the same on
                both sides.
            address: of the publisher's interface, in numbers. It listens there and nowhere else.
            port: where the publisher listens; 0 takes a free port.
            group_name: the group's name; None makes one from the publisher's id.
            world_size: how many members, the trainer and all engine ranks. The first version waits
                for all of them, up to `timeout_s`, and no others may join. None lets engines come
                and go.
            init_info: on an engine's side, what the trainer's `init_info` returned: the engine
                joins at once, before the first manifest. Also as JSON text, or as a mapping.
            override: whether this side leaves a group when it joins another publisher's group of
                the same name; otherwise joining raises.
            device: number of the GPU for ``nccl``; None takes torch's current one.
            max_slots: most versions held in the publisher's memory at a time.
            max_consumers: most receivers at a time; Gloo's rendezvous is meant for 2,000 at most.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.
            timeout_s: longest that an import waits while nothing of its update arrives. Each single
                wait for a peer, for an answer or for a slice, takes at most a third.
            tls: certificate, key and authority of this side, also as a mapping: control connections
                are encrypted, and both sides show a certificate. The publisher's names `address`.
                The bytes of the weights travel as Gloo or NCCL send them. On both sides, or none.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of its range; a `world_size` of less than 2.
            MalformedManifest: `init_info` is no such description.
            WeightBridgeUnavailableError: one of the files of `tls` cannot be used.

        """
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: expected one of: {', '.join(BACKENDS)}.")
        self._backend: Backend = backend
        self._options = Options(
            address=address,
            port=port,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
            timeout_s=timeout_s,
            tls=tls,
        )
        if group_name is not None and not isinstance(group_name, str):
            raise TypeError(f"group_name={group_name!r}: expected a name such as 'weights'.")
        self._group_name = group_name
        self._world_size = 0 if world_size is None else checked_count("world_size", world_size)
        if self._world_size == 1:
            raise ValueError("world_size=1: expected the trainer and at least one engine, so 2.")
        self._init_info = _checked_info(init_info)
        self._override = bool(override)
        self._device = device
        self._last_info: BroadcastInitInfo | None = None

    @classmethod
    def probe(cls) -> Availability:
        """Whether Gloo works here; `backend_cause("nccl")` says whether NCCL does."""
        cause = backend_cause("gloo")
        if cause is None:
            from rl_bridge.transports.broadcast.group import gloo_cause

            cause = gloo_cause("127.0.0.1")
        if cause is not None:
            return Availability(cls.name, "blocked", cause, _REMEDIES["gloo"])
        return Availability(cls.name, "pass")

    def init_info(self, *, rank_offset: int = 1) -> BroadcastInitInfo:
        """Describe the group that this object's publisher opened last, for an engine to join.

        Args:
            rank_offset: the place in the group of the engine's own rank 0.

        Raises:
            MalformedManifest: no publisher was opened.

        """
        if self._last_info is None:
            raise MalformedManifest(
                "no publisher's end is open, so there is no group to join. Open it first."
            )
        return self._last_info.model_copy(
            update={"rank_offset": checked_count("rank_offset", rank_offset)}
        )

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end."""
        self._require_backend()
        from rl_bridge.transports.broadcast.sender import BroadcastPublisher, group_info
        from rl_bridge.transports.wire.server import listen

        arenas = self._arenas()
        listener = listen(self.name, self._options.address, self._options.port)
        try:
            info = group_info(
                listener,
                publisher_id,
                group_name=self._group_name,
                backend=self._backend,
                world_size=self._world_size,
                has_tls=self._options.tls is not None,
            )
            end = BroadcastPublisher(listener, info, arenas, self._options)
        except BaseException:
            listener.close()
            raise
        self._last_info = info
        return end

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        self._require_backend()
        from rl_bridge.transports.broadcast.consumer import BroadcastConsumer

        return BroadcastConsumer(
            worker,
            rank,
            backend=self._backend,
            make_arenas=self._arenas,
            init_info=self._init_info,
            override=self._override,
            options=self._options,
        )

    def _require_backend(self) -> None:
        cause = backend_cause(self._backend)
        if cause is not None:
            raise TransportUnavailable(self.name, cause, _REMEDIES[self._backend])

    def _arenas(self) -> Arenas:
        if self._backend == "gloo":
            return CPUArenas()
        from rl_bridge.cuda.devices import cuda_place

        device = torch.cuda.current_device() if self._device is None else self._device
        return DeviceArenas(cuda_place(device))


def _checked_info(given: object) -> BroadcastInitInfo | None:
    if given is None or isinstance(given, BroadcastInitInfo):
        return given
    if isinstance(given, str):
        return BroadcastInitInfo.from_json(given)
    if not isinstance(given, Mapping):
        raise MalformedManifest(
            f"init_info is a {type(given).__name__}, expected a BroadcastInitInfo or its JSON "
            "text. Pass what the publisher's init_info gave."
        )
    return BroadcastInitInfo.from_json(json.dumps(dict(given), default=str))
