"""A whole engine of a quantized model, two ranks, updated by vLLM's own reload: all or none."""

from collections.abc import Iterator

import pytest

from rl_bridge.errors import IncompatibleUpdate
from tests.engines.drive import Setting, answers, executor_for, native_update
from tests.engines.models import Checkpoints, Kind
from tests.engines.test_reload import WITH_INT8, Served, quantized, serve
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.full  # that ranks decide together is tried in `test_ranks.py`
SETTING = Setting(Kind("qwen2", dtype=WITH_INT8), in_process=False, ranks=2)


@pytest.fixture(scope="module")
def served(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("int8")
    paths = [quantized(checkpoints.path(SETTING.kind, n), home / str(n)) for n in (0, 1)]
    yield from serve(paths, SETTING)


@pytest.mark.timeout(300)  # two engines start
def test_it_is_a_fresh_engine_after_each_update_and_claims_no_proof(
    served: Served, trainer: Trainer
) -> None:
    llm, weights, fresh = served.llm, served.weights, served.fresh
    with executor_for(llm) as executor, pytest.raises(IncompatibleUpdate, match="staging='reload'"):
        executor.update_weights(trainer.publish(weights[1]))
    assert answers(llm) == fresh[0]
    with executor_for(llm, staging="reload") as executor:
        for step in (1, 2, 3):
            executor.update_weights(trainer.publish(weights[step % 2]))
            assert answers(llm) == fresh[step % 2]
            ack = executor.last_ack
            assert ack is not None
            proof = ack.proof
            assert (proof.method, proof.root) == ("unproven", "")
            assert 0 < proof.tensors < len(weights[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_takes_the_other_back(
    served: Served, trainer: Trainer, rank: int
) -> None:
    llm, weights, fresh = served.llm, served.weights, served.fresh
    with executor_for(llm, staging="reload") as executor:
        executor.update_weights(trainer.publish(weights[0]))
        for nth in (1, 2):  # behind vLLM's reload: while it is proven
            llm.collective_rpc("plant_fault", args=("digest", nth, "", rank))
            with pytest.raises(Exception, match=f"rank {rank}: .*planted"):
                executor.update_weights(trainer.publish(weights[1]))
            llm.collective_rpc("uproot_fault")
            assert answers(llm) == fresh[0]
        executor.update_weights(trainer.publish(weights[1]))
    assert answers(llm) == fresh[1]


def test_vllms_own_calls_are_refused_where_the_executor_reloads(
    served: Served, trainer: Trainer
) -> None:
    llm, weights, fresh = served.llm, served.weights, served.fresh
    with executor_for(llm, staging="reload") as executor:
        executor.update_weights(trainer.publish(weights[0]))
    with pytest.raises(Exception, match="by reloads"):
        native_update(llm, trainer.publish(weights[1]))
    assert answers(llm) == fresh[0]
