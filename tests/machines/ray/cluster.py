"""A Ray cluster for tests: small, quiet, without its token file, gone at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tests.machines.ray.actors import Elsewhere, Raising, Rollout, Trainer

ROOT = Path(__file__).resolve().parents[3]
STORE_NBYTES = 80 << 20


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """One node in this process's care."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written into the home directory
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=STORE_NBYTES,
        log_to_driver=False,
        _temp_dir=str(folder),
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def trainer(**options: Any) -> Any:
    """A trainer's actor, which can return tensors by Ray Direct Transport."""
    near = ray.method(tensor_transport="rl_bridge")(Trainer.weights)
    across = ray.method(tensor_transport="rl_bridge_nixl")(Trainer.weights_across)
    kind = type("Trainer", (Trainer,), {"weights": near, "weights_across": across})
    return ray.remote(num_cpus=0.1, enable_tensor_transport=True)(kind).options(**options).remote()


def rollout(**options: Any) -> Any:
    """A rollout's actor."""
    kind = ray.remote(num_cpus=0.1, enable_tensor_transport=True)(Rollout)
    return kind.options(**options).remote()


def raising() -> Any:
    """A rollout's actor that raises instead of answering, but for the first time."""
    return ray.remote(num_cpus=0.1)(Raising).remote()


def elsewhere(busy: Path, **options: Any) -> Any:
    """A rollout's actor that counts as one of another machine's."""
    return ray.remote(num_cpus=0.1)(Elsewhere).options(**options).remote(str(busy))
