"""``broadcast`` keeps every promise of a transport, over Gloo."""

from typing import Any

import pytest

from rl_bridge.testing import TransportSuite
from rl_bridge.transports.broadcast.transport import Broadcast


class TestGloo(TransportSuite):
    transport_class = Broadcast

    @pytest.fixture
    def transport_kwargs(self) -> dict[str, Any]:
        return {"timeout_s": 20.0}
