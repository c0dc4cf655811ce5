"""Nobody who is killed or stopped on the control plane leaves an engine with a mixture."""

import pytest

from tests.machines.plane import Plane


@pytest.mark.parametrize("transport", ["nixl", "broadcast"])
def test_an_engine_is_at_one_version_whoever_dies_or_hangs(transport: str) -> None:
    with Plane(transport, seed=3) as plane:
        found = plane.run(range(1, 41))
    assert found["counts"]["installed"] > 20
    assert sum(num for what, num in found["counts"].items() if what.startswith("kill")) > 0
    assert found["grew_by"]["threads"] <= 2
    assert found["grew_by"]["descriptors"] <= 8
