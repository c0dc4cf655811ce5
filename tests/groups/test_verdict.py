"""How a publication ends for each rank where a line goes dead: with a store, and without one."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from rl_bridge.errors import (
    GroupAborted,
    StaleUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups.bridge import GroupBridge
from rl_bridge.groups.exchange import FunctionExchange, ProcessGroupExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.groups.wanted import parallel
from rl_bridge.manifest.group import GroupManifest
from tests.groups.meshes import Shards, cut, model
from tests.groups.rig import HashStore, Trainers, trainers

NUM = 3


def weights(version: int) -> dict[str, torch.Tensor]:
    return model({"w": (6, 2), "norm": (3,)}, version)


def shards(version: int) -> list[Shards]:
    return cut(weights(version), NUM, {"w": 0, "norm": None})


class Line:
    """Carries everybody's bytes to all ranks of one process; fails one rank in one of its calls."""

    def __init__(self, deaf: int, at_call: int) -> None:
        self._deaf, self._at_call = deaf, at_call
        self._given: dict[int, bytes] = {}
        self._met = threading.Barrier(NUM)
        self._calls = [0] * NUM

    def of(self, rank: int) -> Callable[[bytes, float], Sequence[bytes]]:
        def carry(payload: bytes, timeout_s: float) -> Sequence[bytes]:
            self._given[rank] = payload
            self._met.wait(timeout_s)
            found = [self._given[one] for one in range(NUM)]
            self._met.wait(timeout_s)
            self._calls[rank] += 1
            if (rank, self._calls[rank]) == (self._deaf, self._at_call):
                raise OSError("the line went dead behind the last byte")
            return found

        return carry


# Hello, placements, parts, votes: the fourth call is the last one.
VOTES = 4


def over(line: Line, group: Trainers, store: object = None) -> None:
    """Let the ranks talk over a line, with one store for all of them or without."""
    group.publishers = [
        GroupPublisher(
            bridge,
            FunctionExchange(line.of(rank), rank=rank, world_size=NUM, store=store),  # type: ignore[arg-type]
            timeout_s=20.0,
        )
        for rank, bridge in enumerate(group.bridges)
    ]


def test_with_a_store_all_ranks_end_alike() -> None:
    """One rank does not get to see the votes that are all in: whoever comes first decides."""
    with trainers(NUM, max_slots=2) as group:
        over(Line(deaf=1, at_call=VOTES), group, HashStore())
        found = group.try_publish(shards(1), 1)
        kinds = {type(one) for one in found}
        assert kinds in ({GroupManifest}, {GroupAborted, OSError}, {GroupAborted})
        states = {
            bridge.update_status(bridge.latest_manifest)
            for bridge in group.bridges
            if bridge.latest_manifest is not None
        }
        assert states == {"published" if kinds == {GroupManifest} else "released"}


def test_a_rank_that_missed_the_votes_keeps_what_the_others_committed() -> None:
    with trainers(NUM) as group:
        over(Line(deaf=1, at_call=VOTES), group, HashStore())
        late = group.publishers[1]._exchange
        others = threading.Barrier(NUM)

        def behind(decide: Callable[[str], str]) -> Callable[[str], str]:
            def first(verdict: str) -> str:
                found = decide(verdict)
                others.wait(20.0)
                return found

            return first

        for rank in (0, 2):
            exchange = group.publishers[rank]._exchange
            exchange.decide = behind(exchange.decide)  # type: ignore[assignment,method-assign]
        own = late.decide

        def last(verdict: str) -> str:
            others.wait(20.0)
            return own(verdict)

        late.decide = last  # type: ignore[method-assign]
        found = group.try_publish(shards(1), 1)
        assert len({one.to_json() for one in found if isinstance(one, GroupManifest)}) == 1
        assert all(isinstance(one, GroupManifest) for one in found)


def test_without_a_store_a_split_ends_with_the_next_version() -> None:
    """Two ranks publish and the third withdraws: nobody can import the split."""
    with trainers(NUM, max_slots=1) as group, ExitStack() as stack:
        early, late = (
            stack.enter_context(GroupBridge(parallel(), source_rank=rank)) for rank in range(2)
        )
        over(Line(deaf=1, at_call=VOTES), group)
        found = group.try_publish(shards(1), 1)
        split = found[0]
        assert isinstance(split, GroupManifest)
        assert found[2] == split
        assert isinstance(found[1], GroupAborted)
        # The part that was withdrawn is gone from its slot at once.
        with pytest.raises(StaleUpdate):
            early.import_update(split.to_json())
        group.release(split)
        again = group.publish(shards(2), 2)
        with pytest.raises(WeightBridgeError):
            late.import_update(split.to_json())
        assert early.active_weight_version is late.active_weight_version is None
        for engine in (early, late):
            whole = engine.import_update(again.to_json())
            assert all(torch.equal(whole[name], one) for name, one in weights(2).items())


def test_a_publisher_over_a_new_exchange_lets_go_of_what_the_one_before_published() -> None:
    with trainers(NUM, max_slots=1) as group:
        first = group.publish(shards(1), 1)
        over(Line(deaf=-1, at_call=0), group)
        assert [one.consumers(first) for one in group.publishers] == [[]] * NUM
        group.release(first)
        assert group.publish(shards(2), 2).weight_version == 2


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl"])
def test_a_process_group_that_moves_no_cpu_tensors_is_refused_at_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail in the first publication. (Without GPUs no such group can be had.)"""
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    with pytest.raises(WeightBridgeUnavailableError, match='backend="gloo"'):
        ProcessGroupExchange()
