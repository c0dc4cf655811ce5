"""`device=` of ``nixl``, without a GPU: the library is asked for VRAM, and is given host memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.errors import TransportUnavailable
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.slots import STAMP_NBYTES
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.transports.nixl import arenas, fetch, server, transport
from rl_bridge.transports.nixl.agent import Agent, Kind, Made, Ranges, Region
from rl_bridge.transports.nixl.transport import NIXL
from rl_bridge.transports.wire.arenas import Arenas, DeviceArenas
from tests.transports.on_device import InTorchMemory

GPU = 1


class Library(Agent):
    """Notes what it is asked for; the GPU's memory is the host's."""

    asked: list[tuple[str, Kind, int, int, int]]
    """What for, kind, device, address, size."""

    def register(self, ranges: Any, kind: Kind, device: int = 0) -> Region:
        self.asked += [("register", kind, device, *one) for one in ranges]
        return super().register(ranges, "DRAM", 0)

    def prepare(self, peer: str | None, ranges: Ranges, kind: Kind) -> Made:
        what = "here" if peer is None else "there"
        self.asked += [(what, kind, int(one[2]), int(one[0]), int(one[1])) for one in ranges]
        plain = ranges.copy()
        plain[:, 2] = np.uint64(0)
        return super().prepare(peer, plain, "DRAM")


class OnGPU(arenas.SlotRegistry):
    """Slots that are said to lie on a GPU."""

    def __init__(self, agent: Any, device: torch.device) -> None:
        assert device.type == "cpu"
        super().__init__(agent, torch.device("cuda", GPU))


class OverHost(NIXL):
    """From and to memory of torch's allocator."""

    def _arenas(self) -> Arenas:
        return DeviceArenas(CPU_PLACE)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Kind, int, int, int]]:
    Library.asked = []
    monkeypatch.setattr(transport, "Agent", Library)
    for side in (server, fetch):
        monkeypatch.setattr(side, "SlotRegistry", OnGPU)
    return Library.asked


@pytest.fixture
def trainer() -> Iterator[BridgeOver]:
    # As device= would have it served.
    with BridgeOver(FaultInjecting(OverHost(serve="inline", timeout_s=20.0))) as bridge:
        yield bridge


@pytest.fixture
def rollout(trainer: BridgeOver) -> Iterator[BridgeOver]:
    with BridgeOver(OverHost(timeout_s=20.0)) as bridge:
        yield bridge


def test_arenas_are_the_gpus_and_stamps_the_hosts(
    trainer: BridgeOver, rollout: BridgeOver, asked: list[tuple[str, Kind, int, int, int]]
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    tensors = rollout.import_update(manifest)
    registered = [one[1:] for one in asked if one[0] == "register"]
    gpu = [(address, nbytes) for kind, device, address, nbytes in registered if kind == "VRAM"]
    assert len(gpu) == 2, "one slot on each side"
    assert all(device == (GPU if kind == "VRAM" else 0) for kind, device, _, _ in registered)
    assert all(nbytes >= manifest.table.arena_nbytes for _, nbytes in gpu)
    for what, (base, nbytes) in zip(("there", "here"), gpu, strict=True):
        rows = [one[1:] for one in asked if one[0] == what]
        stamps = [one for one in rows if one[0] == "DRAM"]
        assert [(one[1], one[3]) for one in stamps] == [(0, STAMP_NBYTES)]
        moved = [one for one in rows if one[0] == "VRAM"]
        assert sum(one[3] for one in moved) == manifest.table.arena_nbytes
        for _, device, address, size in moved:
            assert device == GPU
            assert base <= address
            assert address + size <= base + nbytes
    base, nbytes = gpu[1]
    found = [one.data_ptr() for one in tensors.values() if one.numel()]
    assert all(base <= address < base + nbytes for address in found), "it was copied"


def test_later_versions_ask_for_nothing_new(
    trainer: BridgeOver, rollout: BridgeOver, asked: list[tuple[str, Kind, int, int, int]]
) -> None:
    counts = []
    for version in range(1, 9):
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        rollout.import_update(manifest)
        for bridge in (rollout, trainer):
            bridge.release(manifest.update_id)
        counts.append(len(asked))
    assert len(set(counts[4:])) == 1, counts


class TestNIXL(InTorchMemory):
    pass


def test_a_gpu_that_is_not_there_is_refused_with_its_remedy() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with (
        make_weight_bridge("nixl", device=0) as bridge,
        pytest.raises(TransportUnavailable, match="Leave device= out"),
    ):
        bridge.publish({"w": torch.arange(5)}, weight_version=1)


@pytest.mark.parametrize("device", [-1, True, "0"])
def test_a_device_that_is_no_number_of_a_gpu_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="the number of a GPU"):
        make_weight_bridge("nixl", device=device)
