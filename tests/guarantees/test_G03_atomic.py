"""G3 Atomic: an engine holds version N entirely or version M entirely, never a mixture.

Whatever fails and whenever: whenever `update_weights` is not running, the engine holds exactly the
version that the executor reports.

It ends at an engine that runs while it is changed: give `quiesce=` where a request may run during
an install. It ends at a torn engine (install and undo both failed): that one is marked, and refuses
to serve. It ends at `strict=False`, with which the caller vouches for what updates leave out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.testing import (
    Child,
    ChildDied,
    KillAt,
    Peer,
    bytes_of,
    hashes,
    sample_engine,
    sample_weights,
)
from tests.guarantees.kit import ADAPTERS, OverEachAdapter, engine_tensors, on_engines, scenarios


@scenarios(
    "test_version_after_version_the_engine_holds_what_was_published",
    "test_a_later_install_that_fails_leaves_the_version_before",
    "test_what_does_not_fit_is_refused_before_byte_0",
    "test_a_torn_engine_goes_back_to_before_it_was_torn",
    "test_a_later_version_in_full_mends_a_torn_engine",
    "test_a_ctrl_c_at_any_moment_leaves_one_version_or_the_other",
    "test_threads_that_update_one_engine_take_turns",
)
class TestEachAdapter(OverEachAdapter):
    """Whatever fails and whenever, interrupts and threads too."""


ENGINES = on_engines(
    "test_version_after_version_the_engine_answers_as_a_fresh_one",
    "test_an_update_that_does_not_fit_touches_nothing",
    "test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works",
    "test_ranks_go_back_within_the_call_that_failed",
    "test_an_undo_that_fails_on_one_rank_tears_the_engine_until_it_is_recovered",
    "test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version",
    "test_a_driver_that_was_killed_anywhere_is_taken_over",
    "test_a_driver_that_was_killed_as_it_undid_or_took_over_is_taken_over",
    "test_a_call_that_fails_anywhere_leaves_an_engine_that_recovers",
    "test_what_only_some_ranks_hold_is_taken_back_on_all",
    "test_a_commit_that_fails_on_one_rank_is_made_again_and_never_undone",
    "test_a_second_driver_is_refused_by_the_name_of_the_first_and_touches_nothing",
    "test_each_step_of_a_driver_that_was_taken_over_is_refused_by_name_and_changes_nothing",
    "test_an_executor_that_is_overtaken_in_an_install_is_refused_by_name_and_not_torn",
    "test_a_driver_that_was_taken_over_ends_no_pause_of_its_successors",
    "test_a_session_that_only_some_ranks_heard_of_is_taken_over",
    "test_a_call_that_comes_without_a_session_is_refused",
    "test_taking_over_is_for_the_first_update_alone",
    "test_a_driver_that_leaves_leaves_the_engine_to_the_next_one",
    "test_recovering_an_engine_that_is_ones_own_changes_nothing",
    "test_a_pause_of_the_users_own_outlasts_an_update_whatever_becomes_of_it",
)


@pytest.mark.parametrize("event", ["import", "verify", "stage", "install", "acknowledge"])
def test_an_engine_killed_at_any_step_starts_anew_with_a_whole_version(event: str) -> None:
    with make_weight_bridge("shared-memory", suspicious="off") as trainer:
        first, second = (
            trainer.publish(sample_weights(version), weight_version=version).to_json()
            for version in (1, 2)
        )
        made = {"transport_class": "shared-memory", "transport_kwargs": {}, "engine_seed": 0}
        with Child(Peer, **made, observer=KillAt(event, weight_version=2)) as victim:
            victim.call("update_weights", manifest=first)
            with pytest.raises(ChildDied):
                victim.call("update_weights", manifest=second)
        with Child(Peer, **made) as successor:
            assert successor.call("update_weights", manifest=second) == 2
            assert successor.call("engine") == hashes(sample_weights(2))


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_the_engine_is_changed_only_while_it_is_quiesced(mode: Any) -> None:
    engine, looks = sample_engine(), []

    def weights() -> dict[str, bytes]:
        return {name: bytes_of(tensor) for name, tensor in engine_tensors(engine).items()}

    @contextmanager
    def quiesce() -> Iterator[None]:
        looks.append(weights())
        yield
        looks.append(weights())

    adapter = ModuleInstallAdapter(engine, mode=mode, quiesce=quiesce)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        initial = weights()
        executor.update_weights(bridge.publish(sample_engine(seed=6), weight_version=1))
        assert looks == [initial, weights()]
        assert initial != weights()


def test_an_engine_without_a_verified_version_does_not_serve() -> None:
    adapter = ADAPTERS["copy"](sample_engine())
    with (
        RolloutExecutor(weight_install_adapter=adapter) as executor,
        pytest.raises(WeightBridgeUnavailableError),
    ):
        executor.check_servable()
