"""``nixl``: engines read versions out of the trainer's memory, one-sided, also across machines.

A version is sealed in a slot of the trainer, as with shared memory; the slot is registered once
with NVIDIA's NIXL. Engines lease the version over a control connection, and read the parts that
they need into slots of their own, from all ranks of the trainer at once. Each read is fenced: see
``docs/explanation/nixl.md``.
"""

import re
import secrets
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from rl_bridge.errors import TransportUnavailable
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import checked_count, checked_flag
from rl_bridge.transports.base import (
    Availability,
    ConsumerEnd,
    PublisherEnd,
    Transport,
)
from rl_bridge.transports.nixl import library
from rl_bridge.transports.nixl.agent import REMEDY, Agent, Counters, Host
from rl_bridge.transports.nixl.library import backend_cause
from rl_bridge.transports.nixl.messages import STALL_PART, Entry, NIXLEndpoint
from rl_bridge.transports.nixl.server import InPlaceStore, SlotStore
from rl_bridge.transports.nixl.serving_process import ServingProcess
from rl_bridge.transports.wire.arenas import Arenas, CPUArenas, DeviceArenas
from rl_bridge.transports.wire.ends import Options
from rl_bridge.transports.wire.server import listen
from rl_bridge.transports.wire.tls import TLSFiles

_MAX_PORT = 2**16 - 1


