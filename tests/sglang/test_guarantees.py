"""The guarantees, kept by a real SGLang engine: the tests of `tests/guarantees`, another replica.

The engine runs in processes of its own. What it holds is asked of it: SGLang's own checksums of all
parameters, and the tokens and log-probabilities that it answers.
"""

from collections.abc import Iterator

import pytest

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import WeightUpdateRejectedError
from rl_bridge.testing import Stage
from tests.guarantees.kit import Replica, Tensors
from tests.guarantees.test_G03_atomic import (
    test_a_later_version_in_full_mends_a_torn_engine,
    test_an_engine_whose_undo_fails_too_is_torn_and_does_not_serve,
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
from tests.sglang.bench import Bench, executor_for, sums_of

POINTS = {Stage.BEFORE_INSTALL: "staging", Stage.HALF_WAY: "fail"}
"""Where a stage is in SGLang's scheduler."""


class SGLangReplica(Replica):
    """An engine that may hold either of two versions."""

    fault = WeightUpdateRejectedError
    stages = frozenset(POINTS)
    places = 12
    worker = "rollout"

    def __init__(self, bench: Bench, executor: RolloutExecutor, trainer: TensorBridge) -> None:
        super().__init__()
        self.bench, self.executor, self.trainer = bench, executor, trainer
        self.at_first = bench.sums.index(sums_of(bench.engine))

    def _which(self, number: int) -> int:
        return (self.at_first + number) % 2

    def weights(self, number: int) -> Tensors:
        return self.bench.weights[self._which(number)]

    def holds(self, number: int) -> bool:
        self.bench.holds = self._which(number)
        held: bool = sums_of(self.bench.engine) == self.bench.sums[self.bench.holds]
        return held and self.bench.answers() == self.bench.fresh[self.bench.holds]

    def fail_next(self, stage: Stage, *, count: int = 3, undo_too: bool = False) -> None:
        self.bench.plant("undo" if undo_too else POINTS[stage], count)

    def damage_next(self) -> None:
        self.bench.plant("corrupt", 2)

    def mend(self) -> None:
        self.bench.uproot()


@pytest.fixture
def replica(bench: Bench) -> Iterator[Replica]:
    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as trainer,
        executor_for(bench.engine) as executor,
    ):
        made = SGLangReplica(bench, executor, trainer)
        yield made
        made.close()
    bench.holds = bench.sums.index(sums_of(bench.engine))
