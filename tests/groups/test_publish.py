"""Publishing together: all ranks or none, one manifest, whatever a rank says or misses."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_bridge import make_weight_bridge
from rl_bridge.assembly.wanted import parallel
from rl_bridge.errors import (
    GroupAborted,
    IncompleteCoverage,
    RanksDisagree,
    ShapeMismatch,
    StaleUpdate,
    SuspiciousUpdate,
    UnknownUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.exchange import FunctionExchange, ProcessGroupExchange, StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.parallel import Placement
from rl_bridge.testing.processes import until
from rl_bridge.trainers import StateDictExtractor
from tests.groups.meshes import SHAPES, Shards, cut, model, placed, shards
from tests.groups.rig import HashStore, Trainers, everywhere, trainers


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
        assert manifest.publisher_id == group.bridges[0].publisher_id


def test_ranks_that_are_told_no_version_count_on_together() -> None:
    with trainers(3) as group:
        group.bridges[1].publish({"its own": torch.ones(2)}, 6)
        assert [group.publish(shards(n, 3)).weight_version for n in range(2)] == [7, 8]


def test_a_version_on_some_ranks_and_none_on_others_is_told() -> None:
    with trainers(2) as group:
        for raised in group.try_publish(shards(1), 3, versions={1: None}):
            assert isinstance(raised, RanksDisagree)
            assert "'rank 0': 3, 'rank 1': None" in str(raised)
        assert nothing_is_held(group)


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone"])
def test_a_group_casts_what_its_placements_describe(transport: str) -> None:
    whole = {"a": torch.randn(6, 4), "b": torch.arange(5), "c": torch.randn(3)}
    cast = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in whole.items()}
    dims = {"a": 0, "b": None, "c": None}
    with trainers(2, transport) as group, make_weight_bridge(transport) as consumer:
        for dtype, wanted in ((None, whole), (torch.bfloat16, cast), (torch.bfloat16, cast)):
            manifest = group.publish(cut(whole, 2, dims), dtype=dtype, keep=1)
            found = consumer.import_update(manifest)
            assert all(found[name].dtype is one.dtype for name, one in wanted.items())
            assert all(torch.equal(found[name], one) for name, one in wanted.items())
            consumer.release(manifest)


def test_what_an_extractor_of_a_rank_gives_is_cast() -> None:
    model = torch.nn.Linear(3, 2)
    with trainers(1) as group, make_weight_bridge("shared-memory") as consumer:
        publisher = group.publishers[0]
        manifest = publisher.publish(StateDictExtractor(model), dtype=torch.bfloat16, keep=1)
        found = consumer.import_update(manifest)
        assert torch.equal(found["weight"], model.weight.bfloat16())


def test_ranks_that_cast_to_different_dtypes_are_told() -> None:
    whole = {"a": torch.randn(6, 4)}
    with trainers(2) as group:
        given = cut(whole, 2, {"a": 0})
        dtypes = (torch.bfloat16, torch.float16)
        found = everywhere(
            [
                partial(one.publish, *given[rank], dtype=dtypes[rank])
                for rank, one in enumerate(group.publishers)
            ]
        )
        assert all(isinstance(one, WeightBridgeError) for one in found)
        assert "bfloat16" in str(found[0])
        assert nothing_is_held(group)


def test_every_rank_releases_older_versions() -> None:
    with trainers(2) as group:
        made = [group.publish(shards(n), keep=2) for n in range(4)]
        for bridge, rank in zip(group.bridges, range(2), strict=True):
            states = [bridge.update_status(one.parts[rank]) for one in made]
            assert states == ["released", "released", "published", "published"]


def test_a_version_of_a_group_that_broke_off_pushes_none_out() -> None:
    with trainers(2) as group:
        first = group.publish(shards(1), keep=1)
        uneven = [shards(2)[0], shards(3, 3)[1]]
        assert all(
            isinstance(e, WeightBridgeError) for e in group.try_publish(uneven, None, keep=1)
        )
        assert [b.update_status(first.parts[r]) for r, b in enumerate(group.bridges)] == [
            "published",
            "published",
        ]


def test_a_version_in_the_place_of_placements_is_told() -> None:
    with trainers(1) as group:
        version: Any = 3
        with pytest.raises(TypeError, match=r"placements=3: expected a mapping.*weight_version="):
            group.publishers[0].publish({"a": torch.ones(2)}, version)


def test_a_second_version_has_the_same_layout() -> None:
    with trainers(2) as group:
        first, second = (group.publish(shards(n), n) for n in (1, 2))
        assert first.layout_digest == second.layout_digest
        assert first.layout is second.layout
        assert first.root != second.root


def test_equal_weights_make_equal_roots_however_they_travel() -> None:
    with trainers(2) as one, trainers(2, "local-clone") as other:
        assert one.publish(shards(1), 1).root == other.publish(shards(1), 7).root


# ---- before a byte moves ------------------------------------------------------------------------


def each(found: list[GroupManifest | BaseException], kind: type[BaseException], text: str) -> None:
    for one in found:
        assert type(one) is kind, one
        assert text in str(one)


def notes(error: object) -> list[str]:
    """What an error says, and its notes."""
    return [str(error), *getattr(error, "__notes__", ())]


def test_a_gap_is_refused_on_every_rank_before_anything_is_published() -> None:
    ranks = shards(1, 3)
    tensors, placements = ranks[1]
    del tensors["embed"], placements["embed"]
    with trainers(3) as group:
        each(group.try_publish(ranks, 1), IncompleteCoverage, "no rank holds [3:6, 0:6]")
        assert [bridge.latest_manifest for bridge in group.bridges] == [None] * 3
        group.publish(shards(1, 3), 1)  # the number is still free


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


def test_a_tensor_that_changed_is_compared_with_its_placement_again() -> None:
    ranks = shards(1)
    with trainers(2) as group:
        for version in (1, 2):  # the same tensors, and the same in other memory
            group.release(group.publish(ranks, version))
            ranks[1][0]["norm"] = ranks[1][0]["norm"].clone()
        ranks[1][0]["norm"] = torch.zeros(9, dtype=torch.int32)
        _, own = group.try_publish(ranks, 3)
        assert type(own) is ShapeMismatch
        assert "'norm' is int32[9]" in str(own)


# ---- all or none --------------------------------------------------------------------------------


def test_replicas_that_differ_are_refused_and_withdrawn() -> None:
    ranks = shards(1)
    ranks[1][0]["norm"] += 1
    with trainers(2, max_slots=1) as group:
        found = group.try_publish(ranks, 1)
        each(found, RanksDisagree, "'norm' differs between rank 0 and rank 1")
        assert all("withdrawn its part" in "".join(notes(one)) for one in found)
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
            assert "withdrawn" not in "".join(notes(one)), "nothing was published yet"
        assert nothing_is_held(group)
        assert group.publish(shards(2, 3), 2).weight_version == 2


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


def test_behind_a_failure_of_one_every_rank_says_all_of_its_layout_again() -> None:
    """One that missed the votes may know another layout than those that did not."""
    with trainers(2) as group:
        group.publish(shards(1), 1)
        lost = group.publishers[0]._exchange
        gather, steps, left = lost.gather, list[str](), ["votes"]

        def deaf(step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
            found = gather(step, payload, timeout_s=timeout_s)
            steps.append(step)
            if step in left:
                left.clear()
                raise GroupAborted("the line is dead")
            return found

        lost.gather = deaf  # type: ignore[method-assign]
        group.try_publish(shards(2), 2, trainable=[])
        assert "placements" not in steps
        group.publish(shards(3), 3)
        assert "placements" in steps


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


def test_a_function_that_fails_is_a_rank_that_did_not_come() -> None:
    def function(payload: bytes, timeout_s: float) -> list[bytes]:
        raise OSError("no line")

    with trainers(1) as group:
        exchange = FunctionExchange(function, rank=0, world_size=1)
        group.publishers = [GroupPublisher(group.bridges[0], exchange)]
        each(group.try_publish(shards(1, 1), 1), GroupAborted, "OSError: no line")


def test_consumers_of_an_unknown_update_are_unknown() -> None:
    with trainers(1) as group:
        with pytest.raises(UnknownUpdate, match="unknown weight update"):
            group.publishers[0].consumers("a" * 32)
        group.publishers[0].release("a" * 32)
        with pytest.raises(ValueError, match="above 0"):
            GroupPublisher(group.bridges[0], group.publishers[0]._exchange, timeout_s=0)


# ---- what ranks tell each other ------------------------------------------------------------------


# Each rank has one leaf: the whole digest is made of both leaf lists.
SHARDS = cut(model({"w": (2 * LEAF_NBYTES // 4,)}), 2, {"w": 0})


class Twisted(StoreExchange):
    """A rank that says something else in one step."""

    def __init__(self, store: HashStore, step: str, twist: Callable[[bytes], bytes]) -> None:
        super().__init__(store, rank=1, world_size=2)
        self._step, self._twist = step, twist

    def gather(self, step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        said = self._twist(payload) if step == self._step else payload
        return super().gather(step, said, timeout_s=timeout_s)


def twisted(group: Trainers, step: str, twist: Callable[[bytes], bytes]) -> list[Any]:
    """What each rank gets when rank 1 says something else in one step."""
    store = HashStore()
    exchanges = [StoreExchange(store, rank=0, world_size=2), Twisted(store, step, twist)]

    def one(rank: int) -> object:
        publisher = GroupPublisher(group.bridges[rank], exchanges[rank], timeout_s=20.0)
        return publisher.publish(*SHARDS[rank], weight_version=1)

    return everywhere([lambda: one(0), lambda: one(1)])


def without(key: str) -> Callable[[bytes], bytes]:
    return lambda said: json.dumps({k: v for k, v in json.loads(said).items() if k != key}).encode()


def with_(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda said: json.dumps({**json.loads(said), **changes}).encode()


def text_behind(said: bytes) -> bytes:
    return with_(placements=json.loads(said)["placements"] + "x")(said)


SAID: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "no json": ("hello", lambda _: b"\xff", "is no JSON"),
    "a nest": ("hello", lambda _: b"[" * 100_000, "is no JSON"),
    "a list": ("hello", lambda _: b"[]", "is a list"),
    "no hello": ("hello", lambda _: b"{}", "rank 1 sent something that is no hello"),
    "a true rank": ("hello", with_(rank=True), "is no hello"),
    "other placements": ("hello", with_(placements="0" * 32), "rank 1 named other placements"),
    "text behind": ("placements", text_behind, "rank 1 named other placements"),
    "no placements": ("placements", without("placements"), "rank 1 named other placements"),
    "no part": ("parts", without("part"), "rank 1 sent something that is no part"),
    "a number as part": ("parts", with_(part=7), "is no part"),
    "no manifest": ("parts", with_(part="{}"), "the part of rank 1 cannot be read"),
    "no leaves": ("parts", without("leaves"), "is no part"),
    "no base64": ("parts", with_(leaves="!"), "the part of rank 1 cannot be read"),
    "too few leaves": ("parts", with_(leaves="AAAA"), "the part of rank 1 cannot be read"),
}


@pytest.mark.parametrize("case", list(SAID))
def test_a_malformed_message_aborts_all_ranks_and_names_its_sender(case: str) -> None:
    step, twist, words = SAID[case]
    with trainers(2) as group:
        for one in twisted(group, step, twist):
            assert isinstance(one, GroupAborted), one
            assert words in str(one)
            assert one.ranks == (1,)
        for bridge in group.bridges:
            latest = bridge.latest_manifest
            assert latest is None or bridge.update_status(latest) == "released"


def test_a_leaf_list_that_is_not_sent_makes_no_digest() -> None:
    with trainers(2) as group:
        for one in twisted(group, "parts", with_(leaves=None)):
            assert "the leaf list of rank 1 is missing" in str(one)


# ---- where a line goes dead ----------------------------------------------------------------------


NUM = 3


def weights(version: int) -> dict[str, torch.Tensor]:
    return model({"w": (6, 2), "norm": (3,)}, version)


def version_of(version: int) -> list[Shards]:
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
        found = group.try_publish(version_of(1), 1)
        kinds = {type(one) for one in found}
        assert kinds in ({GroupManifest}, {GroupAborted, OSError}, {GroupAborted})
        states = {
            bridge.update_status(bridge.latest_manifest)
            for bridge in group.bridges
            if bridge.latest_manifest is not None
        }
        assert states == {"published" if kinds == {GroupManifest} else "released"}


def test_without_a_store_a_split_ends_with_the_next_version() -> None:
    """Two ranks publish and the third withdraws: nobody can import the split."""
    with trainers(NUM, max_slots=1) as group, ExitStack() as stack:
        early, late = (
            stack.enter_context(GroupBridge(parallel(), source_rank=rank)) for rank in range(2)
        )
        over(Line(deaf=1, at_call=VOTES), group)
        found = group.try_publish(version_of(1), 1)
        split = found[0]
        assert isinstance(split, GroupManifest)
        assert found[2] == split
        assert isinstance(found[1], GroupAborted)
        # The part that was withdrawn is gone from its slot at once.
        with pytest.raises(StaleUpdate):
            early.import_update(split.to_json())
        group.release(split)
        again = group.publish(version_of(2), 2)
        with pytest.raises(WeightBridgeError):
            late.import_update(split.to_json())
        assert early.active_weight_version is late.active_weight_version is None
        for engine in (early, late):
            whole = engine.import_update(again.to_json())
            assert all(torch.equal(whole[name], one) for name, one in weights(2).items())


def test_a_publisher_over_a_new_exchange_lets_go_of_what_the_one_before_published() -> None:
    with trainers(NUM, max_slots=1) as group:
        first = group.publish(version_of(1), 1)
        over(Line(deaf=-1, at_call=0), group)
        assert [one.consumers(first) for one in group.publishers] == [[]] * NUM
        group.release(first)
        assert group.publish(version_of(2), 2).weight_version == 2


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl"])
def test_a_process_group_that_moves_no_cpu_tensors_is_refused_at_once(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail in the first publication. (Without GPUs no such group can be had.)"""
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    with pytest.raises(WeightBridgeUnavailableError, match='backend="gloo"'):
        ProcessGroupExchange()