class NIXL(Transport):
    """The ``nixl`` transport."""

    name: ClassVar[str] = "nixl"
    crosses_processes: bool = True
    zero_copy_import: bool = False
    binds_header: bool = True

    def __init__(
        self,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        source_rank: int = 0,
        server_name: str = "rl_bridge",
        token: str | None = None,
        backend: str = "UCX",
        backend_options: Mapping[str, str] | None = None,
        device: int | None = None,
        serve: Literal["process", "inline"] | None = None,
        in_place: bool = False,
        columns: bool = True,
        max_slots: int = 4,
        max_consumers: int = 64,
        num_threads: int | None = None,
        timeout_s: float = 30.0,
        tls: TLSFiles | Mapping[str, str] | None = None,
    ) -> None:
        """Configure; engines learn everything else from the manifest.

        Args:
            address: of the publisher's interface, in numbers. The control server listens there.
            port: of rank 0's control server; other ranks add their rank to it. 0 takes free ports.
            source_rank: this publisher's rank; the bridge passes its own.
            server_name: the server's name, to which the rank is added.
            token: 64 hexadecimal digits that both sides were given. None makes one for each
                publisher; it then travels in the manifests, and any reader of a manifest can read
                the weights.
            backend: the backend of NIXL, the same on both sides.
            backend_options: options that NIXL passes to its backend, e.g. ``{"num_workers": "2"}``.
            device: number of the GPU that holds the weights; None: the CPU holds them.
            serve: what answers readers at the publisher: ``process``, a process of its own, so
                that no reader can end the trainer over TCP; or ``inline``, the trainer itself.
                None: ``process`` for weights on the CPU if UCX has to use TCP; ``inline`` if this
                machine has RDMA, which reads without an answer.
            in_place: readers read the trainer's own tensors, which are never copied. One version
                is published at a time; the trainer must not write to the tensors, nor free them,
                before it released the version. A read that overlaps a write is refused. Served
                ``inline``.
            columns: digest blocks of columns, too, by which a reader of some columns of a tensor
                reads only those. Sealing a version takes up to half as long again: leave it out
                where no reader cuts tensors that way. Weights on a GPU have none.
            max_slots: most versions held in the publisher's memory at a time.
            max_consumers: most readers at a time.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.
            timeout_s: longest that an import waits while nothing of its update arrives; a lease
                that its reader does not renew ends after this time.
            tls: certificate, key and authority of this side, also as a mapping: control connections
                are encrypted, and both sides show a certificate. The publisher's names `address`.
                The bytes of the weights travel as UCX sends them. On both sides, or on none.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of its range.
            WeightBridgeUnavailableError: one of the files of `tls` cannot be used.

        """
        self._options = Options(
            address=address,
            port=port,
            max_slots=max_slots,
            max_consumers=max_consumers,
            num_threads=num_threads,
            timeout_s=timeout_s,
            tls=tls,
        )
        self._rank = checked_count("source_rank", source_rank + 1) - 1
        if port and self._options.port + self._rank > _MAX_PORT:
            raise ValueError(f"port={port!r}: none is left for rank {source_rank}. Lower it.")
        if not isinstance(server_name, str):
            raise TypeError(f"server_name={server_name!r}: expected a text.")
        if not re.fullmatch("[A-Za-z0-9_.:-]{1,128}", server_name):
            raise ValueError(f"server_name={server_name!r}: expected letters, digits, '_.:-'.")
        self._server_name = f"{server_name}_{self._rank}"
        if token is not None and not re.fullmatch("[0-9a-f]{64}", str(token)):
            raise ValueError("token: expected what secrets.token_hex(32) makes: 64 hex digits.")
        self._token = token
        if not isinstance(backend, str) or not re.fullmatch("[A-Z0-9_]{1,32}", backend):
            raise ValueError(f"backend={backend!r}: expected a name of NIXL's, such as 'UCX'.")
        self._backend = backend
        # The control connection shows whether a peer lives. UCX's own handling of lost peers would
        # end a publisher's process that was stopped while its reader left.
        self._params = {"ucx_error_handling_mode": "none"} if backend == "UCX" else {}
        self._params |= _checked_params({} if backend_options is None else backend_options)
        if device is not None and (type(device) is not int or device < 0):
            raise ValueError(f"device={device!r}: expected the number of a GPU, or None.")
        self._device = device
        self._in_place = checked_flag("in_place", in_place)
        self._columns = checked_flag("columns", columns)
        self._serve = self._checked_serve(serve)

    def _checked_serve(self, serve: object) -> Literal["process", "inline"]:
        match serve:
            case None:
                is_able = self._device is None and not self._in_place and self._backend == "UCX"
                return "process" if is_able and not library.has_rdma() else "inline"
            case "process" if self._device is not None or self._in_place:
                raise ValueError(
                    "serve='process': another process cannot serve memory of a GPU, nor the "
                    "trainer's own tensors (in_place). Leave it out."
                )
            case "process" | "inline":
                return "process" if serve == "process" else "inline"
        raise ValueError(f"serve={serve!r}: expected 'process', 'inline' or None.")

    @classmethod
    def probe(cls) -> Availability:
        """Whether NIXL is installed and can open its backend UCX."""
        cause = backend_cause("UCX")
        if cause is not None:
            return Availability(cls.name, "blocked", cause, REMEDY, library.is_installed())
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        """Open the trainer's end."""
        from rl_bridge.transports.nixl.server import NIXLPublisher

        self._require_library()
        arenas = self._arenas()
        port = self._options.port and self._options.port + self._rank
        token = secrets.token_hex(32) if self._token is None else self._token
        listener = listen(self.name, self._options.address, port)
        host: Host | None = None
        try:
            host = self._host()
            label = f"rlb-{publisher_id[:12]}"
            store = (
                InPlaceStore(host, arenas.place, label)
                if self._in_place
                else SlotStore(host, arenas, label, self._options.max_slots)
            )
            address, port = listener.getsockname()[:2]
            endpoint = NIXLEndpoint(
                address=address,
                port=port,
                server_name=self._server_name,
                publisher_id=publisher_id,
                token=token if self._token is None else None,
                backend=self._backend,
                has_tls=self._options.tls is not None,
            )
            return NIXLPublisher(
                listener,
                endpoint,
                host,
                store,
                self._options,
                place=arenas.place,
                columns=self._columns,
                token=bytes.fromhex(token),
            )
        except BaseException:
            listener.close()
            if host is not None:
                host.close()
            raise

    def _host(self) -> Host:
        if self._serve == "process":
            answer_s = self._options.timeout_s * STALL_PART
            return ServingProcess(backend=self._backend, params=self._params, answer_s=answer_s)
        return Agent("publisher", backend=self._backend, params=self._params)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        """Open the engine's end."""
        from rl_bridge.transports.nixl.consumer import NIXLConsumer

        self._require_library()  # the agent is made when a publisher has answered
        return NIXLConsumer(
            worker,
            rank,
            make_agent=lambda: Agent("consumer", backend=self._backend, params=self._params),
            make_arenas=self._arenas,
            backend=self._backend,
            token=None if self._token is None else bytes.fromhex(self._token),
            options=self._options,
        )

    @staticmethod
    def counters(*ends: PublisherEnd | ConsumerEnd | None) -> Counters:
        """The counters of these ends of this transport, added up; zeros for None."""
        from rl_bridge.transports.nixl.consumer import NIXLConsumer
        from rl_bridge.transports.nixl.server import NIXLPublisher

        counting = (end for end in ends if isinstance(end, NIXLConsumer | NIXLPublisher))
        return sum((end.counters for end in counting), start=Counters())

    @staticmethod
    @deferred_interrupts()
    def catalog(
        end: PublisherEnd | ConsumerEnd, manifest: WeightUpdateManifest | None = None
    ) -> tuple[Entry, ...]:
        """The versions that a publisher holds: `end` itself, or the publisher of `manifest`.

        Raises:
            WeightBridgeError: there is no way to that publisher.

        """
        from rl_bridge.transports.nixl.consumer import NIXLConsumer
        from rl_bridge.transports.nixl.server import NIXLPublisher

        if isinstance(end, NIXLPublisher):
            return end.catalog()
        assert isinstance(end, NIXLConsumer)
        assert manifest is not None
        return end.catalog(manifest)

    def _require_library(self) -> None:
        try:
            library.find()
        except ImportError as error:
            raise TransportUnavailable(self.name, str(error), REMEDY) from error

    def _arenas(self) -> Arenas:
        if self._device is None:
            return CPUArenas()
        if not torch.cuda.is_available():
            raise TransportUnavailable(
                self.name,
                f"device={self._device} was asked for and the NVIDIA driver reports none",
                "Leave device= out for weights on the CPU.",
            )
        from rl_bridge.cuda.devices import cuda_place

        return DeviceArenas(cuda_place(self._device))


def _checked_params(given: object) -> dict[str, str]:
    """Convert options of a backend to texts, as NIXL takes them."""
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int | float)
        for name, value in given.items()
    ):
        raise TypeError(
            f"backend_options={given!r}: expected a mapping of names to texts or numbers, such as "
            "{'num_workers': '2'}."
        )
    return {name: str(value) for name, value in given.items()}
