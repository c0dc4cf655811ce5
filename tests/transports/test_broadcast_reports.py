"""A look at what members of `broadcast` reported may be interrupted; no report is lost by that."""

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.testing.processes import until
from rl_bridge.transports.broadcast.server import ControlServer

WEIGHTS = {"w": torch.arange(1000)}


def pair() -> tuple[TensorBridge, TensorBridge]:
    """A receiver that has a version, and its trainer."""
    trainer = make_weight_bridge("broadcast", suspicious="off", timeout_s=20)
    receiver = make_weight_bridge("broadcast", source_worker="consumer", timeout_s=20)
    receiver.import_update(trainer.publish(WEIGHTS, weight_version=1))
    return receiver, trainer


def interrupted(*_args: object) -> None:
    raise KeyboardInterrupt


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
