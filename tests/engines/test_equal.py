"""After updates, an engine is a fresh one: every token and every log-probability, to the bit.

Over updates there and back, with failures in between that must leave no trace; first by the
executor, then by vLLM's own calls, in every kind of engine.
"""

import itertools

import pytest

from tests.engines.drive import Setting, answers, executor_for, native_update, start
from tests.engines.matrix import few_of
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.trainer import Trainer

# These have families, ties, dtypes, graphs and processes between them; ranks are `test_ranks.py`s.
CHOSEN = [
    Setting(Kind("qwen2", tied=True, dtype="bfloat16"), compiled=True),
    Setting(Kind("moe")),
    Setting(Kind("llama", dtype="bfloat16"), in_process=False),
]
EVERY = [
    Setting(Kind(family, tied, dtype), compiled, in_process, ranks)
    for family, tied, dtype, compiled, in_process, ranks in itertools.product(
        ("qwen2", "qwen3", "llama", "moe"),
        (False, True),
        ("float32", "bfloat16"),
        (False, True),
        (True, False),
        (1, 2),
    )
    if not (in_process and ranks > 1)  # two ranks cannot be in one process
]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "setting",
    few_of(EVERY, *CHOSEN),
    ids=str,
)
def test_an_engine_is_a_fresh_one_after_updates_and_failures(
    setting: Setting, checkpoints: Checkpoints, references: References, trainer: Trainer
) -> None:
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    second = references.of(setting, 1)
    with start(setting, checkpoints.path(setting.kind, 0)) as llm, executor_for(llm) as executor:
        fresh = [answers(llm), second]  # it is a fresh one itself
        assert fresh[0] != fresh[1]
        llm.init_weight_transfer_engine({"init_info": {}})
        for update in (executor.update_weights, lambda m: native_update(llm, m)):
            for step, failure in enumerate((*FAILURES, "nan"), 1):
                fail(failure, llm, update, weights[step % 2], trainer)
                assert answers(llm) == fresh[(step - 1) % 2], f"behind {failure} at {step}"
                manifest = trainer.publish(weights[step % 2])
                update(manifest)
                assert answers(llm) == fresh[step % 2], f"update {step}"
                told = llm.collective_rpc("rl_bridge", args=("describe",))
                assert {rank["root"] for rank in told} == {manifest.root}
