"""Interrupts before any line of a trainer's side on Ray cost it no slot, no lane and no version."""

from contextlib import suppress

import pytest
import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.lifecycle import State
from rl_bridge.ray import PublisherSide
from rl_bridge.ray.calls import Announcement
from rl_bridge.ray.pairing import PairChoice
from tests.helpers import tracing
from tests.interrupts import InterruptBefore

MEMORY = PairChoice(transport="shared-memory", reason="a test").to_json()
BROADCAST = PairChoice(
    transport="broadcast", reason="a test", publisher_options={"address": "127.0.0.1"}
).to_json()
LANES = ["broadcast", "shared-memory"]


class Trainer:
    """A side over one tensor, which serves this machine."""

    def __init__(self) -> None:
        self.weights = {"w": torch.zeros(8)}
        self.side = PublisherSide(lambda: self.weights)
        self.side.serve(MEMORY)

    def publish(self, version: int) -> list[str]:
        """The lanes that it is published on."""
        self.weights["w"].fill_(version)
        return sorted(self.side.publish(version)[1])

    def held(self, lane: str) -> int:
        """How many versions have a slot of a lane."""
        updates = self.side._lanes[lane].bridge.publisher._updates.values()
        return sum(one.lifecycle.state is not State.RELEASED for one in updates)


@pytest.mark.parametrize("what", ["publish", "serve", "drop"])
def test_an_interrupt_before_any_line_of_it_costs_neither_a_slot_nor_a_lane(what: str) -> None:
    number, struck = 0, True
    while struck:
        trainer = Trainer()
        if what != "serve":
            trainer.side.serve(BROADCAST)
        trainer.publish(1)
        trainer.publish(2)
        tracer = InterruptBefore(number, within="/ray/publisher_side.py")
        with suppress(KeyboardInterrupt), tracing(tracer):
            match what:
                case "publish":
                    trainer.publish(3)
                case "serve":
                    trainer.side.serve(BROADCAST)
                case "drop":
                    trainer.side.drop("broadcast")
        struck = tracer.struck
        if what == "drop":
            lanes = trainer.publish(4)
            assert [trainer.held(lane) for lane in lanes] == [2] * len(lanes), number
        out = Announcement.from_json(trainer.side.announcement())
        served = WeightUpdateManifest.from_json(trainer.side.serve(BROADCAST))
        assert (served.weight_version, served.root) == (out.weight_version, out.root), number
        for version in range(5, 8):
            assert trainer.publish(version) == LANES, number
        assert [trainer.held(lane) for lane in LANES] == [2, 2], number
        trainer.side.close()
        number += 1
    assert number > 12
