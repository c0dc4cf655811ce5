"""Tensors returned through Ray Direct Transport under our name are sealed and verified."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from rl_bridge.testing.processes import until
from tests.machines.network.namespaces import why_not
from tests.machines.ray import direct_across
from tests.machines.ray.cluster import rollout, trainer
from tests.machines.ray.two_nodes import two_nodes

pytestmark = pytest.mark.usefixtures("one_node")

TIMEOUT_S = 90.0  # an actor imports torch first, beside others that do


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """An actor that returns tensors, and one that takes them."""
    return trainer(), rollout()


def memories(pid: int) -> set[int]:
    """The sealed memories that a process has open, by inode."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile, or another user's
            if str(path.readlink()).startswith("/memfd:rlb-"):
                found.add(path.stat().st_ino)
    return found


def steps_of(actor: Any) -> int:
    """Steps that the trainer has taken, by what it holds."""
    return int(get(actor.weights_to_publish.remote())["b"][0, 0])


@pytest.mark.parametrize("method", ["weights", "weights_across"])
def test_a_reference_gives_the_values_of_its_return_also_after_the_next_step(
    pair: Any, method: str
) -> None:
    source, taker = pair
    weights = getattr(source, method)
    steps = steps_of(source)
    reference = weights.remote()
    assert get(taker.take.remote(reference, steps))
    get(source.step.remote())
    assert get(taker.take.remote(reference, steps))
    assert get(taker.take.remote(weights.remote(), steps + 1))


def test_what_one_receiver_writes_no_other_one_sees(pair: Any) -> None:
    source, taker = pair
    steps = steps_of(source)
    reference = source.weights.remote()
    get(taker.write.remote(reference))
    other = rollout()
    assert get([actor.take.remote(reference, steps) for actor in (taker, other)]) == [True, True]


def test_a_damaged_byte_is_refused(pair: Any) -> None:
    source, taker = pair
    reference = source.weights.remote()
    ray.wait([reference], timeout=TIMEOUT_S)
    get(source.damage.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="tensor checksum mismatch"):
        get(taker.take.remote(reference, steps_of(source)))
    del reference
    assert get(taker.take.remote(source.weights.remote(), steps_of(source)))


def test_slots_are_used_again_when_references_are_gone(pair: Any) -> None:
    source, taker = pair
    steps = steps_of(source)
    sizes = []
    for _ in range(12):
        assert get(taker.take.remote(source.weights.remote(), steps))
        sizes.append(get(source.direct_nbytes.remote()))
    assert max(sizes[4:]) <= max(sizes[:4]), sizes


def test_the_memory_of_a_dead_source_goes_with_it(pair: Any) -> None:
    del pair
    source, taker = trainer(), rollout()
    pid = get(source.pid.remote())
    reference = source.weights.remote()
    assert get(taker.take.remote(reference, 0))
    sealed = memories(pid)
    assert sealed
    ray.kill(source)
    until(lambda: not Path(f"/proc/{pid}").exists(), what="the source is gone")
    # (Who has mapped it may go on reading.)
    with pytest.raises(ray.exceptions.RayError):
        get(rollout().take.remote(reference, 0))
    # It has no name: it is gone when those who took it let go of it.
    taken = get(taker.pid.remote())
    ray.kill(taker)
    until(lambda: not Path(f"/proc/{taken}").exists(), what="the taker is gone")
    alive = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    assert not sealed & set().union(*map(memories, alive))


# ---- between nodes -------------------------------------------------------------------------------


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_references_cross_between_two_nodes_as_they_were_returned() -> None:
    with two_nodes(Path(direct_across.__file__)) as nodes:
        said, _ = nodes.driver.communicate(timeout=150)
        crossed = nodes.rollouts.traffic(nodes.rollout_pid).received
    assert nodes.driver.returncode == 0, said
    assert "3 references of 4194304 bytes, each as it was returned" in said
    assert crossed >= direct_across.REFERENCES * direct_across.NBYTES, crossed
