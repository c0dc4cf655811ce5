"""Processes of a fan-in: ranks of a trainer that own the parts, and engines that read from them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.assembly.wanted import TensorParallel, parallel
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.testing.faults import die
from rl_bridge.testing.processes import Child
from rl_bridge.transports.nixl.server import NIXLPublisher
from tests.groups.meshes import Shards, cut, model
from tests.machines.network.namespaces import enter

__all__ = ["DIMS", "SHAPES", "Engine", "Owner", "owners_of", "publish"]

TCPStore = torch._C._distributed_c10d.TCPStore
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (8, 6),
    "layer.w": (12, 8),
    "norm": (5,),
    "scale": (),
}
DIMS = {"embed": 0, "layer.w": 1}
STORE_S = 60.0


def settle_in(namespace: str, ucx: dict[str, str] | None) -> None:
    """Before NIXL is loaded: where this process is, and what UCX may use."""
    os.environ.update(ucx or {})
    if namespace:
        enter(namespace)


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """The model, with a matrix of that many rows of 4 KiB."""
    return {**SHAPES, "wide": (rows, 1024)} if rows else SHAPES


class Owner:
    """One rank of a trainer."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: tuple[str, int],
        *,
        transport: str = "nixl",
        options: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        rows: int = 0,
        all_by_rows: bool = False,
        namespace: str = "",
        ucx: dict[str, str] | None = None,
        serves_store: bool = False,
    ) -> None:
        settle_in(namespace, ucx)
        self.rank, self.world_size, self.rows = rank, world_size, rows
        self.dims = dict.fromkeys(DIMS, 0) if all_by_rows else DIMS
        self.store = TCPStore(
            store[0],
            store[1],
            is_master=serves_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S),
        )
        self.bridge = make_weight_bridge(
            transport,
            source_worker="trainer",
            source_rank=rank,
            suspicious="off",
            **(options or {}),
        )
        exchange = StoreExchange(self.store, rank=rank, world_size=world_size)
        self.publisher = GroupPublisher(self.bridge, exchange, timeout_s=timeout_s)

    def shards(self, version: int) -> Shards:
        dims: dict[str, int | None] = {**dict.fromkeys(shapes(self.rows)), **self.dims, "wide": 0}
        return cut(model(shapes(self.rows), version), self.world_size, dims)[self.rank]

    def publish(self, version: int) -> str:
        return self.publisher.publish(*self.shards(version), weight_version=version).to_json()

    def release(self, manifest: str) -> None:
        self.publisher.release(GroupManifest.from_json(manifest))

    def states(self, manifest: str) -> list[str]:
        return [one.state for one in self.publisher.consumers(GroupManifest.from_json(manifest))]

    def help(self, rounds: int) -> None:
        """Let the network move what it still has."""
        end = cast("NIXLPublisher", self.bridge.publisher.end)
        for _ in range(rounds):
            end._host.progress()

    def die(self) -> None:
        die()

    def close(self) -> None:
        self.bridge.close()


class Engine:
    """One rank of an engine that cuts tensors in its own way."""

    def __init__(
        self,
        rank: int,
        degree: int,
        *,
        transports: dict[str, dict[str, Any]] | None = None,
        rows: int = 0,
        namespace: str = "",
        ucx: dict[str, str] | None = None,
    ) -> None:
        settle_in(namespace, ucx)
        self.rank, self.degree, self.rows = rank, degree, rows
        wanted = parallel(tensor=TensorParallel(degree, rank, {**DIMS, "wide": 0}))
        self.weights = {name: torch.zeros_like(one) for name, one in self.expected(0).items()}
        self.bridge = GroupBridge(wanted, source_rank=rank, transports=transports)
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge,
            weight_install_adapter=ModuleInstallAdapter(self.weights, mode="flip"),
        )

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        dims = {**DIMS, "wide": 0}
        return {
            name: one.chunk(self.degree, dims[name])[self.rank].contiguous()
            if name in dims
            else one
            for name, one in model(shapes(self.rows), version).items()
        }

    def update(self, manifest: str) -> bool:
        self.executor.update_weights(manifest)
        version = self.executor.active_weight_version
        assert version is not None
        return self.holds(version)

    def holds(self, version: int) -> bool:
        wanted = self.expected(version)
        return self.executor.active_weight_version == version and all(
            torch.equal(self.weights[name], one) for name, one in wanted.items()
        )

    def close(self) -> None:
        self.executor.close()


@contextmanager
def owners_of(
    num: int, kind: type[Owner] = Owner, **options: Any
) -> Iterator[tuple[list[Child], tuple[str, int]]]:
    """The ranks of a trainer on this machine, and the store that they meet at."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = ("127.0.0.1", store.port)
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(kind, rank=rank, world_size=num, store=meet, **options))
            for rank in range(num)
        ]
        yield [child.ready() for child in children], meet


def publish(owners: Sequence[Child], version: int) -> str:
    """Publish a version on all ranks; the group's manifest."""
    for owner in owners:
        owner.tell("publish", version=version)
    texts = {owner.answer() for owner in owners}
    assert len(texts) == 1
    return str(texts.pop())
