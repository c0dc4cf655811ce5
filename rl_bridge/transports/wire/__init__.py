"""What a transport over sockets is made with: one server, one client, and their messages.

`PeerServer` is a publisher's side and `PeerClient` a reader's. Between them they greet with a
token, frame and bound messages, notice who is gone, keep what readers report, and speak TLS where
both sides have it. A transport adds kinds of messages (`Message`), what its server answers to them,
and a handle that leads there.
"""

from rl_bridge.transports.wire.channel import (
    Channel,
    Count,
    Gone,
    Handle,
    Leave,
    Message,
    PeerJoin,
    PeerProtocol,
    Refused,
    Reported,
    Text,
    UpdateId,
    checked_address,
    checked_port,
    error_of,
    read_handle,
)
from rl_bridge.transports.wire.client import Connector, HungUp, PeerClient
from rl_bridge.transports.wire.server import Peer, PeerServer, listen
from rl_bridge.transports.wire.tls import TLS, load_tls

__all__ = [
    "TLS",
    "Channel",
    "Connector",
    "Count",
    "Gone",
    "Handle",
    "HungUp",
    "Leave",
    "Message",
    "Peer",
    "PeerClient",
    "PeerJoin",
    "PeerProtocol",
    "PeerServer",
    "Refused",
    "Reported",
    "Text",
    "UpdateId",
    "checked_address",
    "checked_port",
    "error_of",
    "listen",
    "load_tls",
    "read_handle",
]
