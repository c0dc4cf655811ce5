"""A node of a Ray cluster is killed and replaced while training goes on.

Two nodes on this machine, by Ray's own `Cluster`; the actors are those of `ray_rl.py`, beside it.
"""

import os
import shutil
import tempfile
import time
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray_rl import start_rollout, start_trainer, train_step

from rl_bridge import EngineLost
from rl_bridge.ray import RolloutFleet

PATIENCE_S = 60.0
ROLLOUT_NODE: dict[str, Any] = {
    "num_cpus": 1,
    "resources": {"rollout": 1},  # room for one
    "object_store_memory": 80 << 20,
}


def main() -> None:
    # Both nodes keep their sockets there; a long path would not fit into their addresses.
    folder = tempfile.mkdtemp(prefix="ray")
    os.environ["RAY_TMPDIR"] = folder
    head = {
        "num_cpus": 1,
        "resources": {"trainer": 1, "rollout": 1},
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    doomed = cluster.add_node(**ROLLOUT_NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        trainer = start_trainer(num_steps=20)
        fleet = RolloutFleet(trainer)
        actors = {f"rollout-{seed}": start_rollout(seed) for seed in range(2)}
        homes = {}
        for name, actor in actors.items():
            fleet.join(name, actor)
            homes[name] = fleet.ask(name).node
        for step in range(1, 4):
            train_step(trainer, fleet, actors, step)
        assert len(fleet.routable) == 2

        # The node goes. Its actor may still answer for a moment; then training goes on without it.
        lost = next(name for name, node in homes.items() if node == doomed.node_id)
        (kept,) = actors.keys() - {lost}
        cluster.remove_node(doomed, allow_graceful=False)
        end = time.monotonic() + PATIENCE_S
        while lost in fleet.routable and time.monotonic() < end:
            step += 1
            train_step(trainer, fleet, actors, step)
            assert kept in fleet.routable
        for _ in range(3):
            step += 1
            train_step(trainer, fleet, actors, step)
            assert kept in fleet.routable
            assert lost not in fleet.routable
        try:
            fleet.ask(lost)
        except EngineLost as error:
            print(f"as expected: {error}")

        # Another node comes. The new actor has the current version before it is asked for anything.
        cluster.add_node(**ROLLOUT_NODE)
        cluster.wait_for_nodes()
        actors[lost] = start_rollout(seed=7)
        print(f"{lost} gets weights by {fleet.join(lost, actors[lost])}")
        assert fleet.ask(lost).active_version == step
        for _ in range(3):
            step += 1
            train_step(trainer, fleet, actors, step)
            assert kept in fleet.routable
        assert len(fleet.routable) == 2
        print(f"{step} versions, one node lost and replaced, the other one had each of them")
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
