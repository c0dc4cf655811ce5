"""Groups in one process: each rank is a thread with a bridge of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.transports.base import ConsumerEnd
from rl_bridge.transports.local import LocalClone
from tests.groups.meshes import Shards

T = TypeVar("T")
TIMEOUT_S = 20.0
HashStore = torch._C._distributed_c10d.HashStore
"""A store within one process."""


def everywhere(tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Do something on every rank at once; what a rank raises is its answer."""

    def caught(task: Callable[[], T]) -> T | BaseException:
        try:
            return task()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(caught, tasks))


class Trainers:
    """The publishing ranks of a group.

    Attributes:
        bridges: of each rank.
        publishers: of each rank.

    """

    def __init__(self, bridges: Sequence[TensorBridge], timeout_s: float = TIMEOUT_S) -> None:
        store = HashStore()
        self.bridges = list(bridges)
        self.publishers = [
            GroupPublisher(
                bridge,
                StoreExchange(store, rank=rank, world_size=len(bridges)),
                timeout_s=timeout_s,
            )
            for rank, bridge in enumerate(bridges)
        ]

    def try_publish(
        self,
        shards: Sequence[Shards],
        version: int | None,
        *,
        ranks: Sequence[int] | None = None,
        versions: Mapping[int, int | None] | None = None,
        **options: Any,
    ) -> list[GroupManifest | BaseException]:
        """Publish on all ranks, or only on some; what each got or raised."""
        chosen = range(len(shards)) if ranks is None else ranks
        return everywhere(
            [
                lambda rank=rank: self.publishers[rank].publish(  # type: ignore[misc]  # a default binds it
                    *shards[rank], weight_version=(versions or {}).get(rank, version), **options
                )
                for rank in chosen
            ]
        )

    def publish(
        self, shards: Sequence[Shards], version: int | None = None, **options: Any
    ) -> GroupManifest:
        """Publish on all ranks; all must get the same."""
        found = self.try_publish(shards, version, **options)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        texts = {one.to_json() for one in found if isinstance(one, GroupManifest)}
        assert len(texts) == 1
        return GroupManifest.from_json(texts.pop())

    def release(self, manifest: GroupManifest) -> None:
        """Let go of a version on every rank."""
        for publisher in self.publishers:
            publisher.release(manifest)


@contextmanager
def trainers(
    num: int, transport: str = "shared-memory", *, timeout_s: float = TIMEOUT_S, **options: Any
) -> Iterator[Trainers]:
    """Ranks that publish over one transport."""
    with ExitStack() as stack:
        bridges = [
            stack.enter_context(
                make_weight_bridge(
                    transport,
                    source_worker="trainer",
                    source_rank=rank,
                    suspicious="off",
                    **options,
                )
            )
            for rank in range(num)
        ]
        yield Trainers(bridges, timeout_s)


def damage(group: Trainers, manifest: GroupManifest, rank: int, offset: int) -> None:
    """Flip a byte of a published part, behind everybody's back."""
    part = manifest.parts[rank]
    end = group.bridges[rank].publisher.end
    flip_byte(arena_address(end, part.update_id, dict(part.handle)) + offset)


def local_clone_through(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[ConsumerEnd], ConsumerEnd]
) -> None:
    """Have consumers over ``local-clone`` use what `make` puts around their ends."""
    plain = LocalClone.consumer_end

    def around(transport: LocalClone, worker: str, rank: int) -> ConsumerEnd:
        return make(plain(transport, worker, rank))

    monkeypatch.setattr(LocalClone, "consumer_end", around)
