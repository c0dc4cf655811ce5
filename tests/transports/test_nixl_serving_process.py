"""The process that serves a publisher's reads, where it cannot serve any."""

from pathlib import Path

import pytest

from rl_bridge.errors import TransportUnavailable
from rl_bridge.transports.nixl.serving_process import ServingProcess


def children() -> set[str]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text("ascii").split()}


def test_a_process_that_cannot_open_the_library_is_not_left_behind() -> None:
    before = children()
    with pytest.raises(TransportUnavailable, match="nixl"):
        ServingProcess(backend="NO_SUCH_BACKEND", params={})
    assert children() <= before
