"""Two ranks, each in a process of its own: both have a version, or neither has it.

One rank fails while the other has finished its part, at each step and by both ways of updating;
then the engine is what it was and takes the next update. A rank that is killed is a typed error.
"""

from collections.abc import Iterator

import pytest

from rl_bridge import WeightBridgeError
from rl_bridge.errors import ChecksumMismatch
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from tests.engines.drive import Setting
from tests.engines.engines import Bench, bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3", tied=True), in_process=False, ranks=2)
BOTH_WAYS = pytest.mark.parametrize("by", ["executor", "vLLM's calls"])
EACH_RANK = pytest.mark.parametrize("rank", [0, 1])
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
def engine(checkpoints: Checkpoints, references: References) -> Iterator[Bench]:
    with bench(SETTING, checkpoints, references) as made:
        yield made


def plant(engine: Bench, point: str, nth: int, rank: int, action: str = "") -> None:
    if nth < 0:  # the last one: count them first, in an update that goes through
        engine.llm.collective_rpc("plant_fault", args=(point, 10_000))
        engine.update()
        nth += engine.llm.collective_rpc("uproot_fault")[rank]
    engine.llm.collective_rpc("plant_fault", args=(point, nth, action, rank))


def states(engine: Bench) -> list[tuple[object, object, object]]:
    told = engine.llm.collective_rpc("rl_bridge", args=("describe",))
    return [(rank["root"], rank["pending"], rank["torn"]) for rank in told]


@pytest.mark.timeout(240)  # the first one starts engines
@BOTH_WAYS
@EACH_RANK
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]}-{step[1]}")
def test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
    engine: Bench, step: tuple[str, int, str], rank: int, by: str
) -> None:
    point, nth, told = step
    engine.trainer.release_all()
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


@EACH_RANK
@pytest.mark.parametrize("step", STEPS[1::2], ids=lambda step: f"{step[0]}-{step[1]}")
def test_requests_under_way_do_not_notice_that_a_rank_failed(
    engine: Bench, step: tuple[str, int, str], rank: int
) -> None:
    point, nth, told = step
    engine.trainer.release_all()
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


@EACH_RANK
@pytest.mark.parametrize("of", ["files", "memory"])
def test_a_rank_that_is_short_of_something_takes_the_others_back(
    engine: Bench, of: str, rank: int
) -> None:
    engine.trainer.release_all()
    engine.update()
    before = states(engine)
    with Trainer() as another:  # of whom nothing is open yet: else nothing has to be opened
        manifest = another.publish(engine.next())
        engine.llm.collective_rpc("starve", args=(of, rank))
        try:
            with pytest.raises(WeightBridgeError, match=f"rank {rank}: "):
                engine.executor.update_weights(manifest)
            assert states(engine) == before
        finally:
            engine.llm.collective_rpc("feed")
    engine.check(f"rank {rank} had no {of}")
    engine.update()
    engine.check("the next update")


def test_a_byte_that_went_bad_is_found_by_the_ranks_and_told_to_the_trainer(
    engine: Bench,
) -> None:
    engine.trainer.release_all()
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


@BOTH_WAYS
def test_all_ranks_may_fail_at_once(engine: Bench, by: str) -> None:
    engine.trainer.release_all()
    plant(engine, "exchange", 3, -1)
    with pytest.raises(Exception, match="planted"):
        engine.update(by)
    engine.llm.collective_rpc("uproot_fault")
    engine.check()
    engine.update(by)
    engine.check()
