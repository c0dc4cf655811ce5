"""A trainer in a process of its own, for the tests of `nixl`."""

import os
import signal
from collections.abc import Callable
from typing import Any, Self, cast

import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.bridge.bridges import NIXLTensorBridge, make_weight_bridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing.strategies import bytes_of
from rl_bridge.transports.nixl.publisher import NIXLPublisher
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.serving_process import ServingProcess
from tests.helpers import stop
from tests.machines.roles import settle_in

__all__ = ["SIZE", "Between", "Reader", "Trainer", "weights"]

SIZE = 48 << 20
"""Bytes of the tensor: several steps of a read."""


def weights(version: int) -> dict[str, torch.Tensor]:
    """A state dict whose bytes follow from the version."""
    values = torch.arange(SIZE // 8, dtype=torch.int64)
    return {"w": values * (2 * version + 1)}


class Between:
    """Calls something between two steps of a read: the barrier of these tests."""

    def __init__(self, action: Callable[[], object], *, at: str, times: int) -> None:
        self.action, self.at, self.left, self.calls = action, at, times, 0
        self.step = Reading.step

    def __enter__(self) -> Self:
        outer = self

        def step(one: Reading) -> bool:
            if one._stage == outer.at and outer.left and (outer.at != "bytes" or one._next):
                outer.left -= 1
                outer.calls += 1
                outer.action()
            return outer.step(one)

        Reading.step = step  # type: ignore[method-assign,assignment]  # that is what it is for
        return self

    def __exit__(self, *problem: object) -> None:
        Reading.step = self.step  # type: ignore[method-assign]  # as it was


class Reader:
    """Reads over `nixl`."""

    def __init__(self, ucx: dict[str, str], timeout_s: float, namespace: str = "") -> None:
        settle_in(namespace, ucx)
        made = make_weight_bridge("nixl", source_worker="reader", timeout_s=timeout_s)
        self.bridge = cast("NIXLTensorBridge", made)
        self.tensors: Any = None

    def read(self, manifest: str, kills: int = 0, stops: int = 0) -> int | str:
        """Import, and kill or stop a process in the middle of it; returns what came of it."""

        def kill() -> None:
            if kills:
                os.kill(kills, signal.SIGKILL)
            if stops:
                stop(stops)

        try:
            with Between(kill, at="bytes", times=1) as seen:
                tensors = self.bridge.import_update(manifest)
        except WeightBridgeError as error:
            return type(error).__name__
        assert seen.calls == 1
        self.tensors = tensors
        self.bridge.acknowledge(WeightUpdateManifest.from_json(manifest).update_id)
        return self.holds()

    def fetch(self, manifest: str) -> int:
        """Import a small version; returns it."""
        return int(self.bridge.import_update(manifest)["w"][0])

    def holds(self) -> int:
        """The version that is here, or 0."""
        here = bytes_of(self.tensors["w"])
        return next((n for n in range(1, 9) if bytes_of(weights(n)["w"]) == here), 0)


class Trainer:
    """Publishes over `nixl`."""

    def __init__(
        self, ucx: dict[str, str] | None = None, namespace: str = "", **options: Any
    ) -> None:
        settle_in(namespace, ucx)
        made = make_weight_bridge("nixl", source_worker="trainer", suspicious="off", **options)
        self.bridge = cast("NIXLTensorBridge", made)
        self.published: list[str] = []

    def publish(self, version: int, small: bool = False) -> str:
        state = {"w": torch.full((8,), version)} if small else weights(version)
        manifest = self.bridge.publish(state, weight_version=version)
        self.published.append(manifest.update_id)
        return manifest.to_json()

    def release_all(self) -> None:
        while self.published:
            self.bridge.release(self.published.pop())

    def help(self, rounds: int) -> None:
        """Let the network move what it still has."""
        end = cast("NIXLPublisher", self.bridge.publisher.end)
        for _ in range(rounds):
            end._host.progress()

    def server_pid(self) -> int:
        """The process that serves reads."""
        host = cast("NIXLPublisher", self.bridge.publisher.end)._host
        assert isinstance(host, ServingProcess)
        return host.pid

    def states(self, manifest: str) -> list[str]:
        update_id = WeightUpdateManifest.from_json(manifest).update_id
        return [one.state for one in self.bridge.consumers() if one.update_id == update_id]

    def close(self) -> None:
        self.bridge.close()

    def registered(self) -> int:
        return cast("NIXLPublisher", self.bridge.publisher.end).num_registered

    def readers(self) -> list[str]:
        return [name for entry in self.bridge.catalog() for name in entry.readers]
