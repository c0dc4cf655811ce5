"""G4 Undoable: after a failed install the engine is byte-identical to the version it reports.

Without a restart: the same tensors of the same engine, wherever the install failed. The first
update can be undone too: the initial weights come back, version None.

Scenarios that are only named here have their bodies in `rl_bridge/testing/installer_suite.py`.

It ends at adapters whose engine cannot be seen: through them the version before is installed again,
and what the engine then holds is not checked.
"""

from collections.abc import Mapping

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.testing import EngineFault, Rig, Stage, engine_state, sample_engine
from tests.guarantees.kit import (
    OverEachAdapter,
    TwoVerbAdapter,
    engine_tensors,
    on_engines,
    scenarios,
)


@scenarios(
    "test_a_first_install_that_fails_leaves_the_initial_weights",
    "test_a_later_install_that_fails_leaves_the_version_before",
    "test_an_install_that_fails_at_any_tensor_is_undone",
    "test_a_torn_engine_goes_back_to_before_it_was_torn",
    "test_tied_tensors_of_the_engine_stay_tied",
    "test_after_release_weights_a_failed_install_is_undone_all_the_same",
    "test_what_the_user_wrote_into_the_old_version_does_not_come_back",
)
class TestEachAdapter(OverEachAdapter):
    """To the same tensors of the same engine."""

    def test_what_the_engine_wrote_into_its_weights_does_not_come_back(self, rig: Rig) -> None:
        assert isinstance(rig.engine, torch.nn.Module)
        weights = rig.weights(1)
        rig.install(weights)
        engine_tensors(rig.engine)["norm.weight"].zero_()
        rig.sabotage.plan(Stage.AFTER_INSTALL)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(2))
        assert rig.version == 1
        assert rig.holds(weights)


ENGINES = on_engines(
    "test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works",
    "test_an_engine_whose_update_was_released_is_undone_all_the_same",
    "test_one_byte_changed_behind_an_install_is_found_and_undone",
    "test_an_undo_that_fails_on_one_rank_tears_the_engine_until_it_is_recovered",
    "test_caches_that_cannot_be_dropped_have_the_update_undone",
    "test_what_cannot_be_undone_with_its_caches_is_kept_and_not_served",
    "test_a_label_is_taken_back_with_its_version",
    "test_a_label_that_cannot_be_set_is_an_update_that_is_undone",
    "test_a_driver_without_a_label_leaves_it_alone",
)


class Hidden:
    """An adapter that shows nothing of its engine."""

    def __init__(self, engine: torch.nn.Module) -> None:
        self._inner = TwoVerbAdapter(engine)
        self.fails = False

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inner.install(manifest, tensors)
        if self.fails:
            self.fails = False
            raise LookupError("planted")

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


def test_through_an_adapter_that_hides_its_engine_the_version_before_is_installed_again() -> None:
    engine = sample_engine()
    initial = engine_state(engine)
    adapter = Hidden(engine)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, initial_weights=engine
        ) as executor,
    ):
        adapter.fails = True
        with pytest.raises(LookupError):
            executor.update_weights(bridge.publish(sample_engine(seed=1), weight_version=1))
        assert engine_state(engine) == initial
        executor.update_weights(bridge.publish(sample_engine(seed=2), weight_version=2))
        second = engine_state(engine)
        adapter.fails = True
        with pytest.raises(LookupError):
            executor.update_weights(bridge.publish(sample_engine(seed=3), weight_version=3))
        assert engine_state(engine) == second
        assert executor.active_weight_version == 2
