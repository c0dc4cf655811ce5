"""``shared-memory`` keeps every promise of a transport, with sealed memfds and with named files."""

from pathlib import Path
from typing import Any

import pytest

from rl_bridge.testing import TransportSuite
from rl_bridge.transports.shared_memory import SharedMemory


class TestSealedMemory(TransportSuite):
    transport_class = SharedMemory


class TestNamedFiles(TransportSuite):
    transport_class = SharedMemory

    @pytest.fixture
    def transport_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"directory": tmp_path / "segments"}
