"""How bytes travel: what a transport consists of, and which ones there are.

A transport of your own is a `Transport` with its two ends, made known by `register_transport`. The
other names are what it is handed, what it makes, and what may help it.
"""

from rl_bridge.memory.control import (
    Record,
    UpdateReport,
)
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.segment import (
    is_held,
    try_exclusive,
)
from rl_bridge.memory.views import (
    Attachment,
    Pin,
    anonymous_pin,
)
from rl_bridge.memory.vm import read_into
from rl_bridge.transports.base import (
    Availability,
    Carried,
    ConsumerEnd,
    PartRequest,
    PublisherEnd,
    Transport,
)
from rl_bridge.transports.registry import (
    ALIASES,
    TRANSPORTS,
    canonical_name,
    probe,
    register_transport,
    transport_class,
)
from rl_bridge.transports.wire.tls import TLSFiles

__all__ = [
    "ALIASES",
    "TRANSPORTS",
    "Attachment",
    "Availability",
    "BytePlan",
    "Carried",
    "ConsumerEnd",
    "PackPlan",
    "PartRequest",
    "Pin",
    "PublisherEnd",
    "Record",
    "TLSFiles",
    "Transport",
    "UpdateReport",
    "anonymous_pin",
    "canonical_name",
    "is_held",
    "probe",
    "read_into",
    "register_transport",
    "transport_class",
    "try_exclusive",
]
