"""A side-car's figures for Prometheus, in a registry of their own."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rl_bridge.integrations.remote.views import Status

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """Counts requests, steps and refusals; tells the engine's version when asked."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rl_bridge_sidecar_requests",
            "Requests answered, by method and status.",
            ["method", "status"],
            registry=registry,
        )
        self._steps = Counter(
            "rl_bridge_sidecar_steps",
            "Steps of updates, by step and what came of it.",
            ["step", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rl_bridge_sidecar_step_seconds",
            "How long the steps took.",
            ["step"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._phases = Gauge(
            "rl_bridge_update_phase_seconds",
            "Phases of the update that was committed last.",
            ["phase"],
            registry=registry,
        )
        self._version = Gauge(
            "rl_bridge_weight_version",
            "Version that the engine holds; -1 for none.",
            registry=registry,
        )
        self._servable = Gauge(
            "rl_bridge_engine_servable",
            "1 where the engine may answer requests.",
            registry=registry,
        )
        self._torn = Gauge(
            "rl_bridge_engine_torn", "1 where the engine is torn.", registry=registry
        )

    def answered(self, method: str, status: int) -> None:
        """Count an answer."""
        # A method is a stranger's word: each one would be a series of its own.
        known = method if method in {"GET", "POST"} else "other"
        self._requests.labels(known, str(status)).inc()

    def took(self, step: str, seconds: float, outcome: str) -> None:
        """Count a step."""
        self._steps.labels(step, outcome).inc()
        self._seconds.labels(step).observe(seconds)

    def phases(self, timings_ms: Mapping[str, float]) -> None:
        """Take note of a committed update."""
        for phase, milliseconds in timings_ms.items():
            self._phases.labels(phase).set(milliseconds / 1e3)

    def text(self, status: Status) -> bytes:
        """The page that Prometheus reads."""
        version = status.active_weight_version
        self._version.set(-1 if version is None else version)
        self._servable.set(status.servable)
        self._torn.set(status.state == "torn")
        return bytes(generate_latest(self._registry))
