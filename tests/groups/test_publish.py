"""Publishing together: all ranks or none, one version, one manifest."""

import threading

import pytest
import torch

from rl_bridge.errors import (
    DuplicateTensorName,
    GroupAborted,
    IncompleteCoverage,
    RanksDisagree,
    ShapeMismatch,
    UnknownUpdate,
    VersionNotMonotonic,
)
from rl_bridge.groups.exchange import FunctionExchange, StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.digest import digest_bytes
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_digests import LEAVES
from rl_bridge.manifest.parallel import Placement
from rl_bridge.testing.processes import until
from rl_bridge.transports.shared_memory import SharedMemory
from tests.groups.meshes import Shards, cut, flat_cut, model, placed
from tests.groups.rig import HashStore, Trainers, trainers

SHAPES = {"embed": (7, 5), "layer.w": (6, 8), "norm": (5,), "scale": ()}
DIMS = {"embed": 0, "layer.w": 1, "norm": None, "scale": None}


def shards(version: int, num: int = 2) -> list[Shards]:
    return cut(model(SHAPES, version), num, DIMS)


def nothing_is_held(group: Trainers) -> bool:
    """Whether every rank can publish again, into the one slot that it has."""
    latest = [bridge.latest_manifest for bridge in group.bridges]
    return all(
        one is None or bridge.update_status(one) == "released"
        for one, bridge in zip(latest, group.bridges, strict=True)
    )


def test_all_ranks_get_the_same_manifest() -> None:
    with trainers(3) as group:
        manifest = group.publish(shards(1, 3), 1, metadata={"step": 4})
        assert (manifest.weight_version, manifest.world_size) == (1, 3)
        assert manifest.metadata["step"] == 4
        assert {name: one.shape for name, one in manifest.tensors.items()} == SHAPES
        assert manifest.group_id == group.bridges[0].publisher_id


def test_a_manifest_is_the_same_there_and_back() -> None:
    with trainers(2) as group:
        manifest = group.publish(shards(1), 1)
        text = manifest.to_json()
        again = GroupManifest.from_json(text)
        assert again == manifest
        assert again.to_json() == text
        assert GroupManifest.from_json(manifest.to_json(layout=False)).to_json() == text


def test_a_second_version_has_the_same_layout() -> None:
    with trainers(2) as group:
        first, second = (group.publish(shards(n), n) for n in (1, 2))
        assert first.layout_digest == second.layout_digest
        assert first.layout is second.layout
        assert first.root != second.root


def test_equal_weights_make_equal_roots_however_they_travel() -> None:
    with trainers(2) as one, trainers(2, "local-clone") as other:
        assert one.publish(shards(1), 1).root == other.publish(shards(1), 7).root


