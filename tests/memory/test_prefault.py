"""After a flip nothing faults: every page of the new version is there before the engine sees it."""

import ctypes
import resource
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.memory.slots import SlotRing
from rl_bridge.memory.views import ImportedTensors
from tests.memory.slots_rig import SIZE, pin_of, tensor_of, view_of, write

NBYTES = 32 << 20
# The kernel maps 16 pages around a fault: 512 faults would be all of them. Python has a few.
FEW_FAULTS = 60


def faults_of_reading(tensor: torch.Tensor) -> int:
    """Read one byte of each page; how many page faults that takes."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    raw = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    sum(raw[: 64 * vm.PAGE : vm.PAGE])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sum(raw[:: vm.PAGE])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Engine:
    """An engine of one large tensor."""

    def __init__(self) -> None:
        self.tensors = {"w": torch.zeros(NBYTES, dtype=torch.uint8)}
        self.adapter = ModuleInstallAdapter(self.tensors, mode="flip", num_threads=1)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip."""
        self.adapter.prepare(manifest, tensors)
        self.adapter.install(manifest, tensors)
        self.adapter.prove()
        self.adapter.commit()


@pytest.fixture
def bridge() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", num_threads=1) as made:
        yield made


def publish(bridge: TensorBridge, version: int) -> WeightUpdateManifest:
    weights = {"w": torch.full((NBYTES,), version, dtype=torch.uint8)}
    return bridge.publish(weights, weight_version=version)


def test_engines_that_share_an_update_read_it_without_a_fault(bridge: TensorBridge) -> None:
    one, other = Engine(), Engine()
    for version in (1, 2, 3):
        manifest = publish(bridge, version)
        tensors = bridge.import_update(manifest)
        for engine in (one, other):
            engine.install(manifest, tensors)
            assert faults_of_reading(engine.tensors["w"]) < FEW_FAULTS, version


def test_an_update_that_is_installed_over_itself_and_undone_faults_nowhere(
    bridge: TensorBridge,
) -> None:
    engine = Engine()
    manifest = publish(bridge, 1)
    engine.install(manifest, bridge.import_update(manifest))
    engine.install(manifest, bridge.import_update(manifest))
    assert faults_of_reading(engine.tensors["w"]) < FEW_FAULTS
    tensors = bridge.import_update(manifest)
    engine.adapter.install(manifest, tensors)
    engine.adapter.undo()
    assert faults_of_reading(engine.tensors["w"]) < FEW_FAULTS
    assert bool((engine.tensors["w"] == 1).all())


def test_a_version_that_cannot_be_read_in_is_refused_before_the_flip(
    bridge: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    manifest = publish(bridge, 1)
    tensors = bridge.import_update(manifest)
    assert isinstance(tensors, ImportedTensors)

    for code, kind in ((12, WeightBridgeUnavailableError), (14, SegmentError)):
        with monkeypatch.context() as patch:
            patch.setattr("rl_bridge.memory.views.vm.prefault", failing(code))
            with pytest.raises(kind):
                engine.adapter.prepare(manifest, tensors)
    assert bool((engine.tensors["w"] == 0).all())


def failing(code: int) -> Callable[[int, int], None]:
    def fail(_address: int, _nbytes: int) -> None:
        raise OSError(code, "refused, as planned")

    return fail


# ---- the parts ----------------------------------------------------------------------------------


def test_absent_pages_are_found_and_prefaulted(ring: SlotRing) -> None:
    view = view_of(write(ring, 1))
    vm.drop_pages(view.address, SIZE)
    if vm.absent_ranges(view.address, SIZE) is None:
        pytest.skip("this kernel cannot tell which pages are there")
    assert vm.absent_ranges(view.address, SIZE) == [(view.address, SIZE)]
    vm.prefault(view.address + vm.PAGE, vm.PAGE)
    assert vm.absent_ranges(view.address + vm.PAGE, vm.PAGE) == []
    tensor = tensor_of(pin_of(view, 1))
    tensor[5] = 99
    view.prefault(SIZE)
    assert vm.absent_ranges(view.address, SIZE) == []
    assert tensor[5] == 99


def test_a_kernel_that_cannot_prefault_faults_later(
    ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(write(ring, 1))
    vm.drop_pages(view.address, SIZE)
    monkeypatch.setattr(vm, "populate", failing(22))
    view.prefault(SIZE)
    assert tensor_of(pin_of(view, 1)).tolist() == [1] * SIZE
