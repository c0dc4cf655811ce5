"""Trainers and engines for the tests of `nixl`, here and in processes of their own."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.bridge.bridges import NIXLTensorBridge, make_weight_bridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.memory import vm
from rl_bridge.testing.processes import until
from rl_bridge.testing.tensors import bytes_of
from rl_bridge.transports.nixl.consumer import NIXLConsumer
from rl_bridge.transports.nixl.fetch import ControlClient, Source
from rl_bridge.transports.nixl.reading import Reading
from rl_bridge.transports.nixl.server import NIXLPublisher
from rl_bridge.transports.nixl.serving_process import ServingProcess
from tests.helpers import stop
from tests.machines.roles import settle_in

__all__ = [
    "SIZE",
    "Between",
    "Reader",
    "Trainer",
    "both",
    "consumer_end",
    "leasing",
    "overwrite",
    "publisher_end",
    "runs",
    "source_of",
    "weights",
]

SIZE = 48 << 20
"""Bytes of the tensor: several steps of a read."""


def weights(version: int) -> dict[str, torch.Tensor]:
    """A state dict whose bytes follow from the version."""
    values = torch.arange(SIZE // 8, dtype=torch.int64)
    return {"w": values * (2 * version + 1)}


def runs(pid: int) -> bool:
    """Whether a process lives, and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return False


@contextmanager
def both(
    *, trainer: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[NIXLTensorBridge, NIXLTensorBridge]]:
    """A publisher, with the options of `trainer` besides, and a consumer in the same process."""
    near = make_weight_bridge(
        "nixl",
        source_worker="trainer",
        suspicious="off",
        nonfinite="off",
        **options,
        **(trainer or {}),
    )
    with near, make_weight_bridge("nixl", source_worker="rollout", **options) as far:
        yield cast("NIXLTensorBridge", near), cast("NIXLTensorBridge", far)


def publisher_end(bridge: NIXLTensorBridge) -> NIXLPublisher:
    """The trainer's half of the transport."""
    return cast("NIXLPublisher", bridge.publisher.end)


def consumer_end(bridge: NIXLTensorBridge) -> NIXLConsumer:
    """The engine's half of the transport."""
    return cast("NIXLConsumer", bridge.consumer.end)


def source_of(bridge: NIXLTensorBridge) -> Source:
    """What an engine keeps of the only publisher that it knows."""
    (source,) = consumer_end(bridge)._resources.sources.values()
    return source


def leasing(
    bridge: NIXLTensorBridge, manifest: WeightUpdateManifest, *, later: int = 0
) -> ControlClient:
    """Ask for a lease, of a `later` write of the slot; returns the connection."""
    end = consumer_end(bridge)
    handle = end._handle(manifest)
    client = end._source(handle.endpoint, is_observer=False).client
    client.ask_for_lease(
        manifest.update_id,
        generation=handle.generation + later,
        arena_nbytes=manifest.table.arena_nbytes,
    )
    return client


def overwrite(end: NIXLPublisher, manifest: WeightUpdateManifest) -> None:
    """Write the slot once more, as a publisher does that does not know of a reader."""
    slot = end.snapshot(manifest.update_id)
    slot.generation += 1
    slot.stamp(None, 0)
    vm.tensor_at(slot.address, manifest.table.arena_nbytes).fill_(7)


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

    def read(
        self, manifest: str, kills: int = 0, ends: int = 0, stops: int = 0, at: str = "bytes"
    ) -> int | str:
        """Import, and kill or stop a process in the middle of it; returns what came of it.

        With `ends`, the read goes on when that process has ended too: a trainer's serving process
        outlives it for a moment, in which a whole read may be served.
        """

        def kill() -> None:
            if kills:
                os.kill(kills, signal.SIGKILL)
            if ends:
                until(lambda: not runs(ends), what=f"process {ends} to end")
            if stops:
                stop(stops)

        try:
            with Between(kill, at=at, times=1) as seen:
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

    def let_go(self, manifest: str) -> None:
        """Drop a version that was read."""
        self.tensors = None
        self.bridge.release(WeightUpdateManifest.from_json(manifest).update_id)

    def holds(self) -> int:
        """The version that is here, or 0."""
        here = self.tensors["w"]
        version = int(here[1]) // 2  # if it is one at all
        return version if bytes_of(weights(version)["w"]) == bytes_of(here) else 0


class Trainer:
    """Publishes over `nixl`."""

    def __init__(
        self, ucx: dict[str, str] | None = None, namespace: str = "", **options: Any
    ) -> None:
        settle_in(namespace, ucx)
        made = make_weight_bridge(
            "nixl", source_worker="trainer", suspicious="off", nonfinite="off", **options
        )
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
        end = publisher_end(self.bridge)
        for _ in range(rounds):
            end._host.progress()

    def server_pid(self) -> int:
        """The process that serves reads."""
        host = publisher_end(self.bridge)._host
        assert isinstance(host, ServingProcess)
        return host.pid

    def states(self, manifest: str) -> list[str]:
        update_id = WeightUpdateManifest.from_json(manifest).update_id
        return [one.state for one in self.bridge.consumers() if one.update_id == update_id]

    def close(self) -> None:
        self.bridge.close()

    def registered(self) -> int:
        return publisher_end(self.bridge)._host.num_registered

    def readers(self) -> list[str]:
        return [name for entry in self.bridge.catalog() for name in entry.readers]
