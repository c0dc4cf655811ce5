"""The engine's end: a connection to each publisher that it imports from, and its arrivals."""

import logging
import os
import weakref
from collections.abc import Callable

from rl_bridge.errors import (
    SegmentError,
    TransferTimeout,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.views import Attachment
from rl_bridge.transports.broadcast.messages import (
    Backend,
    BroadcastHandle,
    BroadcastInitInfo,
    Join,
)
from rl_bridge.transports.broadcast.receiver import ControlClient
from rl_bridge.transports.wire.arenas import Arenas, Arrivals
from rl_bridge.transports.wire.channel import read_handle
from rl_bridge.transports.wire.ends import Options, PeerConsumer

_LOG = logging.getLogger(__name__)


class BroadcastConsumer(PeerConsumer):
    """See `rl_bridge.transports.base.ConsumerEnd`."""

    def __init__(
        self,
        worker: str,
        rank: int,
        *,
        backend: Backend,
        make_arenas: Callable[[], Arenas],
        init_info: BroadcastInitInfo | None,
        override: bool,
        options: Options,
    ) -> None:
        """Join the group of `init_info` at once, if given; other groups when a manifest comes."""
        super().__init__(worker, rank, backend=backend, make_arenas=make_arenas, options=options)
        self._init_info = init_info
        self._override = override
        self._clients: dict[str, tuple[ControlClient, Arrivals]] = {}
        # The next version is offered before anybody here asks for it: as much of it is taken as
        # was read of the last one.
        self._takes_offers = True
        # A bridge that is dropped instead of closed must not go on receiving.
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._clients)
        if init_info is not None:
            self._client(init_info, is_observer=False)

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        """Fetch a version, joining its publisher's group if need be, and lease it."""
        self._takes_offers = True
        return self._attach(manifest, is_observer=False)

    def lease(self, manifest: WeightUpdateManifest) -> Attachment:
        """Get a version's header and report on it; no byte of it is sent here."""
        self._takes_offers = False
        return self._attach(manifest, is_observer=False, is_read=False)

    def look(self, manifest: WeightUpdateManifest) -> Attachment:
        """Fetch a version as an observer, which leaves no record and gets no later versions."""
        return self._attach(manifest, is_observer=True)

    def _attach(
        self, manifest: WeightUpdateManifest, *, is_observer: bool, is_read: bool = True
    ) -> Attachment:
        handle = self._handle(manifest)
        update_id, table = manifest.update_id, manifest.table
        is_last_try = False
        while True:
            client, arrivals = self._client(handle.group, is_observer=is_observer)
            try:
                offer = client.fetch(
                    update_id,
                    generation=handle.generation,
                    arena_nbytes=table.arena_nbytes,
                    is_read=is_read,
                )
            except SegmentError:
                # Only the connection may be broken: try once more, on a new one.
                if not client.is_lost or is_last_try:
                    raise
                is_last_try = True
                continue
            if offer is not None:
                return arrivals.attach_part(
                    arrivals.reserve(0),
                    update_id,
                    table,
                    header=bytes.fromhex(offer.header),
                    num_threads=self._options.num_threads,
                    room_nbytes=0,
                )
            attachment = arrivals.attach(
                update_id,
                table,
                generation=handle.generation,
                num_threads=self._options.num_threads,
            )
            if attachment is not None:
                return attachment
            # It arrived, and was evicted for newer versions before it was attached.
            if is_last_try:
                raise TransferTimeout(
                    f"update {update_id}: newer versions took its place. Import the publisher's "
                    "latest manifest, or import again."
                )
            is_last_try = True

    def _handle(self, manifest: WeightUpdateManifest) -> BroadcastHandle:
        handle = read_handle(BroadcastHandle, manifest)
        handle.group.require_backend("broadcast", self._backend)
        return handle

    def _client(
        self, group: BroadcastInitInfo, *, is_observer: bool
    ) -> tuple[ControlClient, Arrivals]:
        """Find or make the connection to a publisher."""
        known = self._clients.get(group.publisher_id)
        if known is not None and not known[0].is_lost and _is_same(known[0].info, group):
            if not is_observer:
                known[0].take_offers(unasked=self._takes_offers)
                known[0].follow()
            return known
        rivals = self._rivals(group)
        mine = self._init_info
        if mine is not None and _is_same(mine, group):
            group = mine  # it has this side's place in the group, which no manifest has
        arrivals = known[1] if known is not None else self._arrivals(group)
        client = ControlClient(
            group,
            arrivals,
            Join(
                # A consumer that left a record keeps it when it reconnects.
                **self._name(is_observer=is_observer and (known is None or known[0].is_observer)),
                group_rank=self._rank + group.rank_offset,
            ),
            self._options,
            takes_offers=self._takes_offers,
        )
        # Only now: a manifest that leads nowhere must not end a connection that works.
        self._clients[group.publisher_id] = client, arrivals
        self._leave(rivals)
        if known is not None:
            client.take_over(known[0])
        return client, arrivals

    def _arrivals(self, group: BroadcastInitInfo) -> Arrivals:
        return Arrivals(self._make_arenas(), f"rlb-{group.publisher_id[:12]}-in")

    def _rivals(self, group: BroadcastInitInfo) -> list[str]:
        """Find other publishers whose groups have the same name, and may be left."""
        found = []
        for publisher_id, (client, _) in self._clients.items():
            if publisher_id == group.publisher_id or client.info.group_name != group.group_name:
                continue
            if not client.is_lost and not self._override:
                raise WeightBridgeUnavailableError(
                    f"this side is in a group {group.group_name!r} already, of publisher "
                    f"{publisher_id} at {client.info.address} port {client.info.port}. Give each "
                    "group a name of its own, close the other group, or pass override=True."
                )
            found.append(publisher_id)
        return found

    def _leave(self, rivals: list[str]) -> None:
        for publisher_id in rivals:
            client, arrivals = self._clients[publisher_id]
            _LOG.info("left the group %r of %s", client.info.group_name, publisher_id)
            _close(client, arrivals)
            del self._clients[publisher_id]

    def _client_of(self, publisher_id: str) -> ControlClient | None:
        known = self._clients.get(publisher_id)
        return None if known is None else known[0]

    def settle(self) -> None:
        """Release versions that were imported, and connections to publishers that are gone."""
        for publisher_id, (client, arrivals) in list(self._clients.items()):
            arrivals.sweep()
            if client.is_lost and not arrivals.is_needed:
                _close(client, arrivals)
                del self._clients[publisher_id]

    def close(self) -> None:
        """Leave all groups; tensors keep the memory that they show."""
        self._finalizer()


def _is_same(one: BroadcastInitInfo, other: BroadcastInitInfo) -> bool:
    return one.model_copy(update={"rank_offset": 1}) == other.model_copy(update={"rank_offset": 1})


def _close(client: ControlClient, arrivals: Arrivals) -> None:
    # If a slice is still on the wire, its thread keeps the memory.
    if client.close():
        arrivals.close()


def _end(pid: int, clients: dict[str, tuple[ControlClient, Arrivals]]) -> None:
    if os.getpid() != pid:
        return
    for client in list(clients.values()):
        _close(*client)
    clients.clear()
