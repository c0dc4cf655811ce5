"""A reader's connection to one publisher: control messages, and the agent that it reads from.

The end of a lease may wait for the next message to the same publisher (`send_deferred`), since each
message wakes a process there.
"""

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.nixl.agent import Agent, AgentError
from rl_bridge.transports.nixl.messages import (
    PROTOCOL,
    AskCatalog,
    Catalog,
    Entry,
    Help,
    Join,
    Lapsed,
    Lease,
    Leased,
    NIXLEndpoint,
    Renew,
    Unlease,
    Welcome,
)
from rl_bridge.transports.wire.channel import Gone, error_of
from rl_bridge.transports.wire.client import Connector, HungUp, PeerClient
from rl_bridge.transports.wire.tls import TLS

_NAME = "the publisher's NIXL server"


class ControlClient(PeerClient[Welcome]):
    """One publisher, as a reader sees it. Under the consumer's lock, except `report`."""

    def __init__(
        self,
        endpoint: NIXLEndpoint,
        token: bytes,
        agent: Callable[[], Agent],
        *,
        worker: str,
        rank: int,
        is_observer: bool,
        timeout_s: float,
        reader: str,
        within_s: float | None = None,
        tls: TLS | None,
    ) -> None:
        """Connect, prove that the token is known, and join, within the shorter of the two times.

        Raises:
            SegmentError: the publisher is gone, or refuses the token.
            WeightBridgeUnavailableError: it has no room for this side, or a certificate is refused.
            TransferTimeout: it does not answer in time.

        """
        self.endpoint = endpoint
        self.needs_help = True
        """Whether the publisher must make progress while this side reads."""
        self.is_fresh = True
        """Whether nothing was read yet: a connection that is being made always needs help."""
        self.epoch = 0
        """Grows when the peer is made anew: reads that were prepared before are void."""
        self.known_slots: dict[int, Leased] = {}
        self._deferred: list[bytes] = []
        self._timeout_s = timeout_s
        connector = Connector(
            f"{_NAME} {endpoint.server_name}",
            endpoint.address,
            endpoint.port,
            PROTOCOL,
            timeout_s=timeout_s,
            within_s=within_s,
            tls=tls,
            has_tls=endpoint.has_tls,
        )
        join = Join(
            worker=worker[:512],
            rank=rank,
            pid=os.getpid(),
            reader=reader,
            is_observer=is_observer,
            timeout_s=timeout_s,
        )
        super().__init__(connector, token, endpoint.identity, join)
        try:
            self.lease_s = self.welcome.timeout_s
            self._conn = bytes.fromhex(self.welcome.metadata)
            self._remote_epoch = self.welcome.epoch
            self._agent = agent()
            self.peer = self._agent.add_peer(self._conn, is_new=True)
        except BaseException:
            self.hang_up()
            raise

    # ---- sending --------------------------------------------------------------------------------

    def send_text(self, text: bytes) -> None:
        """Send the text of a message behind the deferred ones, in one go."""
        deferred, self._deferred = self._deferred, []
        self._channel.send_bytes(*deferred, text)

    def send_deferred(self) -> None:
        """Send the deferred messages that no other message took along."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            self._channel.send_bytes(*deferred)

    # ---- leases ---------------------------------------------------------------------------------

    def ask_for_lease(self, update_id: str, *, generation: int, arena_nbytes: int) -> None:
        """Ask for a lease; `wait_for_lease` waits for the answer."""
        self.send(
            Lease(
                update_id=update_id,
                generation=generation,
                arena_nbytes=arena_nbytes,
                known=tuple(self.known_slots),
                needs_help=self.needs_help,
                epoch=self._remote_epoch,
            )
        )

    def wait_for_lease(self, update_id: str) -> Leased:
        """Wait for the answer to `ask_for_lease`, and note how to read there.

        Raises:
            StaleUpdate: the publisher released it.
            SegmentError: it is not what was asked for.
            AgentError: the connection ended; the publisher may still live.
            TransferTimeout: the publisher does not answer in time.

        """
        try:
            message: Leased | Gone = self.wait_for(
                (Leased, Gone),
                within_s=self._timeout_s,
                is_answer=lambda answer: answer.update_id == update_id,
            )
        except HungUp as error:
            msg = f"update {update_id}: the connection to its publisher ended."
            raise AgentError(msg) from error
        if isinstance(message, Gone):
            raise error_of(message)
        if not len(message.addresses) == len(message.starts) == len(message.nbytes):
            msg = (
                f"{self.where} describes update {update_id} with lists of different lengths. "
                "Use one release on both sides."
            )
            raise MalformedManifest(msg)
        self._learn(message)
        return message

    def _learn(self, leased: Leased) -> None:
        if leased.moved:
            self._conn = bytes.fromhex(leased.moved)
            self._remote_epoch = leased.epoch
            self.needs_help = True  # as the publisher assumes
            self._reconnect_peer()
        if leased.metadata:
            if any(_overlaps(leased, at) for at in self.known_slots.values()):
                # The same memory under a new registration: the library must forget the old one.
                self._reconnect_peer()
            for metadata in leased.metadata:
                self._agent.add_peer(bytes.fromhex(metadata))
        elif leased.slot not in self.known_slots:
            msg = f"{self.where} did not say how to reach slot {leased.slot}. Use one release."
            raise MalformedManifest(msg)
        self.known_slots[leased.slot] = leased

    def _reconnect_peer(self) -> None:
        self._agent.remove_peer(self.peer)
        self.peer = self._agent.add_peer(self._conn, is_new=True)
        self.known_slots.clear()
        self.is_fresh = True
        self.epoch += 1

    def has_lapsed(self, update_id: str) -> bool:
        """Whether the publisher reported by now that a lease is over; skips its other messages.

        A report about an earlier lease of the same update came before the answer to this lease.
        """
        while (text := self._channel.take()) is not None:
            message = PROTOCOL.parse_publisher(text)
            if isinstance(message, Lapsed) and message.update_id == update_id:
                return True
        return False

    def renew(self, update_id: str) -> None:
        """Report that this side is still reading."""
        self.send(Renew(update_id=update_id))

    def help(self, *, is_needed: bool) -> None:
        """Ask the publisher to make progress, or to stop; asked again, it sees to who serves."""
        self.needs_help = is_needed
        self.send(Help(is_needed=is_needed))

    def unlease(self, update_id: str, *, with_next: bool = False) -> None:
        """Report that this side is done: now, or together with the next message."""
        message = Unlease(update_id=update_id)
        if with_next:
            self._deferred.append(message.model_dump_json().encode())
        else:
            self.send(message)

    def catalog(self) -> tuple[Entry, ...]:
        """Ask for the versions that the publisher holds.

        Raises:
            SegmentError: it is gone.
            TransferTimeout: it does not answer in time.

        """
        return self.ask(AskCatalog(), Catalog, within_s=self._timeout_s).entries

    # ---- the end --------------------------------------------------------------------------------

    def close(self, *, keeps_peer: bool = False) -> None:
        """Leave, and forget the peer. Idempotent; nothing may be read from the peer meanwhile.

        Args:
            keeps_peer: another connection goes on with the peer.

        """
        self.leave()
        if not keeps_peer and not self._agent.is_closed:
            self._agent.remove_peer(self.peer)


def _overlaps(one: Leased, other: Leased) -> bool:
    if one.slot == other.slot:
        return False
    mine, theirs = _bounds(one), _bounds(other)
    order = np.argsort(theirs[0])
    starts, ends = theirs[0][order], theirs[1][order]
    # Among the ranges that begin before mine ends, only the last can reach into mine.
    last = np.searchsorted(starts, mine[1], side="left") - 1
    return bool(((last >= 0) & (ends[last] > mine[0])).any())


def _bounds(leased: Leased) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    starts = np.array([*leased.addresses, leased.stamp], np.uint64)
    return starts, starts + np.array([*leased.nbytes, 1], np.uint64)