def test_the_leaf_list_of_a_part_makes_its_digests() -> None:
    with trainers(2) as group:
        manifest = group.publish(flat_cut(model({"w": (300_000,)}), 2), 1)
        part = manifest.parts[1]
        tensors = SharedMemory().consumer_end("a look", 0).look(part).tensors
        leaves = bytes(tensors[LEAVES].numpy())
        assert digest_bytes(leaves).hex() == part.tensors[LEAVES].checksum
        assert len(leaves) == -(-600_000 // 131_072) * 16 + 8


def test_an_empty_rank_takes_part() -> None:
    whole = model({"w": (4, 3)})
    with trainers(2) as group:
        manifest = group.publish([*cut(whole, 1, {"w": 0}), ({}, {})], 1)
        assert manifest.tensors["w"].shape == (4, 3)


# ---- before a byte moves ------------------------------------------------------------------------


def each(found: list[GroupManifest | BaseException], kind: type[BaseException], text: str) -> None:
    for one in found:
        assert type(one) is kind, one
        assert text in str(one)


def test_a_gap_is_refused_on_every_rank_before_anything_is_published() -> None:
    ranks = shards(1, 3)
    tensors, placements = ranks[1]
    del tensors["embed"], placements["embed"]
    with trainers(3) as group:
        each(group.try_publish(ranks, 1), IncompleteCoverage, "no rank holds [3:6, 0:5]")
        assert [bridge.latest_manifest for bridge in group.bridges] == [None] * 3
        group.publish(shards(1, 3), 1)  # the number is still free


def test_ranks_that_disagree_on_the_version_are_told_so() -> None:
    with trainers(2) as group:
        each(group.try_publish(shards(1), 1, versions={1: 2}), RanksDisagree, "'rank 1': 2")
        group.publish(shards(1), 1)


def test_a_version_that_one_rank_used_is_refused_on_all() -> None:
    with trainers(2) as group:
        group.bridges[1].publish({"w": torch.zeros(1)}, weight_version=5)
        each(group.try_publish(shards(1), 5), VersionNotMonotonic, "rank 1 used 5 already")
        group.publish(shards(1), 6)


def test_ranks_that_disagree_on_the_world_size_are_told_so() -> None:
    with trainers(2) as group:
        text = "rank 1 says that it is rank 1 of 3"
        hello = group.publishers[1]._hello
        group.publishers[1]._hello = lambda run: {**hello(run), "world_size": 3}  # type: ignore[method-assign]
        each(group.try_publish(shards(1), 1), RanksDisagree, text)


def test_a_rank_that_disagrees_on_a_dtype_is_named() -> None:
    ranks = shards(1)
    tensors, placements = ranks[1]
    tensors["embed"] = tensors["embed"].to(torch.int64)
    placements["embed"] = placed(tensors["embed"], *placements["embed"].pieces)
    with trainers(2) as group:
        each(group.try_publish(ranks, 1), RanksDisagree, "as int32, rank 1 as int64")


@pytest.mark.parametrize(
    ("kind", "text"),
    [(IncompleteCoverage, "has no placement"), (ShapeMismatch, "its placement says int32[9]")],
)
def test_a_placement_that_does_not_fit_its_tensor_fails_its_rank_alone(
    kind: type[Exception], text: str
) -> None:
    ranks = shards(1)
    placements = ranks[1][1]
    if kind is IncompleteCoverage:
        del placements["norm"]
    else:
        placements["norm"] = Placement(dtype="int32", shape=(9,), pieces=placements["norm"].pieces)
    with trainers(2) as group:
        other, own = group.try_publish(ranks, 1)
        assert type(own) is kind
        assert text in str(own)
        assert isinstance(other, GroupAborted)
        assert other.ranks == (1,)
        assert text in str(other)


def test_the_name_of_the_leaf_list_is_taken() -> None:
    ranks = shards(1, 1)
    ranks[0][0][LEAVES] = torch.zeros(3, dtype=torch.uint8)
    with trainers(1) as group:
        each(group.try_publish(ranks, 1), DuplicateTensorName, "Give it another name")


# ---- all or none --------------------------------------------------------------------------------


def test_replicas_that_differ_are_refused_and_withdrawn() -> None:
    ranks = shards(1)
    ranks[1][0]["norm"] += 1
    with trainers(2, max_slots=1) as group:
        each(group.try_publish(ranks, 1), RanksDisagree, "'norm' differs between rank 0 and rank 1")
        assert nothing_is_held(group)
        group.publish(shards(2), 2)


def test_a_rank_that_fails_to_publish_withdraws_all() -> None:
    with trainers(3, max_slots=1) as group:
        first = group.publish(shards(1, 3), 1)
        group.publishers[0].release(first)
        group.publishers[2].release(first)
        found = group.try_publish(shards(2, 3), 2)  # rank 1 has no slot
        assert type(found[1]).__name__ == "SlotsExhausted"
        assert [type(found[rank]) for rank in (0, 2)] == [GroupAborted] * 2
        assert isinstance(found[0], GroupAborted)
        assert found[0].ranks == (1,)
        assert group.bridges[1].update_status(first.parts[1]) == "published"
        group.publishers[1].release(first)
        assert nothing_is_held(group)
        group.publish(shards(3, 3), 3)


def test_a_rank_that_does_not_come_is_named_and_the_others_withdraw() -> None:
    with trainers(3, max_slots=1, timeout_s=0.3) as group:
        for one in group.try_publish(shards(1, 3), 1, ranks=[0, 2]):
            assert isinstance(one, GroupAborted)
            assert "ranks (1,)" in str(one) or "another rank ended it" in str(one)
        assert nothing_is_held(group)


def test_a_rank_that_comes_too_late_joins_the_next_publication() -> None:
    with trainers(2, timeout_s=0.3) as group:
        group.try_publish(shards(1), 1, ranks=[0])
        manifest = group.publish(shards(2), 2)
        assert manifest.weight_version == 2


def test_an_interrupt_in_the_middle_withdraws_all() -> None:
    with trainers(2, max_slots=1, timeout_s=1.0) as group:
        publisher = group.publishers[1]

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        publisher._vote = interrupted  # type: ignore[assignment,method-assign]
        other, own = group.try_publish(shards(1), 1)
        assert type(own) is KeyboardInterrupt
        assert isinstance(other, GroupAborted)
        assert "KeyboardInterrupt" in str(other)
        assert nothing_is_held(group)


def test_an_interrupt_behind_the_decision_leaves_what_the_others_have() -> None:
    with trainers(2) as group:
        exchange = group.publishers[1]._exchange
        decide = exchange.decide

        def interrupted(verdict: str) -> str:
            decide(verdict)
            exchange.decide = decide  # type: ignore[method-assign]
            raise KeyboardInterrupt

        exchange.decide = interrupted  # type: ignore[method-assign]
        other, own = group.try_publish(shards(1), 1)
        assert type(own) is KeyboardInterrupt
        assert isinstance(other, GroupManifest)
        assert group.bridges[1].update_status(other.parts[1]) == "published"
        group.publishers[1].release(other)
        assert group.bridges[1].update_status(other.parts[1]) == "released"


def test_a_rank_that_misses_the_decision_learns_what_it_was() -> None:
    """All votes are in, the others go through with it, and this rank does not see their votes."""
    with trainers(2) as group:
        exchange = group.publishers[1]._exchange
        assert isinstance(exchange, StoreExchange)
        gather, store = exchange.gather, exchange.rounds.store

        def deaf(step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
            found = gather(step, payload, timeout_s=timeout_s)
            if step == "votes":
                until(lambda: store.check([exchange.rounds.key("verdict")]), what="the decision")
                raise GroupAborted("the line is dead")
            return found

        exchange.gather = deaf  # type: ignore[method-assign]
        other, own = group.try_publish(shards(1), 1)
        assert isinstance(own, GroupManifest)
        assert own == other
        assert group.bridges[1].update_status(own.parts[1]) == "published"


def test_a_verdict_during_the_wait_does_not_hide_that_all_ranks_came() -> None:
    exchange = StoreExchange(HashStore(), rank=0, world_size=2)
    exchange.begin()
    store = exchange.rounds.store

    class Sudden:
        """A store in which everything happens between two questions."""

        asked = False

        def check(self, keys: list[str]) -> bool:
            found = bool(store.check(keys))
            if not self.asked and exchange.rounds.key("step/1") in keys:
                self.asked = True
                store.set(keys[-1], "theirs")
                store.set(exchange.rounds.key("verdict"), "commit")
            return found

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    exchange.rounds.store = Sudden()  # type: ignore[assignment]
    assert exchange.gather("step", b"mine", timeout_s=5.0) == [b"mine", b"theirs"]


def test_nothing_stays_in_the_store() -> None:
    with trainers(2, max_slots=3) as group:
        exchange = group.publishers[0]._exchange
        assert isinstance(exchange, StoreExchange)
        counts = []
        for version in range(1, 9):
            manifest = group.publish(shards(version), version)
            counts.append(exchange.rounds.store.num_keys())
            group.release(manifest)
        assert counts[-1] == counts[3]


def test_a_function_of_ones_own_carries_it_too() -> None:
    arrived: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def exchange(rank: int) -> FunctionExchange:
        def function(payload: bytes, timeout_s: float) -> list[bytes]:
            arrived[rank] = payload
            barrier.wait(timeout_s)
            found = [arrived[0], arrived[1]]
            barrier.wait(timeout_s)
            return found

        return FunctionExchange(function, rank=rank, world_size=2)

    with trainers(2) as group:
        group.publishers = [GroupPublisher(b, exchange(r)) for r, b in enumerate(group.bridges)]
        assert group.publish(shards(1), 1).world_size == 2


def test_a_function_that_fails_is_a_rank_that_did_not_come() -> None:
    def function(payload: bytes, timeout_s: float) -> list[bytes]:
        raise OSError("no line")

    with trainers(1) as group:
        exchange = FunctionExchange(function, rank=0, world_size=1)
        group.publishers = [GroupPublisher(group.bridges[0], exchange)]
        each(group.try_publish(shards(1, 1), 1), GroupAborted, "OSError: no line")


def test_consumers_of_an_unknown_update_are_unknown() -> None:
    with trainers(1) as group:
        with pytest.raises(UnknownUpdate, match="took no part"):
            group.publishers[0].consumers("a" * 32)
        group.publishers[0].release("a" * 32)
        with pytest.raises(ValueError, match="above 0"):
            GroupPublisher(group.bridges[0], group.publishers[0]._exchange, timeout_s=0)
