"""``local-clone`` keeps every promise of a transport: it is the suite's oracle."""

from contextlib import ExitStack

from rl_bridge.testing import TransportSuite
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.transports.local import LocalClone


class TestLocalClone(TransportSuite):
    transport_class = LocalClone


def test_of_consumers_that_left_together_the_last_sixty_four_are_remembered() -> None:
    with ExitStack() as held, BridgeOver(LocalClone()) as trainer:
        manifest = trainer.publish(sample_weights(1), weight_version=1)
        for _ in range(70):
            held.enter_context(BridgeOver(LocalClone())).import_update(manifest)
        assert len(trainer.consumers()) == 70
        held.close()
        assert [report.presence for report in trainer.consumers()] == ["gone"] * 64
