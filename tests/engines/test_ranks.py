"""Two ranks, each in a process of its own: both have a version, or neither has it.

They keep the engine protocol. One fails while the other has finished its part, and then the engine
is what it was. And vLLM's own calls at the wrong moment are refused by all ranks together: vLLM
reads their answers in order and stops at the first error, so where more than the last rank fails,
what the others said is taken for the answers to the next calls.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from rl_bridge.engines import EngineDriver, default_label
from rl_bridge.errors import ChecksumMismatch
from rl_bridge.testing import EngineSuite, EngineUnderTest
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from rl_bridge.vllm import VLLMEngineAdapter, VLLMServing
from tests.engines.drive import Setting, answers, executor_for, native_update, start
from tests.engines.engines import Bench, bench
from tests.engines.matrix import few_of
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3", tied=True), in_process=False, ranks=2)
FULL = pytest.mark.full
# What fails, at which of its calls: in the exchange early, late and at its last step; in staging;
# while the root is proven; and a byte that goes wrong, which only the proof sees.
STEPS = [
    ("exchange", 0, "planted"),
    ("exchange", 9, "planted"),
    ("exchange", -1, "planted"),
    ("assemble", 4, "planted"),
    ("pack", 2, "planted"),
    ("digest", -1, "planted"),
    ("corrupt", 3, "does not hold"),
    ("wrong pack", 1, "differ from the weight's own"),
]


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Checkpoints, references: References) -> Iterator[Bench]:
    with bench(SETTING, checkpoints, references) as made:
        yield made


@pytest.fixture
def engine(two_ranks: Bench) -> Bench:
    two_ranks.trainer.release_all()
    two_ranks.holds = two_ranks.fresh.index(two_ranks.answers())
    return two_ranks


@pytest.fixture
def llm(two_ranks: Bench) -> Any:
    return two_ranks.llm


@pytest.fixture
def weights(two_ranks: Bench) -> Any:
    return two_ranks.weights


# ---- the protocol -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(two_ranks: Bench) -> EngineUnderTest:
    return EngineUnderTest(two_ranks.llm, (two_ranks.fresh[0], two_ranks.fresh[1]))


@pytest.mark.timeout(400)  # engines start
class TestVLLM(EngineSuite):
    kills = ("install",)
    every = 4
    asks_each_call = False

    @pytest.fixture(autouse=True)
    def models(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def start(self) -> AbstractContextManager[Any]:
        return start(SETTING, self.checkpoints.path(SETTING.kind, 0))

    def make_driver(
        self, engine: Any, *, label: Any = default_label, **options: Any
    ) -> EngineDriver:
        return VLLMEngineAdapter(engine, serving=VLLMServing(label=label), **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return self.checkpoints.weights(SETTING.kind, number)

    def answers(self, engine: Any) -> object:
        return answers(engine)

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        said: list[str] = engine.collective_rpc("in_rank", args=(text,))
        return said

    @FULL  # two engines more; a killed worker of one rank is in `test_server.py`
    def test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version(
        self, running: EngineUnderTest
    ) -> None:
        super().test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version(
            running
        )


@FULL  # as the small engine does; and `test_from_trainers.py` has real ones
class TestVLLMOfShards(TestVLLM):
    """Two trainer ranks publish each version, each its shard."""

    publishers = 2
    every = 8


@FULL  # as the small engine does
class TestVLLMThrough(TestVLLM):
    every = 8

    def make_driver(self, engine: Any, **options: Any) -> EngineDriver:
        return super().make_driver(engine, staging="through", **options)


@FULL
class TestVLLMThroughOfShards(TestVLLMThrough):
    """Shards are written into the memory that serves."""

    publishers = 2


# ---- one rank fails -----------------------------------------------------------------------------


def plant(engine: Bench, point: str, nth: int, rank: int, action: str = "") -> None:
    if nth < 0:  # the last one: count them first, in an update that goes through
        engine.llm.collective_rpc("plant_fault", args=(point, 10_000))
        engine.update()
        nth += engine.llm.collective_rpc("uproot_fault")[rank]
    engine.llm.collective_rpc("plant_fault", args=(point, nth, action, rank))


def states(engine: Bench) -> list[tuple[object, object, object]]:
    told = engine.llm.collective_rpc("rl_bridge", args=("describe",))
    return [(rank["root"], rank["pending"], rank["torn"]) for rank in told]


@pytest.mark.parametrize(
    ("step", "rank", "by"),
    few_of(
        itertools.product(STEPS, (0, 1), ("executor", "vLLM's calls")),
        (STEPS[1], 0, "executor"),
        (STEPS[1], 1, "vLLM's calls"),
        (STEPS[6], 0, "vLLM's calls"),
        (STEPS[7], 1, "executor"),
    ),
)
def test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
    engine: Bench, step: tuple[str, int, str], rank: int, by: str
) -> None:
    point, nth, told = step
    engine.update(by)
    plant(engine, point, nth, rank)
    before = states(engine)
    with pytest.raises(Exception, match=f"rank {rank}: .*{told}"):
        engine.update(by)
    engine.llm.collective_rpc("uproot_fault")
    assert states(engine) == before
    assert before[0] == before[1]
    engine.check(f"{point} {nth} failed on rank {rank}")
    engine.update(by)
    engine.check("the next update")


@pytest.mark.parametrize("rank", [0, 1])
def test_versions_that_are_written_through_take_turns_and_faults_are_undone_at_every_layer(
    engine: Bench, rank: int
) -> None:
    with executor_for(engine.llm, staging="through") as executor:
        engine.executor, before = executor, engine.executor
        try:
            for turn in range(3):
                engine.update()
                engine.check(f"update {turn}")
            for nth in range(5):  # embeddings, two layers, the norm; the last one does not fail
                plant(engine, "layer", nth, rank)
                if nth < 4:
                    with pytest.raises(Exception, match=f"rank {rank}: .*planted"):
                        engine.update()
                else:
                    engine.update()
                engine.llm.collective_rpc("uproot_fault")
                engine.check(f"layer {nth}")
            assert executor.last_ack is not None
            assert executor.last_ack.proof.staging == "through"
        finally:
            engine.executor = before


def test_all_ranks_may_fail_at_once(engine: Bench) -> None:
    plant(engine, "exchange", 3, -1)
    with pytest.raises(Exception, match="planted"):
        engine.update()
    engine.llm.collective_rpc("uproot_fault")
    engine.check("all ranks failed")
    engine.update()
    engine.check("the next update")


# ---- vLLM's own calls ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "step"),
    few_of(itertools.product((0, 1), STEPS[1::2]), (0, STEPS[1]), (1, STEPS[7])),
)
def test_requests_under_way_do_not_notice_that_a_rank_failed(
    engine: Bench, step: tuple[str, int, str], rank: int
) -> None:
    point, nth, told = step
    plant(engine, point, nth, rank)
    long = 160  # tokens: the update begins and ends while they are made
    assert engine.llm.reset_prefix_cache()
    expected = engine.rest(engine.begin(f"quiet-{point}-{rank}", steps=3, max_tokens=long))
    before = states(engine)
    assert engine.llm.reset_prefix_cache()
    ids = engine.begin(f"live-{point}-{rank}", steps=3, max_tokens=long)
    with pytest.raises(Exception, match=f"rank {rank}: .*{told}"):
        engine.update()
    engine.llm.collective_rpc("uproot_fault")
    assert engine.llm.llm_engine.has_unfinished_requests()
    assert engine.rest(ids) == expected
    assert states(engine) == before


def test_a_byte_that_went_bad_is_found_by_the_ranks_and_told_to_the_trainer(
    engine: Bench,
) -> None:
    engine.update()
    before = states(engine)
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = FaultInjecting(SharedMemory())
    with BridgeOver(damaged) as trainer:
        manifest = trainer.publish(engine.next(), weight_version=1)
        damaged.corrupt(manifest, manifest.tensors[name].offset)
        with pytest.raises(ChecksumMismatch, match=rf"^rank 0: tensor checksum .* {name!r}"):
            engine.executor.update_weights(manifest)
        told = {(r.worker, r.rank): (r.state, r.reason) for r in trainer.holders(manifest)}
    assert told.keys() == {("rollout", 0), ("vllm", 0), ("vllm", 1)}
    assert told["rollout", 0][0] == "rejected"
    for state, reason in told.values():
        assert state in {"rejected", "released"}  # a rank that refused holds nothing any more
        assert reason is not None
        assert name in reason
    assert states(engine) == before
    engine.check("the ranks refused it")


def damaged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    return {**weights, name: torch.full_like(weights[name], float("nan"))}


def info(manifest: Any) -> dict[str, Any]:
    return {"update_info": {"manifest": manifest.to_json()}}


def told(llm: Any) -> list[dict[str, Any]]:
    replies = llm.collective_rpc("rl_bridge", args=("describe",))
    assert [reply["rank"] for reply in replies] == [0, 1]
    return list(replies)


def began(llm: Any) -> None:
    llm.start_weight_update()


CALLS: dict[str, tuple[Callable[[Any], None] | None, Callable[[Any, Any], None], str]] = {
    "update": (None, lambda llm, good: llm.update_weights(info(good)), "must be called before"),
    "finish": (None, lambda llm, _: llm.finish_weight_update("v"), "without a matching start"),
    "start again": (began, lambda llm, _: llm.start_weight_update(), "already"),
    "draft": (None, lambda llm, _: llm.start_draft_weight_update(), "draft"),
    "shut down": (began, lambda llm, _: llm.shutdown_weight_transfer_engine(), "active"),
    "one of two": (
        began,
        lambda llm, good: llm.collective_rpc("update_weights", args=([info(good)["update_info"]],)),
        "expected one for each",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_outside_of_its_session_is_one_error_and_the_ranks_stay_in_step(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]], name: str
) -> None:
    before, call, says = CALLS[name]
    with executor_for(llm) as executor:
        executor.update_weights(trainer.publish(weights[0]))
        old = answers(llm)
    good = trainer.publish(weights[1])
    if before is not None:
        before(llm)
    with pytest.raises(Exception, match=says):
        call(llm, good)
    assert [reply["pending"] for reply in told(llm)] == [None, None]
    assert answers(llm) == old
    if before is not None and name != "one of two":  # the session goes on
        llm.update_weights(info(good))
        llm.finish_weight_update("v")
    else:
        native_update(llm, good)
    assert {reply["update_id"] for reply in told(llm)} == {good.update_id}
    assert answers(llm) != old


def test_finishing_behind_a_refusal_is_one_error_and_the_ranks_stay_in_step(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    native_update(llm, trainer.publish(weights[0]))
    old = answers(llm)
    llm.start_weight_update()
    with pytest.raises(Exception, match="NaN"):
        llm.update_weights(info(trainer.publish(damaged(weights[1]))))
    for _ in range(3):  # as a `finally` does, again and again
        with pytest.raises(Exception, match="without a matching start"):
            llm.finish_weight_update("v")
    assert answers(llm) == old
    native_update(llm, trainer.publish(weights[1]))
    assert answers(llm) != old


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cast": "false"}, "expected True or False"),
        ({"transports": {"shared-memory": {"max_slots": 0}}}, "max_slots"),
    ],
    ids=["type", "transport"],
)
def test_a_wrong_option_is_refused(llm: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told):
        llm.init_weight_transfer_engine({"init_info": wrong})
    llm.init_weight_transfer_engine({"init_info": {}})


# ---- what a worker is given ---------------------------------------------------------------------


def test_ranks_that_are_given_different_updates_install_neither(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    native_update(llm, trainer.publish(weights[0]))
    old = answers(llm)
    first, second = trainer.publish(weights[0]), trainer.publish(weights[1])
    each = [info(manifest)["update_info"] for manifest in (first, second)]
    llm.start_weight_update()
    with pytest.raises(Exception, match="given different updates"):
        llm.collective_rpc("update_weights", args=(each,))
    assert [reply["pending"] for reply in told(llm)] == [None, None]
    assert answers(llm) == old
    third = trainer.publish(weights[1])
    llm.start_weight_update()
    llm.collective_rpc("update_weights", args=([info(third)["update_info"]] * 2,))
    llm.finish_weight_update("v")
    assert {reply["update_id"] for reply in told(llm)} == {third.update_id}
    assert answers(llm) != old


@pytest.mark.parametrize(
    "wrong",
    [
        ("prepare", {}),
        ("prepare", {"manifest": 5, "driver": [], "epoch": {}}),
        ("open", {"epoch": "x"}),
        ("open", {"epoch": -1}),
        ("prepare", ["manifest"]),
        ("prepare", "manifest"),
        ("install", {"update_id": ["x"]}),
        ("commit", {}),
        ("commit", {"update_id": {}}),
        ("no such verb", {}),
        (["describe"], {}),
        ({}, 0),
    ],
    ids=str,
)
def test_whatever_a_rank_is_asked_it_answers(llm: Any, wrong: tuple[Any, Any]) -> None:
    before = told(llm)
    replies = llm.collective_rpc("rl_bridge", args=wrong)
    assert [(reply["rank"], reply["ok"]) for reply in replies] == [(0, False), (1, False)]
    assert all(reply["message"] for reply in replies)
    assert told(llm) == before


@pytest.mark.parametrize("given", [None, 7, "manifest", [0, {}], {}, {"manifest": None}, {"x": 1}])
def test_an_update_info_that_is_none_is_one_error(llm: Any, given: object) -> None:
    before = told(llm)
    llm.start_weight_update()
    with pytest.raises(Exception, match="MalformedManifest"):
        llm.collective_rpc("update_weights", args=(given,))
    assert told(llm) == before
    with pytest.raises(Exception, match="without a matching start"):
        llm.finish_weight_update("v")
