"""The transition table: its properties, and every pair of state and event walked by the machine."""

import pytest

from rl_bridge.errors import IllegalTransition
from rl_bridge.lifecycle import (
    CONSUMER,
    INITIAL,
    PUBLISHER,
    STATUS,
    TABLE,
    Event,
    Lifecycle,
    Role,
    State,
    mermaid,
    shortest_path,
)

EVERY = [(role, state, event) for role in Role for state in TABLE[role] for event in Event]


def entered_from(role: Role, target: State) -> dict[State, Event]:
    return {
        state: event
        for state, moves in TABLE[role].items()
        for event, successor in moves.items()
        if successor is target
    }


@pytest.mark.parametrize(("role", "state", "event"), EVERY)
def test_every_pair_is_the_tables_move_or_illegal_and_changes_nothing(
    role: Role, state: State, event: Event
) -> None:
    life = Lifecycle(role, update_id="u" * 32, weight_version=3, clock=lambda: 1.5)
    path = shortest_path(role, state)
    assert path is not None
    for step in path:
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
def test_every_state_of_the_table_can_be_reached(role: Role) -> None:
    assert all(shortest_path(role, state) is not None for state in TABLE[role])
    assert shortest_path(role, INITIAL[role]) == ()


def test_a_state_of_the_other_side_cannot_be_reached() -> None:
    assert shortest_path(Role.PUBLISHER, State.TORN) is None
    assert shortest_path(Role.CONSUMER, State.PREPARING) is None


@pytest.mark.parametrize("role", Role)
def test_every_move_leads_to_a_state_of_the_same_table(role: Role) -> None:
    assert all(target in TABLE[role] for moves in TABLE[role].values() for target in moves.values())


@pytest.mark.parametrize("role", Role)
def test_released_is_the_only_end(role: Role) -> None:
    assert [state for state, moves in TABLE[role].items() if not moves] == [State.RELEASED]


def test_nothing_unverified_becomes_active() -> None:
    assert entered_from(Role.CONSUMER, State.ACKNOWLEDGED) == {
        State.VERIFIED: Event.ACKNOWLEDGE,
        State.INSTALLED: Event.ACKNOWLEDGE,
    }
    assert entered_from(Role.CONSUMER, State.VERIFIED) == {State.IMPORTED: Event.VERIFY}
    assert entered_from(Role.CONSUMER, State.IMPORTED) == {State.ANNOUNCED: Event.IMPORT}
    assert entered_from(Role.CONSUMER, State.STAGED) == {State.VERIFIED: Event.STAGE}
    assert entered_from(Role.CONSUMER, State.INSTALLED) == {
        State.STAGED: Event.INSTALL,
        State.TORN: Event.INSTALL,
    }


def test_torn_ends_by_a_completed_undo_or_a_full_install_only() -> None:
    assert dict(CONSUMER[State.TORN]) == {
        Event.UNDO: State.REJECTED,
        Event.INSTALL: State.INSTALLED,
    }
    assert set(entered_from(Role.CONSUMER, State.TORN)) == {State.STAGED, State.INSTALLED}


def test_rejecting_is_possible_in_every_state_before_acknowledged() -> None:
    before = {State.ANNOUNCED, State.IMPORTED, State.VERIFIED, State.STAGED, State.INSTALLED}
    assert {state for state in CONSUMER if Event.REJECT in CONSUMER[state]} == before
    assert dict(CONSUMER[State.REJECTED]) == {Event.RELEASE: State.RELEASED}
    assert dict(CONSUMER[State.ACKNOWLEDGED]) == {Event.RELEASE: State.RELEASED}


def test_an_engine_that_was_written_cannot_be_released_before_it_is_decided() -> None:
    for state in (State.INSTALLED, State.TORN):
        assert Event.RELEASE not in CONSUMER[state]


def test_a_publisher_publishes_and_releases() -> None:
    assert dict(PUBLISHER[State.PREPARING]) == {
        Event.PUBLISH: State.PUBLISHED,
        Event.RELEASE: State.RELEASED,
    }
    assert dict(PUBLISHER[State.PUBLISHED]) == {Event.RELEASE: State.RELEASED}


def test_every_state_has_one_of_the_five_words() -> None:
    assert set(STATUS) == set(State)
    words = {"published", "imported", "acknowledged", "rejected", "released"}
    assert set(STATUS.values()) == words
    assert STATUS[State.TORN] == "rejected"
    assert {s for s, word in STATUS.items() if word == "imported"} == {
        State.IMPORTED,
        State.VERIFIED,
        State.STAGED,
        State.INSTALLED,
    }


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TABLE[Role.CONSUMER][State.TORN][Event.RELEASE] = State.RELEASED  # type: ignore[index]
    with pytest.raises(TypeError):
        TABLE[Role.CONSUMER][State.RELEASED] = {}  # type: ignore[index]


@pytest.mark.parametrize("role", Role)
def test_the_diagram_has_one_line_for_each_move(role: Role) -> None:
    lines = mermaid(role).splitlines()
    moves = [
        f"    {state} --> {target}: {event}"
        for state, successors in TABLE[role].items()
        for event, target in successors.items()
    ]
    assert lines[0] == "stateDiagram-v2"
    assert lines[1] == f"    [*] --> {INITIAL[role]}"
    assert lines[2:-1] == moves
    assert lines[-1] == "    released --> [*]"
