"""The guarantees, kept by a real vLLM engine: the tests of `tests/guarantees`, another replica.

What the engine holds is asked of the engine: the tokens and log-probabilities that it answers are
to the bit those of a fresh engine with the same weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import WeightUpdateRejectedError
from rl_bridge.testing import Stage
from tests.engines.drive import Answers, Setting, answers, executor_for, start
from tests.engines.faults import PlantedError, plant, uproot
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.guarantees.kit import Replica, Tensors
from tests.guarantees.test_G03_atomic import (
    test_an_update_that_does_not_fit_touches_nothing,
    test_an_update_that_fails_leaves_the_engine_at_the_version_it_had,
    test_version_after_version_the_engine_holds_what_was_published,
)
from tests.guarantees.test_G04_undoable import (
    test_an_engine_whose_update_was_released_is_undone_all_the_same,
    test_an_install_that_fails_at_any_tensor_is_undone,
    test_failures_in_a_row_do_not_wear_the_undo_out,
    test_the_initial_weights_come_back_when_the_first_install_fails,
    test_the_version_before_comes_back_when_a_later_install_fails,
)
from tests.guarantees.test_G05_proven import (
    test_an_acknowledgement_carries_the_root_of_what_the_engine_holds,
    test_one_byte_changed_behind_the_adapters_back_is_found_and_undone,
    test_the_proof_reaches_the_publisher,
)
from tests.guarantees.test_G06_ordered import test_a_late_manifest_leaves_the_engine_as_it_is
from tests.guarantees.test_G12_explained import (
    test_a_failure_explains_what_was_done_about_it,
    test_an_acknowledgement_says_what_was_installed_and_how_long_each_phase_took,
    test_the_publisher_hears_the_consumers_phases,
)

POINTS = {Stage.BEFORE_INSTALL: "assemble", Stage.HALF_WAY: "exchange"}
"""Where a stage is in vLLM's worker. (Behind the proof it is vLLM's own label that fails.)"""


class VLLMReplica(Replica):
    """An engine in this process that may hold either of two versions."""

    fault = (PlantedError, WeightUpdateRejectedError)
    stages = frozenset({*POINTS, Stage.AFTER_PROOF})
    places = 12
    worker = "rollout"
    can_be_torn = False

    def __init__(self, engine: "Engine", executor: RolloutExecutor) -> None:
        super().__init__()
        self.engine, self.executor, self.trainer = engine, executor, engine.trainer
        self.at_first = engine.fresh.index(answers(engine.llm))

    def _which(self, number: int) -> int:
        return (self.at_first + number) % 2

    def weights(self, number: int) -> Tensors:
        return self.engine.weights[self._which(number)]

    def holds(self, number: int) -> bool:
        return answers(self.engine.llm) == self.engine.fresh[self._which(number)]

    def fail_next(self, stage: Stage, *, count: int = 3, undo_too: bool = False) -> None:
        if stage is Stage.AFTER_PROOF:
            self.engine.llm.update_weight_version = _fail
        else:
            plant(POINTS[stage], count)

    def damage_next(self) -> None:
        plant("corrupt", 2)

    def mend(self) -> None:
        uproot()
        vars(self.engine.llm).pop("update_weight_version", None)


def _fail(*_: object, **__: object) -> None:
    raise PlantedError("planted in the label")


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine, the weights of two versions, and what fresh engines of them answer."""

    llm: Any
    trainer: TensorBridge
    weights: Sequence[Tensors]
    fresh: list[Answers]


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints, references: References) -> Iterator[Engine]:
    setting = Setting(Kind("qwen3", tied=True))
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    second = references.of(setting, 1)  # first: there is one engine in a process at a time
    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as trainer,
        start(setting, checkpoints.path(setting.kind, 0)) as llm,
    ):
        first = answers(llm)
        llm.init_weight_transfer_engine({"init_info": {}})
        yield Engine(llm, trainer, weights, [first, second])


@pytest.fixture
def replica(engine: Engine) -> Iterator[Replica]:
    with executor_for(engine.llm) as executor:
        made = VLLMReplica(engine, executor)
        yield made
        made.close()