# ---- suspicion -----------------------------------------------------------------------------------


HALVES = {"first": (4, 512), "second": (4, 512)}


def wary(stack: ExitStack, policy: str = "reject") -> Trainers:
    return Trainers(
        [
            stack.enter_context(
                make_weight_bridge(
                    "shared-memory",
                    source_rank=rank,
                    suspicious=policy,
                    nonfinite=policy,
                    max_slots=8,
                )
            )
            for rank in range(2)
        ]
    )


def halves(version: int) -> list[Shards]:
    return cut(model(HALVES, version), 2, {"first": 0, "second": 0})


def test_a_part_may_stay_as_it_is_where_another_one_changes() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        group.publish(halves(1), 1, trainable=HALVES)
        changed = [halves(1)[0], halves(2)[1]]
        assert group.publish(changed, 2, trainable=HALVES).weight_version == 2


def test_a_rank_without_tensors_takes_part_in_every_version() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        for version in (1, 2):
            whole = cut(model(HALVES, version), 1, {})
            assert isinstance(group.publish([*whole, ({}, {})], version), GroupManifest)


def test_a_group_that_changes_nowhere_is_suspicious() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        group.publish(halves(1), 1)
        for one in group.try_publish(halves(1), 2):
            assert isinstance(one, SuspiciousUpdate)
            assert "changes nothing" in str(one)
        assert group.publish(halves(2), 3).weight_version == 3


