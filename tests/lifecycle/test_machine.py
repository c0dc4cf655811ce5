"""The machine: history, observers, and refusals with their remedy."""

import pytest

from rl_bridge.errors import IllegalTransition, WeightUpdateRejectedError
from rl_bridge.lifecycle import Event, Lifecycle, Observer, Role, State, Transition


def consumer(*events: Event, observer: Observer | None = None) -> Lifecycle:
    life = Lifecycle(Role.CONSUMER, update_id="u1", weight_version=7, observer=observer)
    for event in events:
        life.fire(event)
    return life


def test_the_history_tells_every_step_with_its_time() -> None:
    first, second = consumer(Event.IMPORT, Event.RELEASE).history
    assert 0 < first.at_s <= second.at_s
    assert (second.role, second.update_id, second.weight_version) == (Role.CONSUMER, "u1", 7)
    assert [(step.event, step.source, step.target) for step in (first, second)] == [
        (Event.IMPORT, State.ANNOUNCED, State.IMPORTED),
        (Event.RELEASE, State.IMPORTED, State.RELEASED),
    ]


def test_an_observer_sees_each_step_after_it_happened_and_may_fire_the_next() -> None:
    seen: list[tuple[Event, State]] = []

    def react(step: Transition) -> None:
        seen.append((step.event, life.state))
        if step.event is Event.IMPORT:
            life.fire(Event.VERIFY)

    life = consumer(observer=react)
    life.fire(Event.IMPORT)
    with pytest.raises(IllegalTransition):
        life.fire(Event.IMPORT)
    assert seen == [(Event.IMPORT, State.IMPORTED), (Event.VERIFY, State.VERIFIED)]


def test_an_observer_that_fails_neither_stops_nor_undoes_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: Transition) -> None:
        raise ValueError("no screen")

    assert consumer(Event.IMPORT, observer=broken).state is State.IMPORTED
    assert "no screen" in caplog.text


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
    with pytest.raises(IllegalTransition) as caught:
        consumer(Event.IMPORT, Event.VERIFY).fire(Event.INSTALL)
    assert str(caught.value) == (
        "cannot install update u1 (version 7): it is verified. "
        "Allowed now: stage, acknowledge, reject, release."
    )
    with pytest.raises(IllegalTransition, match="Allowed now: nothing: it is over"):
        consumer(Event.RELEASE).fire(Event.IMPORT)


def test_a_refusal_repeats_the_reason_of_the_rejection() -> None:
    life = consumer()
    life.fire(Event.REJECT, reason="the disk is full")
    with pytest.raises(IllegalTransition, match=r"it is rejected \(the disk is full\)"):
        life.fire(Event.IMPORT)
