"""The examples with Ray run as their readers would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines.network.namespaces import why_not
from tests.machines.ray.two_nodes import two_nodes

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples" / "machines"
STEPS = 5
TIMEOUT_S = 150


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_reinforcement_learning_on_two_nodes_sends_its_weights_over_the_cable() -> None:
    with two_nodes(EXAMPLES / "ray_rl.py", "--steps", str(STEPS)) as nodes:
        said, _ = nodes.driver.communicate(timeout=TIMEOUT_S)
        crossed = nodes.rollouts.traffic(nodes.rollout_pid).received
    assert nodes.driver.returncode == 0, said
    found = re.search(rf"{STEPS} versions of (\d+) bytes in 2 rollouts, reward", said)
    assert found, said
    for rollout in ("rollout-0", "rollout-1"):
        assert re.search(rf"{rollout} gets weights by nixl: ", said), said
        assert "not shared-memory: one machine, but the two do not see each other's" in said
    # Each of the two got every version over it.
    assert crossed >= 2 * STEPS * int(found[1]), crossed


def test_reinforcement_learning_on_one_node_that_it_starts_itself(tmp_path: Path) -> None:
    said = run(tmp_path, "ray_rl.py", "--steps", "2", "--rollouts", "1")
    assert "rollout-0 gets weights by shared-memory: " in said, said
    assert re.search(r"2 versions of \d+ bytes in 1 rollouts, reward", said), said


def test_a_node_is_lost_and_replaced_while_training_goes_on(tmp_path: Path) -> None:
    said = run(tmp_path, "ray_lost_node.py")
    assert re.search(r"\d+ versions, one node lost and replaced", said), said
    assert "as expected: actor 'rollout-" in said


def run(folder: Path, script: str, *arguments: str) -> str:
    """What an example says that starts its cluster itself."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    return said
