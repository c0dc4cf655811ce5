"""The publisher's control server: it notes messages of members, and the sender acts on them."""

import logging
import socket
from collections import OrderedDict
from collections.abc import Iterable

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.transports.broadcast.group import GroupStore
from rl_bridge.transports.broadcast.init_info import BroadcastInitInfo
from rl_bridge.transports.broadcast.messages import (
    PROTOCOL,
    Arrived,
    Declined,
    Failed,
    FromReceiver,
    Join,
    Ready,
    StoreValue,
    Want,
    Welcome,
)
from rl_bridge.transports.wire.channel import (
    Channel,
    Message,
    Refused,
    keep_newest,
)
from rl_bridge.transports.wire.server import Peer, PeerServer
from rl_bridge.transports.wire.tls import TLS

_LOG = logging.getLogger(__name__)

_MAX_ANSWERS = 16


class Member(Peer):
    """One receiver."""

    def __init__(self, channel: Channel, join: Join) -> None:
        """Start with the peer's own description of itself."""
        super().__init__(channel, join)
        self.group_rank = join.group_rank
        self.has: set[str] = set()
        self.wants: OrderedDict[str, tuple[Want, int]] = OrderedDict()
        """What it asked for, with the last transfer that had ended at it by then."""
        self.answers: OrderedDict[int, Message] = OrderedDict()
        self.last_ended = 0
        self.num_failures = 0

    def note_sent(self, update_id: str, transfer: int) -> None:
        """Note that a transfer has been made; a `Want` that came after its end asks for another."""
        self.has.add(update_id)
        if update_id in self.wants and self.wants[update_id][1] < transfer:
            del self.wants[update_id]


class ControlServer(PeerServer[Member, Join]):
    """The server; the sender's thread acts on what members say.

    Attributes:
        info: where it listens.

    """

    def __init__(
        self,
        listener: socket.socket,
        info: BroadcastInitInfo,
        *,
        max_members: int,
        timeout_s: float,
        tls: TLS | None,
    ) -> None:
        """Serve at `listener`, and close it at the end; each connection joins in `timeout_s`."""
        self.info = info
        self._stores: dict[int, tuple[GroupStore, tuple[Member, ...]]] = {}
        super().__init__(
            listener,
            f"broadcast group {info.group_name}",
            PROTOCOL,
            token=bytes.fromhex(info.token),
            identity=info.identity,
            timeout_s=timeout_s,
            max_members=max_members,
            tls=tls,
        )

    # ---- calls from the sender ------------------------------------------------------------------

    def send(self, members: Iterable[Member], message: Message) -> None:
        """Send a message to members; the thread notices those that are gone meanwhile."""
        for member in members:
            member.channel.send(message)
        self._wake.poke()

    def drop(self, member: Member, reason: str) -> None:
        """End a member's connection."""
        with self.changed:
            if not member.is_gone:
                _LOG.warning("%s: %s %s", self.name, member.name, reason)
                member.channel.send(Refused(reason=reason[:2000]))
                self.lose(member)

    def open_store(self, group: int, members: tuple[Member, ...]) -> GroupStore:
        """Make the rendezvous of a group; this server passes members' values on to each other."""

        def send(key: str, value: bytes) -> None:
            self.send(members, StoreValue(group=group, key=key, value=value.hex()))

        store = GroupStore(send, timeout_s=self._timeout_s)
        with self.changed:
            self._stores[group] = store, members
            for member in members:
                if member.is_gone:
                    store.fail(f"{member.name} is gone")
        return store

    def close_store(self, group: int) -> None:
        """Forget a rendezvous."""
        with self.changed:
            self._stores.pop(group, None)

    # ---- the thread -----------------------------------------------------------------------------

    def join(self, channel: Channel, join: Join) -> None:
        """See `PeerServer`."""
        if not self.has_room(channel):
            return
        try:
            if not join.is_observer:
                self._check_place(join.group_rank)
        except WeightBridgeUnavailableError as error:
            self.refuse(channel, error)
            return
        self.admit(Member(channel, join), Welcome())

    def _check_place(self, rank: int) -> None:
        size = self.info.world_size
        if not size:
            return
        if not 0 < rank < size:
            raise WeightBridgeUnavailableError(
                f"rank {rank} is not in the group {self.info.group_name!r} of world_size={size}. "
                f"Set rank_offset and source_rank so that engines take 1 to {size - 1}."
            )
        twins = [m for m in self.members if m.group_rank == rank and not m.is_observer]
        if twins:
            raise WeightBridgeUnavailableError(
                f"rank {rank} of the group {self.info.group_name!r} is taken by {twins[0].name}. "
                "Give each engine a rank of its own, or close the engine that has this rank."
            )

    def follow(self, member: Member, join: Join) -> None:
        """Make an observer a full member, if there is a place for it."""
        if join.is_observer or not member.is_observer:
            return
        try:
            self._check_place(member.group_rank)
        except WeightBridgeUnavailableError as error:
            self.drop(member, str(error))
        else:
            member.is_observer = False

    def handle(self, member: Member, message: FromReceiver) -> None:
        """See `PeerServer`."""
        match message:
            case StoreValue():
                self._pass_on(member, message)
            case Want(update_id=update_id):
                member.wants[update_id] = message, member.last_ended
                keep_newest(member.wants, _MAX_ANSWERS)
            case Ready() | Declined() | Arrived() | Failed():
                if not isinstance(message, Ready):
                    member.last_ended = message.transfer
                member.answers[message.transfer] = message
                member.answers.move_to_end(message.transfer)
                keep_newest(member.answers, _MAX_ANSWERS)
        self.changed.notify_all()

    def _pass_on(self, member: Member, message: StoreValue) -> None:
        store, members = self._stores.get(message.group, (None, ()))
        if store is not None and member in members:
            store.learn(message.key, bytes.fromhex(message.value))
            for other in members:
                if other is not member:
                    other.channel.send(message)

    def let_go(self, member: Member) -> None:
        """See `PeerServer`."""
        for store, members in self._stores.values():
            if member in members:
                store.fail(f"{member.name} is gone")
