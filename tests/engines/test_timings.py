"""What an acknowledgement says of its time and memory."""

from collections.abc import Iterator

import pytest

from tests.engines.drive import Setting
from tests.engines.engines import Bench, bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

PHASES = {"attach", "verify", "prepare", "pause", "install", "prove", "cache", "label", "resume"}


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints, references: References) -> Iterator[Bench]:
    with bench(Setting(Kind("llama")), checkpoints, references) as made:
        yield made


def test_the_phases_of_an_update_add_up_to_its_total(engine: Bench) -> None:
    # The sum is of one update each; of ten of them, the one that was least disturbed is taken.
    shares = []
    for _ in range(10):
        engine.update()
        assert engine.executor.last_ack is not None
        timings = dict(engine.executor.last_ack.timings_ms)
        total = timings.pop("total")
        assert set(timings) == PHASES
        assert all(value >= 0 for value in timings.values())
        assert sum(timings.values()) <= total * 1.001
        shares.append(sum(timings.values()) / total)
    assert max(shares) >= 0.95, shares


def test_the_trainer_is_told_the_same_times_and_the_root_that_was_proven(engine: Bench) -> None:
    manifest = engine.update()
    ack = engine.executor.last_ack
    assert ack is not None
    told = {report.worker: report for report in engine.trainer.holders(manifest)}
    assert told["rollout"].state == "acknowledged"
    assert told["rollout"].proof is not None
    assert told["rollout"].proof["root"] == manifest.root == ack.proof.root
    assert told["rollout"].timings_ms["prove"] == ack.timings_ms["prove"]
    assert told["vllm"].timings_ms.keys() >= {"import", "stage", "install", "prove"}
