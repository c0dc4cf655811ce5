"""What an agent knows of slots is given back with them."""

from typing import Any, cast

import pytest
import torch

from rl_bridge.memory import vm
from rl_bridge.transports.nixl.agent import Region
from rl_bridge.transports.nixl.arenas import SlotRegistry
from rl_bridge.transports.nixl.serving_process import Host
from rl_bridge.transports.wire.arenas import CPUArenas


class Interrupted:
    """A host whose first call to give memory back an interrupt cuts off."""

    def __init__(self) -> None:
        self.live: list[Region] = []
        self.calls = 0

    def register_segment(self, segment: Any) -> Region:
        self.live.append(Region(None, 1, segment.address))
        return self.live[-1]

    def deregister(self, region: Region) -> None:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        self.live.remove(region)


def test_a_registration_whose_end_an_interrupt_cut_off_is_ended_by_the_next_close() -> None:
    host = Interrupted()
    slot = CPUArenas().make_slot("rl_bridge-test", vm.PAGE)
    SlotRegistry(cast("Host", host), torch.device("cpu")).add(slot)
    with pytest.raises(KeyboardInterrupt):
        slot.close()
    assert host.live
    slot.close()
    assert not host.live
