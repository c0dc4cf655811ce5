"""Scenarios of `EngineSuite` that CI runs of a second kind of engine; the full run has all of them.

A class of tests that names some in its `in_ci` has the others marked `full`: `tests.conftest`.
"""

# What an engine of several ranks, or replicas, does together. One engine runs the whole suite.
TOGETHER = frozenset(
    {
        "test_version_after_version_the_engine_answers_as_a_fresh_one",
        "test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works",
        "test_an_undo_that_fails_on_one_rank_tears_the_engine_until_it_is_recovered",
        "test_a_driver_that_hears_only_some_of_the_ranks_is_refused",
        "test_a_second_driver_is_refused_by_the_name_of_the_first_and_touches_nothing",
        "test_a_session_that_only_some_ranks_heard_of_is_taken_over",
        "test_a_driver_that_was_killed_as_it_undid_or_took_over_is_taken_over",
        "test_what_only_some_ranks_hold_is_taken_back_on_all",
        "test_a_commit_that_fails_on_one_rank_is_made_again_and_never_undone",
        "test_a_label_that_cannot_be_set_is_an_update_that_is_undone",
    }
)
# What depends on how an update gets into the engine's memory, and out again.
MEMORY = frozenset(
    {
        "test_version_after_version_the_engine_answers_as_a_fresh_one",
        "test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works",
        "test_a_call_that_fails_anywhere_leaves_an_engine_that_recovers",
        "test_an_undo_that_fails_on_one_rank_tears_the_engine_until_it_is_recovered",
        "test_one_byte_changed_behind_an_install_is_found_and_undone",
        "test_an_engine_whose_update_was_released_is_undone_all_the_same",
        "test_what_cannot_be_undone_with_its_caches_is_kept_and_not_served",
        "test_an_update_over_the_memory_budget_is_refused_before_it_is_staged",
        "test_what_was_only_staged_is_released_and_may_come_again",
        "test_a_driver_that_was_killed_as_it_undid_or_took_over_is_taken_over",
    }
)