def test_a_tensor_that_stops_changing_everywhere_is_suspicious() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        for version in range(1, 6):
            group.publish(halves(version), version, trainable=HALVES)
        half = [
            ({**old, "first": new["first"]}, placements)
            for (old, placements), (new, _) in zip(halves(5), halves(6), strict=True)
        ]
        for one in group.try_publish(half, 6, trainable=HALVES):
            assert isinstance(one, SuspiciousUpdate)
            assert "1 tensors with 50% of the trained bytes did not change: second" in str(one)
        assert group.publish(half, 7, trainable={"first"}).weight_version == 7


def test_nan_on_one_rank_stops_the_version_on_all() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        weights = {"first": torch.ones(4, 2), "second": torch.ones(4, 2)}
        sound = cut(weights, 2, {"first": 0, "second": 0})
        weights["second"][3, 1] = torch.nan
        bad = cut(weights, 2, {"first": 0, "second": 0})
        for one in group.try_publish(bad, 1):
            assert "version 1: 1 tensors hold NaN or Inf" in str(one)
        assert group.publish(sound, 2).weight_version == 2


def test_the_policy_may_be_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        group = wary(stack, "warn")
        for version, value in enumerate((1, 2, 2), start=1):
            group.publish(halves(value), version)
        (told,) = caplog.messages  # by one of the ranks
        assert told.startswith("suspicious update: version 3 (after 2) changes nothing")
        assert group.publish(halves(2), 4).weight_version == 4
        assert caplog.messages == [told]


