"""G4 Undoable: after a failed install the engine is byte-identical to the version it reports.

Without a restart: the same tensors of the same engine, wherever the install failed. The first
update can be undone too: the initial weights come back, version None.

It ends at adapters whose engine cannot be seen: through them the version before is installed again,
and what the engine then holds is not checked.
"""

from collections.abc import Mapping

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import TornEngine
from rl_bridge.testing import Stage, engine_state, sample_engine
from tests.guarantees.kit import ModuleReplica, Replica, TwoVerbAdapter, engine_tensors


@pytest.mark.parametrize("stage", Stage)
def test_the_initial_weights_come_back_when_the_first_install_fails(
    replica: Replica, stage: Stage
) -> None:
    replica.require(stage)
    replica.fail_next(stage)
    with pytest.raises(replica.fault):
        replica.update(1)
    assert replica.holds(0)
    assert replica.version is None
    replica.mend()
    replica.update(1)
    assert replica.holds(1)


@pytest.mark.parametrize("stage", Stage)
def test_the_version_before_comes_back_when_a_later_install_fails(
    replica: Replica, stage: Stage
) -> None:
    replica.require(stage)
    before = replica.update(1).weight_version
    replica.fail_next(stage)
    with pytest.raises(replica.fault) as caught:
        replica.update(2)
    assert replica.holds(1)
    assert replica.version == before
    assert f"version {before}" in "".join([*caught.value.__notes__, str(caught.value)])


def test_the_tensors_that_come_back_are_the_same_objects_with_the_same_strides(
    replica: Replica,
) -> None:
    if not isinstance(replica, ModuleReplica):
        pytest.skip("an engine in a process of its own")
    for number in (1, 2):
        before = engine_state(replica.engine)
        replica.fail_next(Stage.AFTER_INSTALL)
        with pytest.raises(replica.fault):
            replica.update(number + 10)
        assert engine_state(replica.engine) == before
        replica.update(number)


def test_an_install_that_fails_at_any_tensor_is_undone(replica: Replica) -> None:
    replica.update(1)
    for count in range(0, replica.places, 3):
        replica.fail_next(Stage.HALF_WAY, count=count)
        with pytest.raises(replica.fault):
            replica.update(2)
        assert replica.holds(1), f"after {count} tensors"


def test_failures_in_a_row_do_not_wear_the_undo_out(replica: Replica) -> None:
    for number in (1, 2):
        for _ in range(4):
            replica.fail_next(Stage.HALF_WAY)
            with pytest.raises(replica.fault):
                replica.update(number)
            assert replica.holds(number - 1)
        replica.mend()
        replica.update(number)


def test_an_engine_whose_update_was_released_is_undone_all_the_same(replica: Replica) -> None:
    replica.update(1)
    replica.executor.release_weights()
    assert replica.holds(1)
    replica.fail_next(Stage.HALF_WAY)
    with pytest.raises(replica.fault):
        replica.update(2)
    assert replica.holds(1)


def test_the_undo_leads_back_to_what_was_before_the_engine_was_torn(replica: Replica) -> None:
    replica.require_torn()
    replica.update(1)
    replica.fail_next(Stage.HALF_WAY, undo_too=True)
    with pytest.raises(TornEngine):
        replica.update(2)
    replica.fail_next(Stage.HALF_WAY)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it raises, recover must work
        replica.update(4)
    replica.mend()
    replica.executor.recover()
    assert replica.holds(1)


def test_the_published_bytes_come_back_also_where_the_engine_wrote_to_its_weights(
    replica: Replica,
) -> None:
    assert isinstance(replica, ModuleReplica)
    before = replica.update(1).weight_version
    engine_tensors(replica.engine)["norm.weight"].zero_()
    replica.fail_next(Stage.AFTER_INSTALL)
    with pytest.raises(replica.fault):
        replica.update(2)
    assert replica.version == before
    assert replica.holds(1)


# ---- an engine that cannot be seen --------------------------------------------------------------


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
