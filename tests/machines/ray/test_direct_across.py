"""What one node returns by Ray Direct Transport under our name, another node gets, by the cable."""

from pathlib import Path

import pytest

from tests.machines.network.namespaces import why_not
from tests.machines.ray import direct_across
from tests.machines.ray.two_nodes import two_nodes

TIMEOUT_S = 150


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_references_cross_between_two_nodes_as_they_were_returned() -> None:
    with two_nodes(Path(direct_across.__file__)) as nodes:
        said, _ = nodes.driver.communicate(timeout=TIMEOUT_S)
        crossed = nodes.rollouts.traffic(nodes.rollout_pid).received
    assert nodes.driver.returncode == 0, said
    assert "3 references of 4194304 bytes, each as it was returned" in said
    assert crossed >= direct_across.REFERENCES * direct_across.NBYTES, crossed
