"""The machine: history, observers, refusals with their remedy, several threads."""

import pytest

from rl_bridge.errors import IllegalTransition, WeightUpdateRejectedError
from rl_bridge.lifecycle import Event, Lifecycle, Role, State, Transition


def consumer(*events: Event) -> Lifecycle:
    life = Lifecycle(Role.CONSUMER, update_id="u1", weight_version=7)
    for event in events:
        life.fire(event)
    return life


def test_the_history_tells_every_step_with_its_time() -> None:
    ticks = iter([1.0, 2.5])
    life = Lifecycle(Role.PUBLISHER, update_id="u1", weight_version=7, clock=lambda: next(ticks))
    life.fire(Event.PUBLISH)
    life.fire(Event.RELEASE)
    assert tuple(life.history) == (
        Transition(
            role=Role.PUBLISHER,
            update_id="u1",
            weight_version=7,
            event=Event.PUBLISH,
            source=State.PREPARING,
            target=State.PUBLISHED,
            at_s=1.0,
        ),
        Transition(
            role=Role.PUBLISHER,
            update_id="u1",
            weight_version=7,
            event=Event.RELEASE,
            source=State.PUBLISHED,
            target=State.RELEASED,
            at_s=2.5,
        ),
    )


def test_an_observer_sees_each_step_after_it_happened() -> None:
    seen: list[tuple[Event, State]] = []
    life = Lifecycle(
        Role.CONSUMER,
        update_id="u1",
        weight_version=7,
        observer=lambda step: seen.append((step.event, life.state)),
    )
    life.fire(Event.IMPORT)
    with pytest.raises(IllegalTransition):
        life.fire(Event.STAGE)
    life.fire(Event.VERIFY)
    assert seen == [(Event.IMPORT, State.IMPORTED), (Event.VERIFY, State.VERIFIED)]


def test_an_observer_may_look_at_the_machine_and_fire_it() -> None:
    def react(step: Transition) -> None:
        if step.event is Event.IMPORT:
            assert Event.VERIFY in life.moves
            life.fire(Event.VERIFY)

    life = Lifecycle(Role.CONSUMER, update_id="u1", weight_version=7, observer=react)
    life.fire(Event.IMPORT)
    assert life.state is State.VERIFIED


def test_a_clock_that_fails_leaves_everything_as_it_was() -> None:
    def broken() -> float:
        msg = "no clock"
        raise OSError(msg)

    life = Lifecycle(Role.PUBLISHER, update_id="u1", weight_version=7, clock=broken)
    with pytest.raises(OSError, match="no clock"):
        life.fire(Event.PUBLISH)
    assert (life.state, life.history) == (State.PREPARING, [])


@pytest.mark.parametrize("before", [(), (Event.IMPORT,)], ids=["announced", "imported"])
def test_an_acknowledgement_before_import_keeps_the_words_that_users_know(
    before: tuple[Event, ...],
) -> None:
    with pytest.raises(
        WeightUpdateRejectedError,
        match=r"^cannot acknowledge update before import_update succeeds: update u1 \(version 7\)",
    ):
        consumer(*before).fire(Event.ACKNOWLEDGE)


def test_a_refusal_names_update_version_state_and_what_is_allowed() -> None:
    life = consumer(Event.IMPORT, Event.VERIFY)
    with pytest.raises(IllegalTransition) as caught:
        life.fire(Event.INSTALL)
    assert str(caught.value) == (
        "cannot install update u1 (version 7): it is verified. "
        "Allowed now: stage, acknowledge, reject, release."
    )


def test_a_refusal_repeats_the_reason_of_the_rejection() -> None:
    life = consumer()
    life.fire(Event.REJECT, reason="the disk is full")
    with pytest.raises(IllegalTransition, match=r"it is rejected \(the disk is full\)"):
        life.fire(Event.IMPORT)
    assert life.reason == "the disk is full"


def test_a_refusal_after_the_end_says_that_it_is_over() -> None:
    with pytest.raises(IllegalTransition, match="Allowed now: nothing: it is over"):
        consumer(Event.RELEASE).fire(Event.IMPORT)


def test_an_observer_that_fails_neither_stops_nor_undoes_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(step: Transition) -> None:
        msg = "no screen"
        raise ValueError(msg)

    life = Lifecycle(Role.CONSUMER, update_id="u1", weight_version=7, observer=broken)
    assert life.fire(Event.IMPORT) is State.IMPORTED
    assert life.state is State.IMPORTED
    assert "no screen" in caplog.text
