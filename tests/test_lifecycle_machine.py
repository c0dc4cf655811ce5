"""The whole transaction against its model: every way to install, on both kinds of transport."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from rl_bridge.testing import LifecycleMachine
from rl_bridge.transports.base import Transport
from rl_bridge.transports.local import LocalClone


class AliasMachine(LifecycleMachine):
    mode = "alias"


class FlipMachine(LifecycleMachine):
    mode = "flip"


class LocalMachine(LifecycleMachine):
    def make_transport(self) -> Transport:
        return LocalClone()


@pytest.mark.parametrize("machine", [LifecycleMachine, AliasMachine, FlipMachine, LocalMachine])
@pytest.mark.parametrize("num", [100, pytest.param(300, marks=pytest.mark.full)])
def test_the_engine_is_always_at_its_version_or_torn(
    machine: type[LifecycleMachine], num: int
) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=num))
