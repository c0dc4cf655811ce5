"""The transition table: its properties, and every pair of state and event walked by the machine."""

import pytest

from rl_bridge.errors import IllegalTransition
from rl_bridge.lifecycle import CONSUMER, INITIAL, STATUS, TABLE, Event, Lifecycle, Role, State

EVERY = [(role, state, event) for role in Role for state in TABLE[role] for event in Event]


def path_to(role: Role, target: State) -> tuple[Event, ...]:
    """The shortest way from a role's first state."""
    paths: dict[State, tuple[Event, ...]] = {INITIAL[role]: ()}
    queue = [INITIAL[role]]
    for state in queue:
        for event, successor in TABLE[role][state].items():
            if successor not in paths:
                paths[successor] = (*paths[state], event)
                queue.append(successor)
    return paths[target]  # there is one to each state of the table


def entered_from(target: State) -> dict[State, Event]:
    return {
        state: event
        for state, moves in CONSUMER.items()
        for event, successor in moves.items()
        if successor is target
    }


@pytest.mark.parametrize(("role", "state", "event"), EVERY)
def test_every_pair_is_the_tables_move_or_illegal_and_changes_nothing(
    role: Role, state: State, event: Event
) -> None:
    life = Lifecycle(role, update_id="u" * 32, weight_version=3)
    for step in path_to(role, state):
        life.fire(step)
    assert life.state is state
    before = list(life.history)
    successor = TABLE[role][state].get(event)
    assert (event in life.moves) is (successor is not None)
    if successor is None:
        with pytest.raises(IllegalTransition):
            life.fire(event, reason="not recorded")
        assert (life.state, life.history, life.reason) == (state, before, None)
    else:
        assert life.fire(event, reason="why") is successor
        assert (life.state, life.reason) == (successor, "why")
        assert life.history[:-1] == before
        assert (life.history[-1].source, life.history[-1].target) == (state, successor)


@pytest.mark.parametrize("role", Role)
def test_released_is_the_only_end(role: Role) -> None:
    assert [state for state, moves in TABLE[role].items() if not moves] == [State.RELEASED]


def test_nothing_unverified_becomes_active() -> None:
    assert entered_from(State.ACKNOWLEDGED).keys() == {State.VERIFIED, State.INSTALLED}
    assert entered_from(State.VERIFIED) == {State.IMPORTED: Event.VERIFY}
    stages = {State.VERIFIED: Event.STAGE, State.INSTALLED: Event.UNDO}
    assert entered_from(State.STAGED) == stages
    assert entered_from(State.INSTALLED).keys() == {State.STAGED, State.TORN}


def test_torn_ends_by_a_completed_undo_or_a_full_install_only() -> None:
    assert CONSUMER[State.TORN].keys() == {Event.UNDO, Event.INSTALL}
    assert set(entered_from(State.TORN)) == {State.STAGED, State.INSTALLED}


def test_rejecting_is_possible_in_every_state_before_acknowledged() -> None:
    before = {State.ANNOUNCED, State.IMPORTED, State.VERIFIED, State.STAGED, State.INSTALLED}
    assert {state for state in CONSUMER if Event.REJECT in CONSUMER[state]} == before


def test_an_engine_that_was_written_cannot_be_released_before_it_is_decided() -> None:
    assert all(Event.RELEASE not in CONSUMER[state] for state in (State.INSTALLED, State.TORN))


def test_every_state_has_one_of_the_five_words() -> None:
    assert set(STATUS) == set(State)
    words = {"published", "imported", "acknowledged", "rejected", "released"}
    assert set(STATUS.values()) == words
    assert STATUS[State.TORN] == "rejected"
