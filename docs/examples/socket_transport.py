"""A transport over sockets of its own: readers ask the publisher for a version piece by piece."""

import base64
import ctypes
import logging
import os
import secrets
import time
import weakref
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Base64Bytes, Field

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import SegmentError, WeightBridgeError
from rl_bridge.transports import (
    Attachment,
    Availability,
    BytePlan,
    Carried,
    ConsumerEnd,
    PackPlan,
    Pin,
    PublisherEnd,
    Record,
    TLSFiles,
    Transport,
    UpdateReport,
    anonymous_pin,
    register_transport,
)
from rl_bridge.transports.wire import (
    TLS,
    Channel,
    Connector,
    Count,
    Gone,
    Handle,
    HungUp,
    Message,
    Peer,
    PeerClient,
    PeerJoin,
    PeerProtocol,
    PeerServer,
    UpdateId,
    error_of,
    listen,
    load_tls,
    read_handle,
)

LOG = logging.getLogger(__name__)
MAX_CONSUMERS = 64
PIECE_NBYTES = 1 << 20


class SocketHandle(Handle):
    """Leads from a manifest to its publisher; whoever reads it can read the weights."""

    publisher: UpdateId
    port: Annotated[int, Field(gt=0, lt=2**16)]
    token: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    has_tls: bool

    @property
    def publisher_id(self) -> str:
        return self.publisher


class Hello(PeerJoin):
    kind: Literal["hello"] = "hello"


class Read(Message):
    kind: Literal["read"] = "read"
    update_id: UpdateId
    start: Count


class Welcome(Message):
    kind: Literal["welcome"] = "welcome"


class Piece(Message):
    kind: Literal["piece"] = "piece"
    update_id: UpdateId
    start: Count
    arena_nbytes: Count
    data: Base64Bytes


PROTOCOL = PeerProtocol(
    magic=b"mysocket",
    join=Hello,
    welcome=Welcome,
    from_receiver=(Read,),
    from_publisher=(Piece, Gone),
    max_message_nbytes=2 * PIECE_NBYTES,  # a piece travels as text
)


class VersionServer(PeerServer[Peer, Hello]):
    """Answers readers. `join` and `handle` have the lock `changed`, in one thread or another."""

    def __init__(self, publisher_id: str, token: bytes, timeout_s: float, tls: TLS | None) -> None:
        self.versions: dict[str, tuple[Pin, int]] = {}
        listener = listen("socket", "127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        super().__init__(
            listener,
            f"publisher {publisher_id}",
            PROTOCOL,
            token=token,
            identity=publisher_id,
            timeout_s=timeout_s,
            max_members=MAX_CONSUMERS,
            tls=tls,
        )

    def join(self, channel: Channel, join: Hello) -> None:
        if self.has_room(channel):
            self.admit(Peer(channel, join), Welcome())

    def handle(self, member: Peer, message: Read) -> Message:
        if message.update_id not in self.versions:
            return Gone(update_id=message.update_id, reason="it was released", is_stale=True)
        pin, nbytes = self.versions[message.update_id]
        length = max(0, min(PIECE_NBYTES, nbytes - message.start))
        data = ctypes.string_at(pin.address + message.start, length)
        return Piece(
            update_id=message.update_id,
            start=message.start,
            arena_nbytes=nbytes,
            data=base64.b64encode(data),
        )


@register_transport
class SocketTransport(Transport):
    """Versions over TCP, on this machine."""

    name: ClassVar[str] = "socket"
    crosses_processes: bool = True
    zero_copy_import: bool = False

    def __init__(self, *, timeout_s: float = 30.0, tls: TLSFiles | None = None) -> None:
        self._timeout_s, self._tls = timeout_s, load_tls(tls)

    @classmethod
    def probe(cls) -> Availability:
        return Availability(cls.name, "pass")

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        return SocketPublisher(publisher_id, self._timeout_s, self._tls)

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        return SocketConsumer(worker, rank, self._timeout_s, self._tls)


class SocketPublisher(PublisherEnd):
    """The trainer's end."""

    def __init__(self, publisher_id: str, timeout_s: float, tls: TLS | None) -> None:
        token = secrets.token_bytes(32)
        self.server = VersionServer(publisher_id, token, timeout_s, tls)
        self._handle = SocketHandle(
            publisher=publisher_id,
            port=self.server.port,
            token=token.hex(),
            has_tls=tls is not None,
        ).model_dump()
        # A bridge that is dropped instead of closed must not go on serving.
        self._finalizer = weakref.finalize(self, _end, self.server)

    def carry(self, plan: PackPlan, tensors: Mapping[str, torch.Tensor], update_id: str) -> Carried:
        start = time.perf_counter()
        nbytes = plan.table.arena_nbytes
        pin = anonymous_pin(nbytes)
        digests = plan.pack(tensors, pin.address)
        with self.server.changed:
            self.server.versions[update_id] = pin, nbytes
        elapsed = (time.perf_counter() - start) * 1e3
        return Carried(digests=digests, handle=self._handle, timings_ms={"stage_digest": elapsed})

    def release(self, update_id: str) -> None:
        with self.server.changed:
            self.server.versions.pop(update_id, None)

    def records(self) -> list[Record]:
        return self.server.records()

    @property
    def nbytes(self) -> int:
        return sum(pin.nbytes for pin, _ in list(self.server.versions.values()))

    def close(self) -> None:
        self._finalizer()


