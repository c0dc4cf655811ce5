"""Ends of `broadcast` that an interrupt cuts off: the next call, or the next look, ends it."""

import sys
from contextlib import suppress

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.testing.processes import until
from rl_bridge.transports.broadcast.server import ControlServer
from tests.helpers import tracing
from tests.interrupts import InterruptBefore, cut_closes_off

WEIGHTS = {"w": torch.arange(1000)}


def pair() -> tuple[TensorBridge, TensorBridge]:
    """A receiver that has a version, and its trainer."""
    trainer = make_weight_bridge("broadcast", suspicious="off", timeout_s=20)
    receiver = make_weight_bridge("broadcast", source_worker="consumer", timeout_s=20)
    receiver.import_update(trainer.publish(WEIGHTS, weight_version=1))
    return receiver, trainer


def interrupted(*_args: object) -> None:
    raise KeyboardInterrupt


def test_a_close_that_was_cut_off_before_any_line_is_made_up_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What Python swallows inside a finalizer would be kept by the test runner, with all frames.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert cut_closes_off(pair, stride=11) > 100


def test_a_member_whose_end_was_cut_off_before_any_line_is_let_go_of_at_the_next_look() -> None:
    number, struck = 0, True
    while struck:
        receiver, trainer = pair()
        server = trainer.publisher.end._server  # type: ignore[attr-defined]
        assert isinstance(server, ControlServer)
        (member,) = server.members
        until(lambda member=member: member.updates, what="its report came")  # type: ignore[misc]
        with server.changed:
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                server._lose(member)
        struck = tracer.struck
        (report,) = trainer.consumers()  # looks
        assert (report.worker, member.is_gone) == ("consumer", member.channel.is_lost)
        assert server.members == ([] if member.is_gone else [member])
        receiver.close()
        trainer.close()
        number += 1
    assert number > 8


def test_a_report_whose_hearing_is_interrupted_is_told_again_by_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver, trainer = pair()
    server = trainer.publisher.end._server  # type: ignore[attr-defined]
    assert isinstance(server, ControlServer)
    (member,) = server.members
    until(lambda: member.updates, what="its report came")
    receiver.import_update(manifest := trainer.publish(WEIGHTS, weight_version=2))
    until(lambda: manifest.update_id in member.updates, what="its next report came")
    with server.changed:  # what comes waits for the next look
        receiver.acknowledge(manifest.update_id)
        with monkeypatch.context() as patch:
            patch.setattr(server, "_handle", interrupted)
            with pytest.raises(KeyboardInterrupt):
                until(server.catch_up, what="it is heard")
    trainer.consumers()
    assert member.is_gone
    receiver.import_update(trainer.publish(WEIGHTS, weight_version=3))
    states = [report.state for report in trainer.holders(manifest)]
    assert "acknowledged" in states
    receiver.close()
    trainer.close()
