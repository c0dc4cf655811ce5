"""Ways of updating one real engine, in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import track

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.installers.base import WeightInstallAdapter

__all__ = ["Ours", "alternate", "timed"]


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Ours:
    """A trainer's bridge over shared memory, and the executor of an engine."""

    def __init__(self, adapter: WeightInstallAdapter, worker: str) -> None:
        """Drive the engine by `adapter`; its ranks report as `worker`."""
        self.worker = worker
        self.publisher = make_weight_bridge("shared-memory", source_worker="trainer")
        self.executor = RolloutExecutor(
            weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
            weight_install_adapter=adapter,
        )
        self.version = 0
        self.published: str | None = None

    def update(self, weights: Any) -> dict[str, Any]:
        """Publish, then the executor's whole transaction."""
        self.version += 1
        start = time.perf_counter()
        manifest = self.publisher.publish(weights, weight_version=self.version)
        publish_s = time.perf_counter() - start
        update_s = timed(lambda: self.executor.update_weights(manifest))
        if self.published is not None:
            self.publisher.release(self.published)
        self.published = manifest.update_id
        ack = self.executor.last_ack
        assert ack is not None
        reports = [one for one in self.publisher.consumers() if one.worker == self.worker]
        return {
            "publish_s": publish_s,
            "update_s": update_s,
            "phases_ms": dict(ack.timings_ms),
            "rank_ms": dict(reports[-1].timings_ms),
            "proof": ack.proof.to_dict(),
        }

    def close(self) -> None:
        """End both."""
        self.executor.close()
        self.publisher.close()


def alternate(
    lanes: Mapping[str, Callable[[int], dict[str, Any]]],
    warmups: int,
    reps: int,
    console: Console,
) -> dict[str, list[dict[str, Any]]]:
    """Samples of all ways; each is told which of two versions comes, the one not in the engine."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in lanes}
    for turn in track(range(warmups + reps), "updates", console=console):
        for offset, (name, lane) in enumerate(lanes.items()):
            sample = lane((turn + offset) % 2)
            if turn >= warmups:
                samples[name].append(sample)
    return samples
