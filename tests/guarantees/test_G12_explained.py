"""G12 Explained: each acknowledgement carries phase timings, bytes and peak memory.

`bridge.timings(update_id)` has the phases of one side, `executor.last_ack` those of the engine,
`bridge.holders(update_id)` what consumers reported.
"""

from rl_bridge import RolloutExecutor, make_weight_bridge
from tests.guarantees.kit import OverEachAdapter, OverEachTransport, on_engines, scenarios


@scenarios(
    "test_publishing_and_importing_are_timed_phase_by_phase",
    "test_the_publisher_learns_what_became_of_an_update",
    "test_the_publisher_learns_that_tensors_are_still_held",
)
class TestEachTransport(OverEachTransport):
    """Each side tells its phases, and the publisher each consumer apart."""


@scenarios(
    "test_an_acknowledgement_says_what_was_installed_proven_and_how_long_it_took",
    "test_the_proof_reaches_the_publisher",
    "test_a_later_install_that_fails_leaves_the_version_before",
)
class TestEachAdapter(OverEachAdapter):
    """What was installed, how long each phase took, and what a failure led to."""


ENGINES = on_engines(
    "test_version_after_version_the_engine_answers_as_a_fresh_one",
    "test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works",
)


def test_an_unknown_update_has_no_timings() -> None:
    with make_weight_bridge("shared-memory") as bridge, RolloutExecutor() as executor:
        assert bridge.timings("f" * 32) == {}
        assert executor.last_ack is None
