"""The process that serves a publisher's reads, where it cannot serve any."""

import sys
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


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (40, "signal 40")])
def test_a_signal_that_ended_it_is_told_whether_it_has_a_name_or_not(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nkill -{number} $$\n", "ascii")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(TransportUnavailable, match=f"it was ended by {name}"):
        ServingProcess(backend="UCX", params={})
