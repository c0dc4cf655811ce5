"""Parts of ``nixl`` that need no library: plans of reads, and peers that do not answer."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rl_bridge.errors import MalformedManifest, TransportUnavailable
from rl_bridge.transports.nixl.messages import Leased
from rl_bridge.transports.nixl.reading import STEP_NBYTES, plan_steps
from rl_bridge.transports.nixl.serving_process import ServingProcess

ARENA = 3 * STEP_NBYTES + 4096


def leased(*ranges: tuple[int, int]) -> Leased:
    """A publisher's ranges (first byte in the arena, size), one behind the other in its memory."""
    starts, nbytes = zip(*ranges, strict=True)
    return Leased(
        update_id="0" * 32,
        slot=1,
        metadata=(),
        stamp=0,
        addresses=tuple(1_000_000 + start for start in starts),
        starts=starts,
        nbytes=nbytes,
    )


def test_everything_is_read_once_in_steps_from_where_it_lies() -> None:
    steps = plan_steps(leased((0, 4096), (4096, ARENA - 4096)), ARENA, None, None)
    assert steps.places[0] == 0
    assert (steps.places[:-1] + steps.nbytes[:-1] == steps.places[1:]).all()
    assert int(steps.places[-1] + steps.nbytes[-1]) == ARENA == steps.marks[-1]
    assert (steps.addresses == (steps.places + 1_000_000).astype(np.uint64)).all()
    assert steps.nbytes.max() <= STEP_NBYTES


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, ARENA + 1)],
        [(0, ARENA), (ARENA, 0)],
        [(0, 8192), (4096, 4096)],
        [(4096, 4096), (0, 4096)],
        # Where the range ends, the sum has wrapped around.
        [(0, ARENA), (2**63 - 1, 2**63 - 1)],
        [(2**62, 2**63 - 1)],
        [(2**63 - 1, 1)],
    ],
)
@pytest.mark.parametrize("asked", [None, (0, 4096)])
def test_a_publisher_cannot_have_more_written_than_the_arena(
    ranges: list[tuple[int, int]], asked: tuple[int, int] | None
) -> None:
    starts, nbytes = (None, None) if asked is None else map(np.array, ([asked[0]], [asked[1]]))
    with pytest.raises(MalformedManifest, match="do not fit its arena"):
        plan_steps(leased(*ranges), ARENA, starts, nbytes)


def test_over_a_network_few_bytes_between_ranges_are_read_besides_the_closest_first() -> None:
    gaps = np.array([64, 4096, 1792, 5000, *[1024] * 96])
    nbytes = np.full(len(gaps) + 1, 3200)
    starts = np.cumsum([0, *nbytes[:-1] + gaps])
    asked, far = int(nbytes.sum()), [64, *[1024] * 9]  # 10,100 bytes are a 32nd part
    for is_local, joined in ((False, far), (True, [*gaps[:3], *gaps[4:]])):
        steps = plan_steps(leased((0, ARENA)), ARENA, starts, nbytes, is_local=is_local)
        assert int(steps.nbytes.sum()) == asked + sum(joined)
        assert len(steps.nbytes) == len(nbytes) - len(joined)


def test_bytes_between_two_ranges_are_not_read_with_targets() -> None:
    starts, nbytes = np.array([64, 256, 2 * STEP_NBYTES - 4096]), np.array([100, 300, 8192])
    targets = np.array([5000, 0, 8192])
    steps = plan_steps(leased((0, ARENA)), ARENA, starts, nbytes, targets=targets)
    assert (steps.addresses - 1_000_000).tolist() == [64, 256, starts[2], 2 * STEP_NBYTES]
    assert steps.nbytes.tolist() == [100, 300, 4096, 4096]
    assert steps.places.tolist() == [5000, 0, 8192, 8192 + 4096]


@pytest.mark.parametrize("ranges", [[(0, 300)], [(0, 100), (200, ARENA - 200)]])
def test_bytes_that_the_publisher_does_not_hold_are_not_replaced_by_others(
    ranges: list[tuple[int, int]],
) -> None:
    starts, nbytes = np.array([64, 256]), np.array([100, 300])
    steps = plan_steps(leased(*ranges), ARENA, starts, nbytes, targets=np.array([5000, 0]))
    for place, size, address in zip(steps.places, steps.nbytes, steps.addresses, strict=True):
        at = int(address) - 1_000_000
        asked = 0 if at < 256 else 1
        assert starts[asked] <= at < at + size <= starts[asked] + nbytes[asked]
        assert place == (5000, 0)[asked] + at - starts[asked]


def children() -> set[str]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text("ascii").split()}


def test_a_serving_process_that_cannot_open_the_library_is_ended() -> None:
    before = children()
    with pytest.raises(TransportUnavailable, match="nixl"):
        ServingProcess(backend="NO_SUCH_BACKEND", params={})
    assert children() <= before


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (40, "signal 40")])
def test_the_error_names_the_signal_that_ended_the_serving_process(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nkill -{number} $$\n", "ascii")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(TransportUnavailable, match=f"it was ended by {name}"):
        ServingProcess(backend="UCX", params={})
