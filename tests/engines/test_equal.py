"""After updates, an engine is a fresh one: every token and every log-probability, to the bit.

Over twenty updates there and back, with failures in between that must leave no trace; first by the
executor, then by vLLM's own calls, in every kind of engine.
"""

import pytest

from tests.engines.drive import Setting, answers, executor_for, native_update, start
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import Checkpoints
from tests.engines.pairs import every_setting, pairs_of, pairwise
from tests.engines.references import References
from tests.engines.trainer import Trainer

UPDATES = 20

CHOSEN = pairwise(every_setting())
REST = [setting for setting in every_setting() if setting not in CHOSEN]


def test_the_chosen_engines_have_every_pair_of_properties() -> None:
    everything = frozenset[object]().union(*map(pairs_of, every_setting()))
    assert frozenset[object]().union(*map(pairs_of, CHOSEN)) == everything
    assert len(CHOSEN) < len(every_setting()) / 4


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "setting",
    [*CHOSEN, *(pytest.param(setting, marks=pytest.mark.full) for setting in REST)],
    ids=str,
)
def test_an_engine_is_a_fresh_one_after_twenty_updates_and_failures(
    setting: Setting, checkpoints: Checkpoints, references: References, trainer: Trainer
) -> None:
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    fresh = [references.of(setting, 1)]
    with start(setting, checkpoints.path(setting.kind, 0)) as llm:
        fresh.insert(0, answers(llm))  # it is a fresh one itself
        assert fresh[0] != fresh[1]
        with executor_for(llm) as executor:
            for step in range(1, UPDATES + 1):
                if step % 3 == 0:
                    failure = list(FAILURES)[step // 3 % len(FAILURES)]
                    fail(failure, llm, executor.update_weights, weights[step % 2], trainer)
                    assert answers(llm) == fresh[(step - 1) % 2], f"behind {failure} at {step}"
                manifest = trainer.publish(weights[step % 2])
                executor.update_weights(manifest)
                assert answers(llm) == fresh[step % 2], f"update {step}"
                assert executor.last_ack is not None
                assert executor.last_ack.proof.root == manifest.root

        llm.init_weight_transfer_engine({"init_info": {}})
        for step in range(1, UPDATES + 1):
            if step % 3 == 0:
                failure = list(FAILURES)[step // 3 % len(FAILURES)]
                fail(failure, llm, lambda m: native_update(llm, m), weights[step % 2], trainer)
                assert answers(llm) == fresh[(step - 1) % 2], f"native, behind {failure} at {step}"
            manifest = trainer.publish(weights[step % 2])
            native_update(llm, manifest)
            assert answers(llm) == fresh[step % 2], f"native, update {step}"
            assert llm.get_weight_version() == f"v{manifest.weight_version}"