def test_a_ranks_bridge_knows_its_part_by_the_manifest_of_the_version() -> None:
    with trainers(2) as group, ExitStack() as stack:
        reader, late = (stack.enter_context(make_weight_bridge("shared-memory")) for _ in range(2))
        manifest = group.publish(shards(1), 1)
        reader.import_update(manifest)
        for bridge in group.bridges:
            assert [one.state for one in bridge.holders(manifest)] == ["verified"]
            bridge.release(manifest.to_json())
        with pytest.raises(StaleUpdate):  # every part is withdrawn
            late.import_update(manifest)


# ---- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"name": "other"}, {"scaling": 3.0}])
def test_ranks_that_publish_two_adapters_publish_none(change: dict[str, Any]) -> None:
    path = "base_model.model.layers.0.q_proj"
    whole = {f"{path}.lora_A.weight": torch.ones(4, 8), f"{path}.lora_B.weight": torch.ones(6, 4)}
    ranks = cut(whole, 2, dict.fromkeys(whole, 0))
    found = {name: tuple(one.shape) for name, one in whole.items()}
    spec = AdapterSpec.inferred("policy", found, lora_alpha=8)
    other = spec.model_copy(update=change)
    with trainers(2, "local-clone") as group:
        tasks = [
            partial(one.publish, *mine, weight_version=1, adapter=said)
            for one, mine, said in zip(group.publishers, ranks, (spec, other), strict=True)
        ]
        for answer in everywhere(tasks):
            assert isinstance(answer, RanksDisagree), answer
            assert "Publish the same adapter" in str(answer)
        manifest = group.publish(ranks, 2, adapter=spec)
        assert manifest.adapter == spec
