"""Which bytes are read: as a publisher says where they lie, as far as that can be."""

import numpy as np
import pytest

from rl_bridge.errors import MalformedManifest
from rl_bridge.transports.nixl.messages import Leased
from rl_bridge.transports.nixl.plan import STEP_NBYTES, plan_steps

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
