"""Which bytes are read: as a publisher says where they lie, as far as that can be."""

import numpy as np
import pytest

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.nixl.messages import Leased
from rl_bridge.transports.nixl.reading import STEP_NBYTES, plan_steps

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


def test_what_lies_between_two_ranges_is_not_read_to_where_others_belong() -> None:
    starts, nbytes = np.array([64, 256, 2 * STEP_NBYTES - 4096]), np.array([100, 300, 8192])
    targets = np.array([5000, 0, 8192])
    steps = plan_steps(leased((0, ARENA)), ARENA, starts, nbytes, targets=targets)
    assert (steps.addresses - 1_000_000).tolist() == [64, 256, starts[2], 2 * STEP_NBYTES]
    assert steps.nbytes.tolist() == [100, 300, 4096, 4096]
    assert steps.places.tolist() == [5000, 0, 8192, 8192 + 4096]


@pytest.mark.parametrize("ranges", [[(0, 300)], [(0, 100), (200, ARENA - 200)]])
def test_where_a_publisher_holds_less_nothing_else_is_read_in_its_place(
    ranges: list[tuple[int, int]],
) -> None:
    starts, nbytes = np.array([64, 256]), np.array([100, 300])
    steps = plan_steps(leased(*ranges), ARENA, starts, nbytes, targets=np.array([5000, 0]))
    for place, size, address in zip(steps.places, steps.nbytes, steps.addresses, strict=True):
        at = int(address) - 1_000_000
        asked = 0 if at < 256 else 1
        assert starts[asked] <= at < at + size <= starts[asked] + nbytes[asked]
        assert place == (5000, 0)[asked] + at - starts[asked]