def _end(server: VersionServer) -> None:
    server.close()
    server.versions.clear()


class SocketConsumer(ConsumerEnd):
    """The engine's end."""

    def __init__(self, worker: str, rank: int, timeout_s: float, tls: TLS | None) -> None:
        self._worker, self._rank = worker, rank
        self._timeout_s, self._tls = timeout_s, tls
        self._reader = secrets.token_hex(16)  # the publisher knows this side again by it
        self._clients: dict[str, tuple[SocketHandle, PeerClient[Welcome]]] = {}

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        handle = read_handle(SocketHandle, manifest)
        try:
            return self._attach(manifest, self._client(handle))
        except HungUp:  # the connection broke, and the publisher may be well
            return self._attach(manifest, self._client(handle))

    def _attach(self, manifest: WeightUpdateManifest, client: PeerClient[Welcome]) -> Attachment:
        nbytes = manifest.table.arena_nbytes
        piece = self._piece(client, manifest.update_id, 0)
        # Before anything is allocated: a manifest may claim any size.
        if piece.arena_nbytes != nbytes:
            raise SegmentError(
                f"update {manifest.update_id} has {piece.arena_nbytes} bytes, the manifest says "
                f"{nbytes}. Use the manifest as it was published."
            )
        pin, start = anonymous_pin(nbytes), 0
        while piece.data:
            length = min(len(piece.data), nbytes - start)
            ctypes.memmove(pin.address + start, piece.data, length)
            start += length
            if start == nbytes:
                break
            piece = self._piece(client, manifest.update_id, start)
        if start < nbytes:
            raise SegmentError(f"update {manifest.update_id} ended at byte {start}: publish again.")
        return Attachment(manifest.table, pin, BytePlan(manifest.table.nbytes_column))

    def _piece(self, client: PeerClient[Welcome], update_id: str, start: int) -> Piece:
        client.send(Read(update_id=update_id, start=start))
        answer: Piece | Gone = client.wait_for(
            (Piece, Gone),
            within_s=self._timeout_s,
            is_answer=lambda it: (it.update_id, getattr(it, "start", start)) == (update_id, start),
        )
        if isinstance(answer, Gone):
            raise error_of(answer)
        return answer

    def _client(self, handle: SocketHandle) -> PeerClient[Welcome]:
        _, known = self._clients.get(handle.publisher, (None, None))
        if known is not None and not known.is_lost:
            return known
        connector = Connector(
            "the publisher",
            "127.0.0.1",
            handle.port,
            PROTOCOL,
            timeout_s=self._timeout_s,
            tls=self._tls,
            has_tls=handle.has_tls,
        )
        hello = Hello(
            worker=self._worker[:512], rank=self._rank, pid=os.getpid(), reader=self._reader
        )
        client = PeerClient(connector, bytes.fromhex(handle.token), handle.publisher, hello)
        if known is not None:
            client.take_over(known)
        self._clients[handle.publisher] = handle, client
        return client

    def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
        _, client = self._clients.get(manifest.publisher_id, (None, None))
        if client is None:
            LOG.info("the publisher will not hear of %s: not connected", report.update_id)
        else:
            client.report(report)

    def settle(self) -> None:
        """Connect again where a connection broke: reports that did not arrive are repeated."""
        for publisher_id, (handle, client) in list(self._clients.items()):
            if client.is_lost:
                try:
                    self._client(handle)
                except WeightBridgeError as error:
                    LOG.info("publisher %s is gone: %s", publisher_id, error)
                    client.hang_up()
                    del self._clients[publisher_id]

    def close(self) -> None:
        for _, client in self._clients.values():
            client.leave()
        self._clients.clear()


def main() -> None:
    model = torch.nn.Linear(4, 4)
    with (
        make_weight_bridge("socket", source_worker="trainer") as trainer,
        make_weight_bridge("socket", source_worker="rollout") as rollout,
    ):
        manifest = trainer.publish(model, weight_version=1)
        tensors = rollout.import_update(manifest.to_json())
        rollout.acknowledge(manifest.update_id)
        assert torch.equal(tensors["weight"], model.weight)
        (report,) = trainer.holders(manifest.update_id)
        print(f"version {report.weight_version} is {report.state} by {report.worker}")


if __name__ == "__main__":
    main()
